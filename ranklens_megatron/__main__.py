"""``python -m ranklens_megatron PROGRAM ARGS [--ranklens-KEY VALUE]...``: a Megatron script under RankLens.

PROGRAM is a ``.py`` file or ``-m module``; the ``--ranklens-*`` flags stand anywhere after it.
"""

from __future__ import annotations

import sys

from ranklens_core.cli.door import move_local_rank, run_as_set, run_door
from ranklens_core.patches import Patches
from ranklens_core.program import Program
from ranklens_megatron.arguments import SPELLING, parser_learns, split_arguments


def main() -> int:
    """Run the program as its ``--ranklens-*`` flags say; returns the exit status."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__.replace("``", ""))
        return 0 if sys.argv[1:] else 2
    settings, values, rest = split_arguments(move_local_rank(sys.argv[1:]))
    program = Program.parse(rest)
    with Patches() as patches:
        parser_learns(values, patches)
        return run_as_set(settings, program, SPELLING)


if __name__ == "__main__":
    run_door(main)
