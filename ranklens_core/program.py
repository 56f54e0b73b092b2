"""The user's program: what follows ``--`` on the command line, and running it as ``__main__``.
 ``Program.run`` does in this process what ``python PROGRAM ARGS`` does in a fresh one. ``runpy`` is not
used: it takes its temporary ``__main__`` out of ``sys.modules`` as soon as the code ends and puts its own
frames into every traceback.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType, TracebackType

import xxhash

from ranklens_core.errors import UsageError
from ranklens_core.program_end import ProgramEnd

_PYTHON_NAME = re.compile(r"python(\d+(?:\.\d+)?)?(?:\.exe)?")
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Program:
    """A ``.py`` file or a module, with its arguments.

    ``target`` is the file's path as the user wrote it, or the dotted module name when ``is_module``.
    """

    target: str
    is_module: bool = False
    args: tuple[str, ...] = ()

    @classmethod
    def parse(cls, tokens: Sequence[str]) -> Program:
        """Read ``[python] FILE.py ARGS...`` or ``[python] -m MODULE ARGS...``.

        Raises:
            UsageError: nothing there, another executable, an option of the interpreter, or no such file or
                module.
        """
        rest = list(tokens)
        if rest and _PYTHON_NAME.fullmatch(os.path.basename(rest[0])):
            _check_interpreter(rest.pop(0))
        if not rest:
            raise UsageError("no program: write it after `--`, as in `-- train.py` or `-- -m pkg.train`")
        first, *args = rest
        if first.startswith("-m"):
            name = first[2:] or (args.pop(0) if args else "")
            program = cls(name, is_module=True, args=tuple(args))
            if not name or program.source_path() is None:
                raise UsageError(f"no module named {name!r} in {os.getcwd()} or the installed packages")
            return program
        if first.startswith("-"):
            raise UsageError(
                f"{first}: options of the interpreter belong to RankLens's own: "
                f"`python {first} -m ranklens_core ... -- PROGRAM`"
            )
        launcher = os.path.basename(first)
        if launcher in _LAUNCHERS:
            raise UsageError(
                f"{launcher} starts RankLens, not the other way round: `{launcher} ... -m "
                f"ranklens_core record -- PROGRAM`; or let RankLens start the ranks (--nproc)"
            )
        if not first.endswith(".py"):
            raise UsageError(f"{first}: PROGRAM is a .py file or `-m module`; RankLens runs Python only")
        if not os.path.isfile(first):
            raise UsageError(f"{first}: no such program file (working directory {os.getcwd()})")
        return cls(first, args=tuple(args))

    def describe(self) -> str:
        """The command line after ``python``, quoted for a shell."""
        return shlex.join((*(("-m",) if self.is_module else ()), self.target, *self.args))

    def import_directory(self) -> str:
        """What python puts first into ``sys.path``: the script's directory, or the working directory for
        ``-m``."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.target))

    def source_path(self) -> str | None:
        """The main file's absolute path, found without importing anything; None for a module that is not
        there."""
        if not self.is_module:
            return os.path.abspath(self.target)
        spec = _find_spec(self.target, self.import_directory())
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _find_spec(f"{self.target}.__main__", self.import_directory())
        return spec.origin if spec is not None and spec.has_location else None

    def fingerprint(self) -> str:
        """xxh3-128 of the main file's bytes, 32 hex digits.

        Raises:
            UsageError: the file or module is not there any more.
        """
        path = self.source_path()
        try:
            with open(path or self.target, "rb") as file:
                return xxhash.xxh3_128_hexdigest(file.read())
        except OSError as error:
            raise UsageError(f"cannot read the program {self.describe()}: {error}") from error

    def run(self) -> None:
        """Execute the program as ``__main__`` in this process; returns when it and its threads end.

        Its exceptions, ``SystemExit`` among them, pass through; ``print_program_error`` shows them as
        python would. Afterwards ``sys.argv``, ``sys.path`` and the previous ``__main__`` are back. Modules
        that the program imported stay imported: taking a framework out of ``sys.modules`` would break it.
        """
        main = ModuleType("__main__")
        with self.import_path(), _as_main(main, [self.target if not self.is_module else "-m", *self.args]):
            code = self._load_module(main) if self.is_module else self._load_script(main)
            with ProgramEnd() as end:
                try:
                    exec(code, main.__dict__)
                except SystemExit:
                    end.finish()
                    raise
                end.finish()

    @contextlib.contextmanager
    def import_path(self) -> Iterator[None]:
        """``sys.path`` as the program will see it; put back on exit.

        RankLens's own entry (the console script's directory, or the working directory for ``python -m``)
        goes, as it could shadow installed packages; the directory that holds RankLens moves to the end
        where nothing else has it.
        """
        saved, first = sys.path[:], self.import_directory()
        own = _own_path_entry()
        rest = sys.path[1:] if sys.path and sys.path[0] in (own, first) else sys.path[:]
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        sys.path[:] = [first, *rest, *(() if home in rest else (home,))]
        try:
            yield
        finally:
            sys.path[:] = saved

    def _load_script(self, main: ModuleType) -> CodeType:
        path = os.path.abspath(self.target)
        loader = SourceFileLoader("__main__", path)
        main.__dict__.update(
            __file__=path, __loader__=loader, __package__=None, __spec__=None, __cached__=None
        )
        with io.open_code(path) as file:
            # Without dont_inherit this file's own `from __future__` would reach into the program.
            return compile(file.read(), path, "exec", dont_inherit=True)

    def _load_module(self, main: ModuleType) -> CodeType:
        name = self.target
        parent = name.rpartition(".")[0]
        if parent:
            __import__(parent)  # unlike import_module, leaves no frames of importlib in a traceback
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            __import__(name)
            spec = importlib.util.find_spec(f"{name}.__main__")
        get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
        code = get_code(spec.name) if spec is not None and get_code is not None else None
        if spec is None or code is None:
            raise UsageError(f"{name} cannot be run: no module of that name with Python code")
        main.__dict__.update(
            __file__=spec.origin,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
            __cached__=spec.cached,
        )
        sys.argv[0] = spec.origin or name
        assert isinstance(code, CodeType)
        return code


