"""Obeying the block from inside a program: at the import of this package, or when a config shows itself.

RankLens has to be in place before the program communicates, and to see how it ends. So the program is
started over, in the same process, as ``python -m ranklens_deepspeed PROGRAM ARGS``: nothing has been sent by
then, and what it has done is done again.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from ranklens_core import active
from ranklens_core.errors import UsageError
from ranklens_core.import_hook import ImportHook
from ranklens_core.own_command import started_as
from ranklens_core.patches import Patches
from ranklens_core.program import Program
from ranklens_core.settings import Mode
from ranklens_core.start_over import start_over
from ranklens_deepspeed.block import NAME, Block, block_of, find_block

VARIABLE = "RANKLENS_DEEPSPEED"
"""Carries the block into the program that is started over, as JSON of ``Block``."""

CONFIG_TAKERS = (
    ("deepspeed", "", "initialize", ("config", "config_params", "args")),
    ("deepspeed.runtime.config", "DeepSpeedConfig", "__init__", ("config",)),
    ("deepspeed.runtime.zero.partition_parameters", "Init", "__init__", ("config_dict_or_path", "config")),
)
"""(module, class or "", function, arguments): what a program gives its config to."""

_watching = Patches()


def activate(config: object) -> None:
    """Obey the ``"ranklens"`` block of ``config`` (dict, path or base64 of JSON), if it has one.

    Call it before ``deepspeed.init_distributed()`` where the config is computed, so that RankLens cannot find
    it by itself. Does nothing where the program runs under RankLens already.

    Raises:
        UsageError: a wrong block, or ``torch.distributed`` is initialised already.
    """
    seen(block_of(config, "the config given to ranklens_deepspeed.activate"), None)


def on_import() -> None:
    """What importing this package does: obey the block that can be found now, else watch for one."""
    started = started_as()
    if active.is_active or started is None or started.is_ranklens:
        return
    program = Program(started.program[-1], is_module=len(started.program) == 2, args=started.args)
    block = find_block(program)
    if block is not None:
        seen(block, None)
    watch(block, _watching)


def watch(expected: Block | None, patches: Patches) -> None:
    """Look at each config that DeepSpeed is given, until ``patches`` are undone: the block in it has to be
    the ``expected`` one."""

    def given(config: object, where: str) -> None:
        seen(block_of(config, where), expected)

    def watch_taker(module: str, cls: str, function: str, names: tuple[str, ...]) -> None:
        owner = getattr(sys.modules[module], cls) if cls else sys.modules[module]
        patches.set(owner, function, _telling(getattr(owner, function), given, names))

    hook = ImportHook({taker[0]: functools.partial(watch_taker, *taker) for taker in CONFIG_TAKERS})
    patches.on_undo(hook.remove)


def seen(block: Block | None, expected: Block | None) -> None:
    """A config with ``block`` shows itself; ``expected`` is what is obeyed already.

    Raises:
        UsageError: the block is wrong, differs from the ``expected`` one, or comes too late.
    """
    if block is None:
        return
    settings = block.settings()
    if expected is not None:
        if expected.values != block.values:
            raise UsageError(
                f'{block.where}: its "{NAME}" block is not the one that this run obeys, which is in '
                f"{expected.where}. Name it: `python -m ranklens_deepspeed --config FILE PROGRAM ...`."
            )
        return
    if active.is_active or settings.acting_mode is Mode.OFF:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError(
            f'{block.where}: the "{NAME}" block was found after torch.distributed was initialised. Let '
            "RankLens know the config earlier: `python -m ranklens_deepspeed --config FILE PROGRAM ...`, or "
            "`ranklens_deepspeed.activate(config)` before deepspeed.init_distributed()."
        )
    os.environ[VARIABLE] = msgspec.json.encode(block).decode()
    start_over("ranklens_deepspeed")


def _telling(
    function: Callable[..., Any], given: Callable[[object, str], None], names: tuple[str, ...]
) -> Callable[..., Any]:
    """``function`` that first tells of each config among its arguments ``names``."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def patched(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind_partial(*args, **kwargs).arguments
        for name in names:
            config = arguments.get(name)
            # parsed arguments carry the file that `--deepspeed_config` named
            given(getattr(config, "deepspeed_config", config), f"the {name} given to {function.__qualname__}")
        return function(*args, **kwargs)

    return patched
