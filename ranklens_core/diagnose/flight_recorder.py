"""PyTorch Flight Recorder dumps as a ``Job``.

A dump is a ring buffer: its first calls may be missing. It has no values, reduce ops, roots or splits.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ranklens_core.diagnose.flight_dump import Dump, Entry, Frame, dump_files, read_dump
from ranklens_core.diagnose.job import How, Job, RankState
from ranklens_core.errors import TraceDamagedError, TraceError, TraceNotFoundError
from ranklens_core.schema import NO_PEER, NO_STEP, GroupRecord, Purpose, Signature
from ranklens_core.text import ranks_text
from ranklens_core.timing.join import join
from ranklens_core.timing.ranklog import NO_TIME, RankLog
from ranklens_core.trace.layout import MAX_WORLD_SIZE

OPS = {
    "_all_gather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_reduce_barrier": "barrier",
}
"""torch's names of calls in a dump -> ours."""

DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
"""``c10::toString(ScalarType)`` -> torch's dtype names, where these are not the same in small letters."""

_MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")


def read_flight_recorder(path: Path) -> Job:
    """The job of the dumps at ``path``; dumps that cannot be read are said in their rank's state.

    Raises:
        TraceNotFoundError: there are none.
        TraceError: none of them can be read.
    """
    files = dump_files(path)
    if not files:
        raise TraceNotFoundError(
            f"{path} holds neither a trace nor Flight Recorder dumps (files whose names end in the rank). "
            "Name the directory that ranklens record wrote, or that of TORCH_FR_DUMP_TEMP_FILE."
        )
    dumps: dict[int, Dump] = {}
    states: dict[int, RankState] = {}
    for rank, file in files.items():
        try:
            dumps[rank] = read_dump(file)
            states[rank] = RankState(rank, How.DUMPED)
        except TraceError as error:
            states[rank] = RankState(rank, How.UNREADABLE, text=str(error))
            failure = error
    if not dumps:
        raise failure
    groups = _Groups(dumps, files)
    world_size = 1 + max(*files, *(rank for record in groups.records for rank in record.ranks))
    if world_size > MAX_WORLD_SIZE:
        raise TraceDamagedError(f"{path}: a dump names rank {world_size - 1}: no job is that large.")
    for rank in range(world_size):
        text = f"{path} has no dump of rank {rank}"
        states.setdefault(rank, RankState(rank, How.UNRECORDED, text=text))
    kept = _same_windows(dumps, groups)
    joined = join([_log(rank, kept[rank], groups) for rank in sorted(dumps)])
    notes = ["Flight Recorder dumps hold no values, reduce ops, roots, splits or steps"]
    if groups.guessed:
        notes.append(f"members of groups {', '.join(groups.guessed)} guessed from who has calls in them")
    return Job(
        source="flight-recorder",
        world_size=world_size,
        joined=joined,
        states=dict(sorted(states.items())),
        groups={record.key: record for record in groups.records},
        failed={},
        times="when calls were made, by the hosts' own wall clocks",
        notes=tuple(notes),
    )


