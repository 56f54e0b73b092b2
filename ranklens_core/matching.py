"""Finds the record of each call the program makes, in issue order within each sequence.

A sequence is a group's collectives, or a group's messages to or from one peer; sequences are matched
independently, so that calls on different groups may interleave differently than recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from ranklens_core.c10d.signature import Interned, Lane, lane_of, located
from ranklens_core.c10d.site import Sites
from ranklens_core.check.structure import Mismatch, describe, explain, structure_of
from ranklens_core.errors import StructureMismatchError, TraceIncompleteError
from ranklens_core.pattern import Pattern
from ranklens_core.schema import NO_STEP, CallRecord, GroupRecord
from ranklens_core.trace import RankTrace


class WindowEnded(SystemExit):
    """The recorded window is over: the program ends here, with success."""


class Match(NamedTuple):
    """``record`` is None for a call that the trace does not have at its place; ``seq_id`` is the place.

    ``alike`` is then the recorded call whose peers' pace it takes, if calls are realigned and there is one.
    """

    record: CallRecord | None
    seq_id: int
    alike: CallRecord | None = None


class _Sequence:
    """The records of one lane and how far the program has come."""

    __slots__ = ("_pattern", "at", "begun", "records", "structures")

    def __init__(self) -> None:
        self.records: list[CallRecord] = []
        self.structures: list[int] = []
        self.at = 0
        self.begun = False
        self._pattern: Pattern | None = None

    @property
    def pattern(self) -> Pattern:
        """Where the program is in the recorded calls, for tasks that realign."""
        if self._pattern is None:
            self._pattern = Pattern(self.structures, [record.row.step for record in self.records])
        return self._pattern


class Matcher:
    """The recorded calls of one rank.

    ``realigns``: the program may make more or fewer calls in a step than were recorded; what is no record
    of the step is passed over, and the next call is looked for again. Nor does it end with a recording that
    broke off. With ``from_step`` the program starts with that step, from a checkpoint of its own.
    ``stops`` says whether a mismatch is an error; ``keeps_window`` whether the program ends with the
    recorded window. ``total`` and ``training_total`` count recorded calls, ``matched`` and
    ``training_matched`` those the program has made; ``comparable`` recorded training calls have inputs to
    compare. ``window_ended`` is whether ``WindowEnded`` was raised,
    also where the program caught it.
    """

    def __init__(
        self,
        trace: RankTrace,
        groups: Mapping[str, GroupRecord],
        sites: Sites,
        *,
        stops: bool,
        keeps_window: bool,
        realigns: bool = False,
        from_step: int | None = None,
    ) -> None:
        record = trace.record
        self._rank = record
        self._groups = groups
        self._sites = sites
        self._stops = stops
        self.realigns = realigns
        self.from_step = from_step
        self._made_up = self._answered = 0
        self._window_end = record.value_steps[1] if record.value_steps and keeps_window else None
        self._structures: dict[tuple[object, ...], int] = {}
        self._live_structures: dict[int, int] = {}
        self._lanes: dict[Lane, _Sequence] = {}
        self.matched = 0
        self.training_matched = 0
        self.total = 0
        self.training_total = 0
        self.comparable = 0
        self.window_ended = False
        self.first_mismatch: Mismatch | None = None
        self._load(trace)

    def match(self, interned: Interned, step: int) -> Match:
        """The record of the call being made in ``step``.

        Raises ``StructureMismatchError`` (if mismatches are errors), ``TraceIncompleteError`` where a
        recording broke off, ``WindowEnded`` at the end of the window.
        """
        sequence = self._lanes.get(interned.lane)
        if sequence is None:
            sequence = self._lanes[interned.lane] = _Sequence()
        if self.is_set_up(step):
            return self._set_up(interned, sequence)
        if self.from_step == step and not self._begin(interned, sequence):
            self._made_up += 1
            return Match(None, sequence.at)
        if self.realigns:
            self._realign(interned, sequence, step)
        at = sequence.at
        recorded: CallRecord | None = None
        if at < len(sequence.records):
            recorded = sequence.records[at]
            if self._is_past_window(recorded):
                self.window_ended = True
                raise WindowEnded(0)
            if self._structure(interned) == sequence.structures[at]:
                sequence.at = at + 1
                if self.realigns:
                    sequence.pattern.at(at)
                self.matched += 1
                self.training_matched += self.is_training(recorded)
                return Match(recorded, at)
        elif not self._rank.complete and not self.realigns:
            raise self._ended(interned)
        if self.first_mismatch is None:
            self._mismatch(interned, sequence, recorded, step)
        if self.realigns:
            return Match(None, at, self._alike(interned, sequence, step))
        # keep the sequence aligned: this call took the record's place
        sequence.at = min(at + 1, len(sequence.records))
        return Match(None, at)

    def _alike(self, interned: Interned, sequence: _Sequence, step: int) -> CallRecord | None:
        place = sequence.pattern.alike(self._structure(interned), step)
        if place is None:
            return None
        sequence.pattern.at(place)
        return sequence.records[place]

    def _structure(self, interned: Interned) -> int:
        structure = self._live_structures.get(interned.id)
        if structure is None:
            structure = self._live_structures[interned.id] = self._intern(structure_of(interned.signature))
        return structure

    def _realign(self, interned: Interned, sequence: _Sequence, step: int) -> None:
        """Go to the call's record in this step; stay where the step has no such record left.

        Records of earlier steps that the program never called for are over.
        """
        records, at = sequence.records, sequence.at
        while at < len(records) and records[at].row.step < step:
            at += 1
        sequence.at = at
        structure = self._structure(interned)
        while at < len(records) and records[at].row.step <= step:
            if sequence.structures[at] == structure:
                sequence.at = at
                return
            at += 1

    def is_set_up(self, step: int) -> bool:
        """Whether a call of ``step`` is one of a program that goes on from a checkpoint, before it does."""
        return self.from_step is not None and step < self.from_step

    def restarted(self) -> str:
        """How the program came to the step that it started with, in words; ``""`` if that was the first."""
        if self.from_step is None:
            return ""
        return (
            f"started with step {self.from_step}, from the program's own checkpoint: of the calls before it "
            f"{self._answered} were answered as recorded, {self._made_up} as if all ranks were like this one"
        )

    def _set_up(self, interned: Interned, sequence: _Sequence) -> Match:
        """The next recorded set-up call like this one; loading a checkpoint makes others than were recorded,
        which have no record."""
        records, structure = sequence.records, self._structure(interned)
        for at in range(sequence.at, len(records)):
            if records[at].row.step != NO_STEP:
                break
            if sequence.structures[at] == structure:
                sequence.at = at + 1
                self._answered += 1
                return Match(records[at], at)
        self._made_up += 1
        return Match(None, sequence.at)

    def _begin(self, interned: Interned, sequence: _Sequence) -> bool:
        """Go to the call's record in the step that the program starts with; False if it has none there and
        needs none.

        What is no training may differ: in this step the recorded job saved the checkpoint, and frameworks
        check once a process that all ranks agree.
        """
        assert self.from_step is not None
        records, structure = sequence.records, self._structure(interned)
        if not sequence.begun:
            sequence.begun = True
            sequence.at = bisect_left(records, self.from_step, key=lambda record: record.row.step)
        for at in range(sequence.at, len(records)):
            if records[at].row.step != self.from_step:
                break
            if sequence.structures[at] == structure:
                sequence.at = at
                if self._is_optional(records[at]):
                    self._count(records[at])
                return True
            if records[at].row.training:
                break
        return interned.floating

    def is_training(self, record: CallRecord) -> bool:
        """Whether a call is scored: it was flagged and its step came to its end (what follows the last
        step of a finished run is no training; in a broken-off one it is)."""
        return record.row.training and (not self._rank.complete or record.row.step < len(self._rank.steps))

    def missing(self) -> str:
        """The first recorded call that the program never made, in words; ``""`` if it made all."""
        waiting = [record for lane in self._lanes.values() for record in self._left(lane)]
        if not waiting:
            return ""
        first = min(waiting, key=lambda record: record.row.entry)
        left = len(waiting)
        site = first.signature.program_site or first.signature.site
        return (
            f"the program ended {left} calls early; the first one it did not make is "
            f"{describe(first.signature, self._groups.get(first.signature.group))} "
            f"(recorded at {site or 'an unknown place'})"
        )

    def _left(self, lane: _Sequence) -> list[CallRecord]:
        """The lane's records that the program should have made calls for, and has not."""
        left = lane.records[lane.at :]
        if self.from_step is None:
            return left
        return [
            record for record in left if record.row.step >= self.from_step and not self._is_optional(record)
        ]

    def _load(self, trace: RankTrace) -> None:
        by_signature: dict[int, tuple[Lane, int]] = {}
        for call in trace.call_records():
            known = by_signature.get(call.row.signature)
            if known is None:
                structure = self._intern(structure_of(call.signature))
                known = by_signature[call.row.signature] = (lane_of(call.signature), structure)
            sequence = self._lanes.setdefault(known[0], _Sequence())
            sequence.records.append(call)
            sequence.structures.append(known[1])
            if not (self._is_past_window(call) or self.is_set_up(call.row.step) or self._is_optional(call)):
                self._count(call)

    def _is_optional(self, call: CallRecord) -> bool:
        """Whether a program that starts with the call's step may not make it."""
        return call.row.step == self.from_step and not call.row.training

    def _count(self, call: CallRecord) -> None:
        is_training = self.is_training(call)
        self.total += 1
        self.training_total += is_training
        self.comparable += is_training and bool(call.row.in_addresses)

    def _is_past_window(self, record: CallRecord) -> bool:
        return self._window_end is not None and record.row.step >= self._window_end

    def _intern(self, structure: tuple[object, ...]) -> int:
        return self._structures.setdefault(structure, len(self._structures))

    def _mismatch(
        self, interned: Interned, sequence: _Sequence, recorded: CallRecord | None, step: int
    ) -> None:
        self.first_mismatch = explain(
            now=located(interned.signature, self._sites),
            group=self._groups.get(interned.signature.group),
            seq_id=sequence.at,
            step=step,
            recorded=recorded.signature if recorded else None,
            nearest=self._nearest(interned, sequence),
            ended=self._why_no_record(interned, sequence),
        )
        if self._stops:
            raise StructureMismatchError(self.first_mismatch.text)

    def _nearest(self, interned: Interned, sequence: _Sequence) -> str:
        structure = self._intern(structure_of(interned.signature))
        places = [i for i, other in enumerate(sequence.structures) if other == structure]
        if not places:
            return ""
        place = min(places, key=lambda i: abs(i - sequence.at))
        found = sequence.records[place]
        return (
            f"the same call stands at place {place} of this sequence (this is place {sequence.at}), "
            f"step {found.row.step}, {found.signature.program_site or found.signature.site}"
        )

    def _why_no_record(self, interned: Interned, sequence: _Sequence) -> str:
        if sequence.records:
            return f"no more calls: this sequence has {len(sequence.records)}"
        group = interned.signature.group
        if group not in self._groups:
            known = ", ".join(
                f"{record.role or record.pg_desc} {key}" for key, record in self._groups.items()
            )
            return f"no group of ranks {group}; this rank's groups: {known}"
        return "no call of this kind on this group"

    def _ended(self, interned: Interned) -> TraceIncompleteError:
        rank = self._rank
        why = rank.failure or f"rank {rank.rank} ended without closing its trace"
        return TraceIncompleteError(
            f"The recording ends here, after {self.matched} calls of rank {rank.rank} ({why}): "
            f"nothing is recorded for {describe(interned.signature)}."
        )