def exit_status(error: SystemExit) -> int:
    """The process status (0-255) python gives a ``SystemExit``; a message is printed to stderr and counts
    as 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return 1


def flush_output() -> None:
    """Flush stdout and stderr, whatever the program has made of them: python passes over closed and deleted
    ones too."""
    for stream in (getattr(sys, "stdout", None), getattr(sys, "stderr", None)):
        # a program's own stream may have no more than write and flush
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def print_program_error(error: BaseException) -> None:
    """Show an exception of the program as python would: through ``sys.excepthook``, from its own first
    frame."""
    error.__traceback__ = program_traceback(error)  # python's own hook looks there, whatever it is given
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exc()
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)
    flush_output()


def program_traceback(error: BaseException) -> TracebackType | None:
    """The traceback from the program's first frame on; None if none is the program's (a syntax error,
    say)."""
    frame = own = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            own = frame.tb_next
        frame = frame.tb_next
    return own


@contextlib.contextmanager
def _as_main(main: ModuleType, argv: list[str]) -> Iterator[None]:
    previous_main, previous_argv = sys.modules["__main__"], sys.argv
    sys.modules["__main__"], sys.argv = main, argv
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv = previous_main, previous_argv


def _own_path_entry() -> str | None:
    """The ``sys.path`` entry that python added for the process's own main module."""
    if sys.flags.safe_path:
        return None
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return os.getcwd()
    file = getattr(main, "__file__", None)
    return os.path.dirname(os.path.realpath(file)) if file else ""


def _check_interpreter(token: str) -> None:
    """Accept only what names the interpreter that runs now."""
    version = _PYTHON_NAME.fullmatch(os.path.basename(token))
    running = (str(sys.version_info.major), f"{sys.version_info.major}.{sys.version_info.minor}")
    same_place = os.path.dirname(token) == "" or (
        os.path.abspath(os.path.dirname(token)) == os.path.dirname(os.path.abspath(sys.executable))
    )
    if not same_place or (version and version[1] and version[1] not in running):
        raise UsageError(
            f"{token} is not the interpreter RankLens runs in ({sys.executable}); "
            f"start RankLens from it: `{token} -m ranklens_core ...`"
        )


def _find_spec(name: str, directory: str) -> ModuleSpec | None:
    """``importlib.util.find_spec`` that looks in ``directory`` first and does not import the parent
    packages."""
    spec: ModuleSpec | None = None
    path: Sequence[str] | None = None
    for index in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:index])
        spec = PathFinder.find_spec(part, [directory]) if path is None else None
        for finder in sys.meta_path if spec is None else ():
            spec = finder.find_spec(part, path)
            if spec is not None:
                break
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec
