"""The records a trace is made of: plain frozen data, no behaviour, no torch.

A rank's trace is a log of *entries* numbered from 0 in program order; an entry is a call (a c10d
operator) or a wait (the program waiting for a call). What a call looks like (operator, group,
shapes, ...) is its ``Signature``, stored once; when it happened and which bytes it had is its
``CallRow`` and, once complete, its ``CompletionRow``. ``CallRecord`` is all three joined: what
readers see. ``docs/trace-format.md`` describes the files.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

TRACE_VERSION = 1
"""Version of the format that this RankLens writes."""

OLDEST_READER = 1
"""Oldest format version whose readers still understand what this RankLens writes."""

NO_STEP = -1
"""``step`` of a call before the first or after the last training step."""

NO_PEER = -1
"""``peer`` of a call without root, source or destination."""

ADDRESS_BYTES = 16
"""Size of a content address: xxh3-128 of a tensor's bytes, big endian."""


class Phase(StrEnum):
    """Which part of a program a call belongs to."""

    SETUP = "setup"
    STEP = "step"
    AFTER = "after"


class Purpose(StrEnum):
    """What a call carries. Only ``TENSOR`` calls can be training calls."""

    TENSOR = "tensor"
    OBJECT = "object"
    TIMER = "timer"
    SYNC = "sync"


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The structure of a call: everything but when it happened and which bytes it moved.

    ``peer`` is the root, source or destination as a *group* rank, or ``NO_PEER``; it is the
    requested one, so a receive from any source has ``NO_PEER``. ``reduce_op`` is ``""`` where the
    operator reduces nothing. Shapes and split sizes count elements. ``site`` is the innermost
    frame outside torch, ``program_site`` the innermost frame in the user's own files, each
    ``file:line function``.
    """

    op: str
    group: str
    purpose: Purpose
    peer: int
    reduce_op: str
    tag: int
    is_async: bool
    device: str
    in_dtypes: tuple[str, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_dtypes: tuple[str, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_split_sizes: tuple[int, ...]
    out_split_sizes: tuple[int, ...]
    in_msg_bytes: int
    out_msg_bytes: int
    site: str
    program_site: str


MATCHED_FIELDS = (
    "op",
    "group",
    "peer",
    "reduce_op",
    "tag",
    "in_dtypes",
    "in_shapes",
    "out_dtypes",
    "out_shapes",
    "in_split_sizes",
    "out_split_sizes",
)
"""Fields of a ``Signature`` that a replayed call must share with the recorded one."""


class CallRow(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it was issued.

    ``seq_id`` counts from 0 per group for collectives, and per (group, direction, peer) for
    point-to-point calls. ``enqueue_ns`` is when the program made the call, ``start_ns`` when the
    real operator was entered (RankLens' own work lies between). ``compute_ns`` and
    ``compute_cpu_ns`` are the wall and CPU time the calling thread spent since the end of its
    previous entry. ``delayed_ns`` is how long, since its previous call and outside waits, that thread was
    ready to run but other threads had its core: the communication library's, the recorder's (0 where the
    process has more than one core, or the system does not tell). ``in_addresses`` are the content
    addresses of the inputs that carry information (empty where values are not recorded). ``batch``
    numbers the coalescing batch, -1 outside one.
    """

    entry: int
    signature: int
    seq_id: int
    step: int
    phase: Phase
    training: bool
    batch: int
    enqueue_ns: int
    start_ns: int
    compute_ns: int
    compute_cpu_ns: int
    delayed_ns: int = 0
    in_addresses: tuple[bytes, ...] = ()


class CompletionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A call's end: when, with which results.

    ``return_ns`` is when a blocking call gave control back to the program (0 where the call did
    not block). ``src_rank`` is the group rank that a receive from any source got its message
    from, else ``NO_PEER``. ``error`` is the text of the failure, ``""`` for success.
    """

    entry: int
    end_ns: int
    return_ns: int
    src_rank: int
    out_addresses: tuple[bytes, ...]
    error: str


class WaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """The program waited: ``call`` is the entry waited for, times as in ``CallRow``."""

    entry: int
    call: int
    begin_ns: int
    end_ns: int
    compute_ns: int
    compute_cpu_ns: int


class CallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a trace, whole: ``signature``, ``row`` and, if it completed, ``completion``."""

    rank: int
    signature: Signature
    row: CallRow
    completion: CompletionRow | None


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process group.

    ``key`` identifies it in every rank and in every run of the program: the ranks and how many
    groups of these very ranks were made before (``"0-3#1"``); ``pg_name`` is torch's name, which
    may differ between runs. ``ranks`` are global ranks in group-rank order. ``role`` is what the
    framework uses it for (tp, dp, pp, ...), ``""`` if unknown; several roles are joined by ``+``.
    """

    key: str
    pg_name: str
    pg_desc: str
    backend: str
    ranks: tuple[int, ...]
    role: str = ""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A training step of one rank: from its first forward to the end of its optimizer step."""

    index: int
    begin_ns: int
    end_ns: int


class EnvironmentItem(msgspec.Struct, frozen=True, kw_only=True):
    """One fact about where the program ran: see docs/trace-format.md for the kinds."""

    kind: str
    name: str
    value: str


class Printed(msgspec.Struct, frozen=True, kw_only=True):
    """A metric the program printed (``loss``, ``grad_norm``), by its text; ``step`` is the one it was in,
    which the optimizer's step of the one before has begun."""

    name: str
    text: str
    step: int = NO_STEP


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one rank's recording, from its journal.

    ``complete`` is whether the rank closed its trace itself; ``failure`` says why recording
    stopped early, ``""`` if it did not. ``error`` is the exception that the program ended with
    (``Type: message``), raised at ``error_site``; both ``""`` without one. ``has_values`` is whether
    results were kept.
    ``value_steps`` is the window ``(first, end)`` in which inputs can be compared, None for all. With
    ``window_only`` the results of the steps before it were not kept: a replay starts at its first step.
    ``monotonic_ns`` and ``realtime_ns`` were read together at the start: they tie the rank's
    clock to the wall clock.
    """

    rank: int
    host: str
    pid: int
    local_rank: int
    has_values: bool
    value_steps: tuple[int, int | None] | None
    window_only: bool = False
    complete: bool
    exit_status: int | None
    failure: str
    error: str = ""
    error_site: str = ""
    monotonic_ns: int
    realtime_ns: int
    groups: tuple[GroupRecord, ...]
    steps: tuple[Step, ...]
    environment: tuple[EnvironmentItem, ...]
    printed: tuple[Printed, ...]


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``run.json``: the whole run at a glance.

    ``clock`` is ``wall`` or ``virtual``. With a virtual clock the job's timeline is computed from the ranks'
    own compute and the network: ``network`` is its name and ``network_content`` all of it, as
    ``timing.network_content`` writes it. ``own_cores`` are the ranks that had a core of their own.
    """

    format: int
    oldest_reader: int
    run_id: str
    world_size: int
    program: str
    program_fingerprint: str
    arguments: tuple[str, ...]
    framework: str
    backend: str
    created: str
    clock: str
    network: str
    cpu_cuda: bool
    network_content: str = ""
    own_cores: tuple[int, ...] = ()
