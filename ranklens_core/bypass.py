"""Communication that goes past torch.distributed, and that RankLens therefore cannot record or stand in for.

A library that is only imported is no such communication: programs import what they do not use, and libraries
look which of them are there. So what is watched is its *use*: making a communicator, allocating a buffer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ranklens_core.errors import UnsupportedError
from ranklens_core.import_hook import ImportHook
from ranklens_core.patches import Patches

log = logging.getLogger("ranklens")


@dataclass(frozen=True)
class Library:
    """A way past torch.distributed: its ``name`` in the verdict, what to use instead (``remedy``), and the
    ``entries`` by which it is used, each ``module:function`` or ``module:Class.method``."""

    name: str
    remedy: str
    entries: tuple[str, ...]


LIBRARIES = (
    Library(
        "Transformer Engine userbuffers",
        "switch the overlap off (Megatron: leave out --tp-comm-overlap)",
        (
            "transformer_engine.pytorch.module.base:initialize_ub",
            "transformer_engine_torch:CommOverlap.__init__",
            "transformer_engine_torch:CommOverlapP2P.__init__",
        ),
    ),
    Library(
        "DeepEP",
        "dispatch tokens with all-to-all (Megatron: --moe-token-dispatcher-type alltoall)",
        (
            "deep_ep.buffer:Buffer.__init__",
            "deep_ep.hybrid_ep_buffer:HybridEPBuffer.__init__",
            "deep_ep.buffers.elastic:ElasticBuffer.__init__",
        ),
    ),
    Library(
        "NVSHMEM",
        "use collectives of torch.distributed",
        (
            "nvshmem.core.init_fini:init",
            "nvshmem.bindings.nvshmem:hostlib_init_attr",
            "pynvshmem:init_nvshmem_by_torch_process_group",
        ),
    ),
    Library(
        "symmetric memory",
        "use collectives of torch.distributed (torch.compile: leave micro-pipelined TP off)",
        (
            "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
            "torch.distributed._symmetric_memory:rendezvous",
            "torch.distributed._symmetric_memory:get_symm_mem_workspace",
        ),
    ),
    Library(
        "DeepCompile",
        'leave "compile": {"deepcompile": true} out of the DeepSpeed config',
        ("deepspeed.ops.op_builder.dc:DeepCompileBuilder.load",),
    ),
    Library(
        "own NCCL communicator",
        "make the group with torch.distributed.new_group",
        (
            "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.__init__",
            "cupy_backends.cuda.libs.nccl:NcclCommunicator.__init__",
            "nccl.core.communicator:Communicator.init",
            "torch.cuda.nccl:init_rank",
        ),
    ),
    Library(
        "MSCCL++",
        "make the group with torch.distributed.new_group",
        ("mscclpp.comm:CommGroup.__init__", "mscclpp._core.comm:CommGroup.__init__"),
    ),
)
"""What is known by its Python entry points; ``MPI`` and C functions (``NATIVE``) are watched apart."""

MPI = Library(
    "own MPI communicator", "use the group that torch.distributed makes", ("mpi4py.MPI:COMM_WORLD",)
)

NATIVE = (
    ("NVSHMEM", re.compile(r"nvshmem(x|i)?_(hostlib_)?init\w*")),
    ("own NCCL communicator", re.compile(r"ncclCommInit\w*")),
    ("own MPI communicator", re.compile(r"MPI_(Send|Isend|Recv|Irecv|Bcast|I?[Aa]ll\w+|Reduce\w*|Barrier)")),
)
"""Library -> C functions that show its use when they are called through ctypes."""

MPI_COMMUNICATES = re.compile(
    r"(i|p)?(bcast|barrier|(all)?gatherv?|scatterv?|(all)?reduce(_scatter(_block)?)?|alltoall[vw]?|scan|exscan"
    r"|[bsr]?send|recv|sendrecv|Dup|Split(_type)?|Create(_group)?)(_init|_multiple|_replace)?",
    re.IGNORECASE,
)
"""Methods of an MPI communicator that reach other ranks, or make another one that does."""

BOOTSTRAP = "deepspeed/comm/comm.py"
"""Asks MPI for ranks and addresses before torch.distributed is there, as a launcher would."""


class Bypasses:
    """Watches for the use of ``LIBRARIES`` from creation until ``remove``.

    ``on_use(name, message)`` is told of every use, before it happens; what it raises reaches the program.
    ``used`` lists the names of what was used, in order, each once.
    """

    def __init__(self, on_use: Callable[[str, str], None]) -> None:
        self._on_use = on_use
        self._patches = Patches()
        self.used: list[str] = []
        waiting: dict[str, list[tuple[Library, str]]] = {}
        for library in LIBRARIES:
            for entry in library.entries:
                module, _, path = entry.partition(":")
                waiting.setdefault(module, []).append((library, path))
        callbacks: dict[str, Callable[[], None]] = {
            module: functools.partial(self._watch_module, module, entries)
            for module, entries in waiting.items()
        }
        callbacks[MPI.entries[0].partition(":")[0]] = self._watch_mpi
        self._patches.on_undo(ImportHook(callbacks).remove)
        self._watch_ctypes()

    def remove(self) -> None:
        """Watch no longer. Idempotent."""
        self._patches.undo()

    def _use(self, name: str, entry: str, remedy: str) -> None:
        if name not in self.used:
            self.used.append(name)
        self._on_use(
            name,
            f"The program communicates by {name} ({entry}), which goes past torch.distributed: RankLens can "
            f"neither record nor replay that. To run this job under RankLens, {remedy}.",
        )

    def _watch_module(self, module_name: str, entries: list[tuple[Library, str]]) -> None:
        module = sys.modules[module_name]
        for library, path in entries:
            owner_name, _, name = path.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            original = None if owner is None else getattr(owner, name, None)
            if original is None:  # another version of it: said once, for a use would go unseen
                log.info("%s has no %s here: whether %s is used goes unseen", module_name, path, library.name)
                continue
            if isinstance(owner, type):
                self._watch_class(module, owner_name, name, library)
            else:
                self._replace_everywhere(
                    name, original, self._telling(original, library.name, f"{module_name}.{path}", library)
                )

    def _watch_class(self, module: Any, class_name: str, name: str, library: Library) -> None:
        cls: type = getattr(module, class_name)
        entry = f"{module.__name__}.{class_name}"
        own = vars(cls).get(name, getattr(cls, name))
        function = own.__func__ if isinstance(own, classmethod | staticmethod) else own
        telling: Any = self._telling(function, library.name, entry, library)
        if isinstance(own, classmethod | staticmethod):
            telling = type(own)(telling)
        try:
            self._patches.set(cls, name, telling)
        except TypeError:  # a class written in C cannot be changed; a subclass in its place can
            use = functools.partial(self._use, library.name, entry, library.remedy)

            def new(subclass: Any, *args: Any, **kwargs: Any) -> Any:
                use()
                return cls.__new__(subclass, *args, **kwargs)

            self._replace_everywhere(class_name, cls, type(cls.__name__, (cls,), {"__new__": new}))

    def _telling(
        self, function: Callable[..., Any], name: str, entry: str, library: Library
    ) -> Callable[..., Any]:
        @functools.wraps(function)
        def telling(*args: Any, **kwargs: Any) -> Any:
            self._use(name, entry, library.remedy)
            return function(*args, **kwargs)

        return telling

    def _replace_everywhere(self, name: str, original: object, value: object) -> None:
        """In every module that has ``original`` under ``name``: packages export what their modules have."""
        for module in list(sys.modules.values()):
            if module is not None and vars(module).get(name) is original:
                self._patches.set(module, name, value)

    def _watch_mpi(self) -> None:
        module = sys.modules["mpi4py.MPI"]
        world = getattr(module, "COMM_WORLD", None)
        if world is None:
            return
        cls = type(world)
        methods = {
            name: self._mpi_method(getattr(cls, name), name)
            for name in dir(cls)
            if MPI_COMMUNICATES.fullmatch(name)
        }
        # an object of the same handle whose class is a subclass: isinstance and C code go on working
        self._patches.set(module, "COMM_WORLD", type(cls.__name__, (cls,), methods)(world))

    def _mpi_method(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def telling(comm: Any, *args: Any, **kwargs: Any) -> Any:
            if not sys._getframe(1).f_code.co_filename.endswith(BOOTSTRAP):
                self._use(MPI.name, f"mpi4py.MPI.COMM_WORLD.{name}", MPI.remedy)
            return method(comm, *args, **kwargs)

        return telling

    def _watch_ctypes(self) -> None:
        remedies = {library.name: library.remedy for library in (*LIBRARIES, MPI)}
        getitem = ctypes.CDLL.__getitem__

        def watched(library: ctypes.CDLL, name: Any) -> Any:
            found = next((n for n, known in NATIVE if isinstance(name, str) and known.fullmatch(name)), None)
            if found is None:
                return getitem(library, name)
            use = functools.partial(self._use, found, f"ctypes: {name}", remedies[found])

            class Telling(library._FuncPtr):  # type: ignore[name-defined, misc]
                _flags_ = library._FuncPtr._flags_
                _restype_ = library._FuncPtr._restype_

                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    use()
                    return super().__call__(*args, **kwargs)

            function = Telling((name, library))
            function.__name__ = name
            return function

        self._patches.set(ctypes.CDLL, "__getitem__", watched)


def refuse(name: str, message: str) -> None:
    """``on_use`` where there are no peers: whatever the library does would wait for them for ever.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(message)