class _Groups:
    """The process groups of all dumps, by torch's name on each rank."""

    def __init__(self, dumps: Mapping[int, Dump], files: Iterable[int]) -> None:
        self.guessed: list[str] = []
        self._of: dict[tuple[int, str], GroupRecord] = {}
        users: dict[tuple[str, str], set[int]] = defaultdict(set)
        for rank, dump in dumps.items():
            for config in dump.pg_config.values():
                ranks = _ranks(config.ranks)
                if rank in ranks:
                    self._of[rank, config.name] = _group(config.name, config.desc, ranks)
            for entry in dump.entries:
                if (rank, entry.process_group[0]) not in self._of:
                    users[entry.process_group].add(rank)
        for (name, desc), of in users.items():
            self.guessed.append(f"{name} ({desc})" if desc else name)
            record = _group(name, desc, tuple(sorted(files if desc == "default_pg" else of)))
            self._of.update({(rank, name): record for rank in of})

    @property
    def records(self) -> list[GroupRecord]:
        return list({record.key: record for record in self._of.values()}.values())

    def of(self, rank: int, name: str) -> GroupRecord:
        """The group that ``rank`` calls ``name``."""
        return self._of[rank, name]

    def known_to(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Ranks by key of the groups of ``rank``."""
        return {record.key: record.ranks for (of, _), record in self._of.items() if of == rank}


def _group(name: str, desc: str, ranks: tuple[int, ...]) -> GroupRecord:
    key = ranks_text(ranks) if name in ("", "0") or desc == "default_pg" else f"{ranks_text(ranks)}#{name}"
    desc = "" if desc == "undefined" else desc
    return GroupRecord(key=key, pg_name=name, pg_desc=desc, backend="", ranks=ranks)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = json.loads(text)
    except ValueError:
        return ()
    good = isinstance(ranks, list) and all(isinstance(rank, int) and rank >= 0 for rank in ranks)
    return tuple(dict.fromkeys(ranks)) if good else ()


def _same_windows(dumps: Mapping[int, Dump], groups: _Groups) -> dict[int, list[Entry]]:
    """Each rank's entries, without old messages whose other side has left the ring buffer.

    Messages pair by their order. A completed one is completed on both sides, so of each two sides as many
    completed ones are kept, the latest.
    """
    done: dict[tuple[object, ...], dict[str, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            lane = _lane(rank, entry, groups)
            if lane is not None and _is_complete(entry):
                done[lane[1:]][lane[0]] = done[lane[1:]].get(lane[0], 0) + 1
    kept: dict[int, list[Entry]] = {}
    for rank, dump in dumps.items():
        whole = not dump.entries or min(entry.record_id for entry in dump.entries) == 0
        surplus: dict[tuple[object, ...], int] = {}
        kept[rank] = []
        for entry in sorted(dump.entries, key=lambda entry: entry.record_id):
            lane = _lane(rank, entry, groups)
            if lane is not None and _is_complete(entry):
                sides = done[lane[1:]]
                left = surplus.setdefault(
                    lane, sides[lane[0]] - min(sides.get("send", 0), sides.get("recv", 0))
                )
                if left > 0 and not (whole and len(sides) < 2):
                    surplus[lane] -= 1
                    continue
            kept[rank].append(entry)
    return kept


def _lane(rank: int, entry: Entry, groups: _Groups) -> tuple[str, str, int, int] | None:
    """Side, group, sender and receiver of a message; None for a collective."""
    match = _MESSAGE.search(entry.profiling_name)
    if match is None:
        return None
    side, own, peer = match[1], int(match[2]), int(match[3])
    sender, receiver = (own, peer) if side == "send" else (peer, own)
    return side, groups.of(rank, entry.process_group[0]).key, sender, receiver


def _is_complete(entry: Entry) -> bool:
    # gloo never says "completed": it retires
    return entry.state == "completed" or (entry.retired and entry.profiling_name.startswith("gloo:"))


def _log(rank: int, entries: Sequence[Entry], groups: _Groups) -> RankLog:
    signatures: dict[Signature, int] = {}
    known = groups.known_to(rank)
    number: list[int] = []
    batch: list[int] = []
    for at, entry in enumerate(entries):
        signature = _signature(rank, entry, groups)
        number.append(signatures.setdefault(signature, len(signatures)))
        # the calls of a coalesced batch share its number
        previous = entries[at - 1] if at else None
        same = previous is not None and _sequence(previous) == _sequence(entry) and not entry.is_p2p
        batch.append(batch[-1] if same else at)
    sizes = Counter(batch)
    columns = {
        "entry": list(range(len(entries))),
        "signature": number,
        "seq_id": [e.p2p_seq_id if e.is_p2p else e.collective_seq_id for e in entries],
        "step": [NO_STEP] * len(entries),
        "batch": [at if sizes[at] > 1 else -1 for at in batch],
        "enqueue_ns": [e.time_created_ns for e in entries],
        "start_ns": [e.time_created_ns for e in entries],
        "end_ns": [
            (e.time_discovered_completed_ns or e.time_created_ns) if _is_complete(e) else NO_TIME
            for e in entries
        ],
        "return_ns": [NO_TIME] * len(entries),
        "src_rank": [NO_PEER] * len(entries),
        "compute_ns": [0] * len(entries),
        "compute_cpu_ns": [0] * len(entries),
    }
    waits = (
        "wait_entry",
        "wait_call",
        "wait_begin_ns",
        "wait_end_ns",
        "wait_compute_ns",
        "wait_compute_cpu_ns",
    )
    return RankLog(
        rank=rank,
        signatures=tuple(signatures),
        groups=known,
        **{name: np.array(column, np.int64) for name, column in columns.items()},
        **{name: np.zeros(0, np.int64) for name in waits},
    )


def _sequence(entry: Entry) -> tuple[str, int, bool]:
    return entry.process_group[0], entry.collective_seq_id, entry.is_p2p


def _signature(rank: int, entry: Entry, groups: _Groups) -> Signature:
    backend, _, name = entry.profiling_name.partition(":")
    group, peer = groups.of(rank, entry.process_group[0]), NO_PEER
    match = _MESSAGE.search(entry.profiling_name)
    if match is not None:
        name, peer = match[1], int(match[3])
        if peer >= len(group.ranks):
            raise TraceDamagedError(
                f"the dump of rank {rank} has a {name} with {peer} of {len(group.ranks)}."
            )
    name = name.split(" ")[0]
    op = OPS.get(name, name)
    is_send, is_recv = op == "send", op == "recv"
    program = _site(entry.frames, _LIBRARIES)
    return Signature(
        op=op,
        group=group.key,
        purpose=Purpose.SYNC if op == "barrier" else Purpose.TENSOR,
        peer=peer,
        reduce_op="",
        tag=0,
        is_async=True,
        device="cpu" if backend == "gloo" else "cuda",
        in_dtypes=() if is_recv else _dtypes(entry.input_dtypes, entry.input_sizes),
        in_shapes=() if is_recv else entry.input_sizes,
        out_dtypes=() if is_send else _dtypes(entry.output_dtypes, entry.output_sizes),
        out_shapes=() if is_send else entry.output_sizes,
        in_split_sizes=(),
        out_split_sizes=(),
        in_msg_bytes=0,
        out_msg_bytes=0,
        site=_site(entry.frames, ("/torch/",)),
        program_site=program,
    )


def _dtypes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """One dtype for each shape."""
    named = [DTYPES.get(dtype, dtype.lower()) for dtype in dtypes]
    named += named[-1:] * (len(shapes) - len(named)) if named else ["unknown"] * len(shapes)
    return tuple(named[: len(shapes)])


def _site(frames: Iterable[Frame], not_in: Sequence[str]) -> str:
    for frame in frames:
        if not any(part in frame.filename for part in not_in):
            return f"{frame.filename}:{frame.line} {frame.name}"
    return ""
