"""``python -m ranklens_deepspeed [--config FILE] PROGRAM ARGS``: a DeepSpeed program as its config says.

PROGRAM is a ``.py`` file or ``-m module``. The config's ``"ranklens"`` block is taken from FILE, else from
the program's command line or main file.
"""

from __future__ import annotations

import os
import sys

import msgspec

from ranklens_core.cli.door import move_local_rank, run_as_set, run_door
from ranklens_core.errors import UsageError
from ranklens_core.patches import Patches
from ranklens_core.program import Program
from ranklens_core.settings import Settings, Spelling
from ranklens_deepspeed.activate import VARIABLE, watch
from ranklens_deepspeed.block import Block, config_file_block, find_block


def main() -> int:
    """Run the program as its config's block says; returns the exit status."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__.replace("``", ""))
        return 0 if sys.argv[1:] else 2
    file, rest = _split_config(sys.argv[1:])
    program = Program.parse(rest)
    if file is not None:
        block: Block | None = config_file_block(file)
    elif VARIABLE in os.environ:
        block = msgspec.json.decode(os.environ[VARIABLE], type=Block)
    else:
        block = find_block(program)
    with Patches() as patches:
        watch(block, patches)
        if block is None:
            return run_as_set(Settings(), program, Spelling("{}", "no config"))
        return run_as_set(block.settings(), program, block.spelling)


def _split_config(arguments: list[str]) -> tuple[str | None, list[str]]:
    """``--config FILE`` before PROGRAM, and the rest; the launcher's ``--local_rank`` may come first."""
    local_rank = arguments[:1] if arguments[0].startswith("--local_rank=") else []
    rest = arguments[len(local_rank) :]
    file = None
    if rest and rest[0].partition("=")[0] == "--config":
        flag, equals, file = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise UsageError(f"{flag} needs a file: a DeepSpeed config.")
            file = rest.pop(0)
    return file, move_local_rank([*local_rank, *rest])


if __name__ == "__main__":
    run_door(main)
