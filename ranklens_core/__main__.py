"""``python -m ranklens_core`` is ``ranklens``."""

from ranklens_core.cli import main

if __name__ == "__main__":
    main()
