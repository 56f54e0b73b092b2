"""The environment is part of the recording: threads, flags, random state, variables, versions.

The same program with another number of threads gives gradients that differ in the last bit. What
can be restored is restored; every difference is reported.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import random
import re
from collections.abc import Callable, Iterable
from importlib import metadata

import numpy as np
import torch

from ranklens_core.errors import TraceDamagedError
from ranklens_core.patches import Patches
from ranklens_core.schema import EnvironmentItem
from ranklens_core.verdict import EnvironmentDifference

VERSIONED = ("deepspeed", "megatron-core", "torch", "numpy", "transformers", "ranklens")
"""Distributions whose version belongs to a recording, frameworks first."""

BYPASSED = "bypassed"
"""Kind of the item that says by which library the job communicated past torch.distributed."""

_DECIDES_NUMBERS = re.compile(
    r"(OMP|MKL|OPENBLAS|KMP)_\w+|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32\w*"
    r"|PYTHONHASHSEED|ATEN_CPU_CAPABILITY|DNNL_\w+|ONEDNN_\w+|NVTE_\w+|CUDA_DEVICE_MAX_CONNECTIONS"
)
"""Variables that libraries read in C, where reading goes unseen, and that change results."""

_NOT_THE_PROGRAMS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|(GROUP|ROLE|CROSS|TORCHELASTIC|MASTER|OMPI|PMI"
    r"|PMIX|SLURM|RANKLENS|SSH|XDG|LC|PYTEST|VSCODE|PYDEVD|DEBUGPY)_\w+|PATH|PYTHON(PATH|HOME|STARTUP)|HOME|PWD"
    r"|OLDPWD|TMPDIR|TEMP|TMP|TERM|COLORTERM|COLUMNS|LINES|USER|LOGNAME|HOSTNAME|SHELL|SHLVL|LANG|LANGUAGE"
    r"|VIRTUAL_ENV\w*|CI|_|DISPLAY|TZ|CUDA_VISIBLE_DEVICES|NO_COLOR|FORCE_COLOR|FORCE_TERMINAL"
)
"""Variables of the shell, the host or the launcher: they describe where a process is, not the job."""

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|COOKIE|AUTH|DSN|PROXY", re.IGNORECASE)


MAX_THREADS = 1 << 12
"""More than any machine has; starting them would end the process."""

_SAFE_VALUE = re.compile(r"[\w.,:;=+ -]*", re.ASCII)
_LEGAL_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_UNSAFE_NAME = re.compile(
    r"(LD|DYLD|PYTHON|GIT|PIP)\w*|CC|CXX|NVCC\w*|\w*(PLUGIN|PRELOAD|EXEC|CMD|COMMAND|HOOK)\w*"
    r"|\w*(PATH|HOME|DIR|CACHE|(?<!PRO)FILE|CONF|CONFIG|LIB|LIBRARY|LIBRARIES|MODULES|BUNDLE|ALIASES)(_\w*)?"
    r"|\w*(FLAGS|OPTIONS|EDITOR|VISUAL|PAGER|BROWSER|_TRACE|_OUT)|(BASH_)?ENV",
    re.IGNORECASE,
)
"""A trace is a stranger's data: it may set numbers and switches, never name a file, a module or a
program that something here would load or start. PYTHON*: too late, python reads them as it starts."""


def is_program_variable(name: str) -> bool:
    """Whether a variable may be kept in a trace: the job's own, and nothing that looks secret."""
    return not _NOT_THE_PROGRAMS.fullmatch(name) and not _SECRET.search(name)


class VariableReads:
    """Tells ``on_read`` of each variable that the program reads, once, as it is at that moment."""

    def __init__(self, on_read: Callable[[EnvironmentItem], None]) -> None:
        self._seen: set[str] = set()
        self._patches = Patches()
        getitem = os._Environ.__getitem__

        def watched(environ: os._Environ[str], name: str) -> str:
            if name in self._seen or not isinstance(name, str):
                return getitem(environ, name)
            self._seen.add(name)
            keep = is_program_variable(name)
            try:
                value = getitem(environ, name)
            except KeyError:
                if keep:
                    on_read(EnvironmentItem(kind="unset", name=name, value=""))
                raise
            if keep:
                on_read(EnvironmentItem(kind="variable", name=name, value=value))
            return value

        self._patches.set(os._Environ, "__getitem__", watched)

    def remove(self) -> None:
        """Watch no longer. Idempotent."""
        self._patches.undo()


def versions() -> list[EnvironmentItem]:
    """Versions of Python and of the installed ``VERSIONED`` distributions."""
    found = [EnvironmentItem(kind="version", name="python", value=platform.python_version())]
    for name in VERSIONED:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(EnvironmentItem(kind="version", name=name, value=version.split("+")[0]))
    return found


def capture() -> list[EnvironmentItem]:
    """What the program starts with, variables that it will read itself excepted."""
    items = versions()
    items.extend(
        EnvironmentItem(kind="variable", name=name, value=value)
        for name, value in sorted(os.environ.items())
        if _DECIDES_NUMBERS.fullmatch(name)
    )
    items.extend(EnvironmentItem(kind=kind, name=name, value=read()) for kind, name, read, _ in _SETTINGS)
    return items


