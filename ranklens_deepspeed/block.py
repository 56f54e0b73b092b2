"""The ``"ranklens"`` block of a DeepSpeed config: finding it before the program runs, and reading it.

Where a program keeps its config is its own affair. Found beforehand are: a file that the command line names
(``--deepspeed_config FILE``, the Hugging Face ``Trainer``'s ``--deepspeed FILE``), a dict that stands in the
program's main file as a literal, and a file that is named there in a call (``config="ds.json"``). Anything
else shows when DeepSpeed is given it.
"""

from __future__ import annotations

import ast
import base64
import binascii
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import hjson
import msgspec

from ranklens_core.errors import UsageError
from ranklens_core.program import Program
from ranklens_core.settings import Settings, Spelling, read_settings

NAME = "ranklens"
CONFIG_FLAGS = ("--deepspeed_config", "--deepspeed", "--deepspeed-config")
CONFIG_KEYWORDS = ("config", "config_params", "deepspeed", "config_dict_or_path", "deepspeed_config")
"""Keyword arguments by which DeepSpeed, and the ``Trainer``, take a config or its file."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A block as it was written: its values, and where (``ds.json``, ``train.py:12``)."""

    values: dict[str, Any]
    where: str

    @property
    def spelling(self) -> Spelling:
        """How messages name its keys."""
        return Spelling(f'"{NAME}"."{{}}"', self.where)

    def settings(self) -> Settings:
        """The block, checked. Raises ``UsageError`` that names key, allowed values and file."""
        return read_settings(self.values, self.spelling)


def block_of(config: object, where: str) -> Block | None:
    """The block in what DeepSpeed takes as a config: a dict, a path, or base64 of JSON; None without one.

    ``where`` names a config that is no file. What is no config at all is DeepSpeed's to refuse.

    Raises:
        UsageError: the block is no object.
    """
    if isinstance(config, str | os.PathLike):
        found = _loaded(os.fspath(config))
        if found is None:
            return None
        where = os.fspath(config) if os.path.isfile(config) else where
        config = found
    if not isinstance(config, Mapping) or NAME not in config:
        return None
    values = config[NAME]
    if not isinstance(values, Mapping):
        raise UsageError(
            f'{where}: "{NAME}" is {values!r}, but has to be an object like {{"mode": "record"}}.'
        )
    return Block(values={str(key): value for key, value in values.items()}, where=where)


def find_block(program: Program) -> Block | None:
    """The block of the program that is about to run, if it is to be found without running it.

    Raises:
        UsageError: a block is no object, or two blocks differ.
    """
    found = list(_on_command_line(program.args)) or list(_in_source(program))
    for other in found[1:]:
        if other.values != found[0].values:
            raise UsageError(
                f'There are two different "{NAME}" blocks, in {found[0].where} and {other.where}: say '
                "which one counts with `python -m ranklens_deepspeed --config FILE PROGRAM ...`."
            )
    return found[0] if found else None


def config_file_block(file: str) -> Block:
    """The block of a config file that was asked for. Raises ``UsageError`` if there is no such block."""
    if not os.path.isfile(file):
        raise UsageError(f"--config {file}: there is no such file in {os.getcwd()}.")
    block = block_of(file, file)
    if block is None:
        raise UsageError(f'--config {file}: it is no DeepSpeed config with a "{NAME}" block.')
    return block


def _on_command_line(arguments: Sequence[str]) -> Iterator[Block]:
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag not in CONFIG_FLAGS:
            continue
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        block = block_of(value, flag)
        if block is not None:
            yield block


def _in_source(program: Program) -> Iterator[Block]:
    path = program.source_path()
    if path is None:
        return
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return  # python itself will say what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from _in_literal(node, os.path.basename(path))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                file_name = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in CONFIG_KEYWORDS and isinstance(file_name, str):
                    block = block_of(file_name, file_name)
                    if block is not None:
                        yield block


def _in_literal(node: ast.Dict, file: str) -> Iterator[Block]:
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == NAME:
            try:
                values = ast.literal_eval(value)
            except ValueError:
                continue  # it is computed: it shows when DeepSpeed is given it
            block = block_of({NAME: values}, f"{file}:{value.lineno}")
            if block is not None:
                yield block


def _loaded(config: str) -> object:
    """What DeepSpeed would make of a config given as a string; None for what it would refuse."""
    try:
        if os.path.isfile(config):
            with open(config, encoding="utf-8") as file:
                loaded: object = hjson.load(file)
        else:
            loaded = hjson.loads(base64.urlsafe_b64decode(config).decode())
    except (OSError, ValueError, binascii.Error):
        return None
    return loaded
