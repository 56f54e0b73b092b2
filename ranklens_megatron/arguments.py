"""The ``--ranklens-*`` flags of a Megatron script: taken off its command line, and known to its parser."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ranklens_core import active
from ranklens_core.errors import UsageError
from ranklens_core.import_hook import ImportHook
from ranklens_core.patches import Patches
from ranklens_core.settings import KEYS, Settings, Spelling, read_settings
from ranklens_core.start_over import start_over

log = logging.getLogger("ranklens")

FLAG = "--ranklens-"
SPELLING = Spelling(FLAG + "{}", "command line", dashes=True)
SWITCHES = ("overwrite",)
"""Settings whose flag takes no value."""

MEGATRON_ARGUMENTS = "megatron.training.arguments"
"""Megatron-LM's module with ``add_megatron_arguments(parser)``, to which every training script's
``parse_args`` goes (core_v0.9 to main)."""

_given: dict[str, Any] = {}
"""The flags of the program that this process runs; ``parser_learns`` sets them."""


def split_arguments(arguments: Sequence[str]) -> tuple[Settings, dict[str, Any], list[str]]:
    """``arguments`` as settings, the flags' values by name, and what is left for the program.

    A flag is ``--ranklens-KEY VALUE`` or ``--ranklens-KEY=VALUE``, anywhere.

    Raises:
        UsageError: an unknown flag, a flag without value or given twice, or a value that is not allowed.
    """
    values: dict[str, Any] = {}
    rest: list[str] = []
    waiting = list(arguments)
    while waiting:
        token = waiting.pop(0)
        if not token.startswith(FLAG):
            rest.append(token)
            continue
        flag, equals, value = token.partition("=")
        name = flag.removeprefix(FLAG).replace("-", "_")
        if name in values:
            raise UsageError(f"command line: {flag} is there twice.")
        if name in SWITCHES:
            if equals:
                raise UsageError(f"command line: {flag} takes no value.")
            values[name] = True
        elif name in KEYS and not equals:
            if not waiting or waiting[0].startswith("--"):
                raise UsageError(f"command line: {flag} needs a value: {KEYS[name].allowed}.")
            values[name] = waiting.pop(0)
        else:
            values[name] = value
    return read_settings(values, SPELLING), values, rest


def add_ranklens_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Teach ``parser`` the ``--ranklens-*`` flags; call it before the arguments are parsed and before
    ``init_process_group``. Returns ``parser``.

    Where the script was started by itself and a flag is on its command line, it is started over as
    ``python -m ranklens_megatron SCRIPT ARGS``: what the script has done until now is done again.

    Raises:
        UsageError: a wrong flag, or one given to a process that cannot be started over.
    """
    _add_group(parser, _given)
    if not active.is_active and any(argument.startswith(FLAG) for argument in sys.argv[1:]):
        split_arguments(sys.argv[1:])
        start_over("ranklens_megatron")
    return parser


def parser_learns(values: Mapping[str, Any], patches: Patches) -> None:
    """From now on Megatron-LM's own parser knows the flags, with ``values`` as what was given."""
    _given.clear()
    _given.update(values)
    patches.on_undo(_given.clear)
    hook = ImportHook({MEGATRON_ARGUMENTS: lambda: _teach(patches)})
    patches.on_undo(hook.remove)


def _teach(patches: Patches) -> None:
    module = sys.modules[MEGATRON_ARGUMENTS]
    add_arguments: Callable[..., Any] | None = getattr(module, "add_megatron_arguments", None)
    if add_arguments is None:
        log.warning(
            "%s has no add_megatron_arguments: --help does not show the --ranklens-* flags",
            MEGATRON_ARGUMENTS,
        )
        return

    def with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        taught: argparse.ArgumentParser = add_arguments(parser)
        return _add_group(taught, _given)

    patches.set(module, "add_megatron_arguments", with_ours)


def _add_group(parser: argparse.ArgumentParser, values: Mapping[str, Any]) -> argparse.ArgumentParser:
    """The flags as ``args.ranklens_*``, for the help and for programs that look at them. The door has taken
    them off the command line: their values are the parser's defaults."""
    if any(action.dest == "ranklens_mode" for action in parser._actions):
        return parser  # the script adds them itself, and its parser is Megatron's
    group = parser.add_argument_group(
        title="ranklens", description="Record this job, or replay one of its ranks alone (RankLens)."
    )
    for name, key in KEYS.items():
        flag = SPELLING.key(name)
        about = f"{key.about[0].upper()}{key.about[1:]}. {key.allowed[0].upper()}{key.allowed[1:]}."
        about = about.replace("%", "%%")
        if name in SWITCHES:
            group.add_argument(flag, action="store_true", default=values.get(name, False), help=about)
        else:
            kind = int if name in ("rank", "world_size") else str
            default = values.get(name)
            group.add_argument(
                flag,
                type=kind,
                default=None if default is None else kind(default),
                metavar=name.rpartition("_")[2].upper(),
                help=about,
            )
    return parser