def restore(recorded: Iterable[EnvironmentItem], patches: Patches) -> list[EnvironmentDifference]:
    """Make the environment as recorded where that is possible; list every difference.

    A variable that is set here to another value is the user's wish and stays, unless it decides
    numbers (threads, workspaces). Changes go through ``patches``.
    """
    differences: list[EnvironmentDifference] = []
    settings = {(kind, name): (read, write) for kind, name, read, write in _SETTINGS}
    here = {item.name: item.value for item in versions()}
    for item in recorded:
        if item.kind in ("variable", "unset"):
            difference = _restore_variable(item, patches)
        elif item.kind == "version":
            now = here.get(item.name, "not installed")
            difference = _difference(item, now, restored=False)
        elif item.kind == BYPASSED:
            continue  # no fact to restore: the replay comes to the same place, and stops there
        elif (item.kind, item.name) in settings:
            read, write = settings[(item.kind, item.name)]
            now = read()
            if now != item.value or item.kind == "random":  # the program will draw numbers
                patches.on_undo(write, now)
                _write_setting(write, item)
            # random state always differs and is always restored: nothing to report
            difference = None if item.kind == "random" else _difference(item, now, restored=True)
        else:
            difference = _difference(item, "unknown to this RankLens", restored=False)
        if difference is not None:
            differences.append(difference)
    return differences


def _write_setting(write: Callable[[str], None], item: EnvironmentItem) -> None:
    try:
        write(item.value)
    except Exception as error:  # a trace can say anything, and each library has its own words for no
        raise TraceDamagedError(
            f"The trace's {item.name} cannot be restored ({type(error).__name__}: {str(error)[:200]}): "
            "it is not what RankLens recorded. Copy the trace again, or record it again."
        ) from error


def _restore_variable(item: EnvironmentItem, patches: Patches) -> EnvironmentDifference | None:
    now = os.environ.get(item.name)
    recorded = None if item.kind == "unset" else item.value
    if now == recorded:
        return None
    restored = (
        recorded is not None
        and (now is None or bool(_DECIDES_NUMBERS.fullmatch(item.name)))
        and is_program_variable(item.name)
        and bool(_LEGAL_NAME.fullmatch(item.name))
        and bool(_SAFE_VALUE.fullmatch(recorded))
        and not _UNSAFE_NAME.fullmatch(item.name)
    )
    if restored and recorded is not None:
        patches.setitem(os.environ, item.name, recorded)
    return EnvironmentDifference(
        what=item.name,
        recorded="unset" if recorded is None else recorded,
        now="unset" if now is None else now,
        restored=restored,
    )


def _difference(item: EnvironmentItem, now: str, *, restored: bool) -> EnvironmentDifference | None:
    if now == item.value:
        return None
    return EnvironmentDifference(what=item.name, recorded=item.value, now=now, restored=restored)


def _random_state() -> str:
    version, state, gauss = random.getstate()
    return json.dumps([version, list(state), gauss])


def _set_random_state(text: str) -> None:
    version, state, gauss = json.loads(text)
    random.setstate((version, tuple(state), gauss))


def _numpy_state() -> str:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return json.dumps([kind, np.asarray(keys).tolist(), position, has_gauss, gauss])


def _set_numpy_state(text: str) -> None:
    kind, keys, position, has_gauss, gauss = json.loads(text)
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def _torch_state() -> str:
    return base64.b64encode(bytes(torch.get_rng_state().tolist())).decode()


def _set_torch_state(text: str) -> None:
    torch.set_rng_state(torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8))


def _set_deterministic(text: str) -> None:
    torch.use_deterministic_algorithms(text != "off", warn_only=text == "warn")


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _set_threads(text: str) -> None:
    if int(text) > MAX_THREADS:
        raise ValueError(f"{text} threads")
    torch.set_num_threads(int(text))


def _flag(owner: object, name: str) -> tuple[Callable[[], str], Callable[[str], None]]:
    return (
        lambda: str(bool(getattr(owner, name))),
        lambda text: setattr(owner, name, text == "True"),
    )


_SETTINGS: tuple[tuple[str, str, Callable[[], str], Callable[[str], None]], ...] = (
    (
        "threads",
        "torch threads",
        lambda: str(torch.get_num_threads()),
        _set_threads,
    ),
    ("flag", "deterministic algorithms", _deterministic, _set_deterministic),
    (
        "flag",
        "float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    ("flag", "cudnn.deterministic", *_flag(torch.backends.cudnn, "deterministic")),
    ("flag", "cudnn.benchmark", *_flag(torch.backends.cudnn, "benchmark")),
    ("flag", "cudnn.allow_tf32", *_flag(torch.backends.cudnn, "allow_tf32")),
    ("random", "python random", _random_state, _set_random_state),
    ("random", "numpy random", _numpy_state, _set_numpy_state),
    ("random", "torch random", _torch_state, _set_torch_state),
)
"""(kind, name, read, write) of everything that is not a variable or a version."""
