"""pdb on the line of the user's program where an error came from."""

from __future__ import annotations

import pdb
import sys

from ranklens_core.program import program_traceback


def stop_in_pdb(error: BaseException) -> None:
    """Open pdb at the innermost frame of the program's own traceback."""
    traceback = program_traceback(error)
    if traceback is None:
        print("ranklens: no frame of the program to stop in", file=sys.stderr)
        return
    pdb.post_mortem(traceback)
