"""Where the shipped configuration files are: ``configs/`` of a checkout, or inside the wheel.

The wheel carries the checkout's ``configs`` as ``ranklens_core/_configs`` (pyproject.toml).
"""

from __future__ import annotations

from pathlib import Path

from ranklens_core.errors import UsageError

_PACKAGE = Path(__file__).resolve().parent


def configs_dir() -> Path:
    """The directory with ``network/``, ``target/``, ... YAML files, absolute.

    Raises ``UsageError`` if the installation lacks it.
    """
    return _find(_PACKAGE)


def _find(package: Path) -> Path:
    installed = package / "_configs"
    if installed.is_dir():
        return installed
    checkout = package.parent
    # pyproject.toml beside it: a directory called "configs" in site-packages is somebody else's.
    if (checkout / "configs").is_dir() and (checkout / "pyproject.toml").is_file():
        return checkout / "configs"
    raise UsageError(
        f"RankLens' configuration files are neither at {installed} nor at {checkout / 'configs'}; "
        "install ranklens again (pip install --force-reinstall ranklens)"
    )
