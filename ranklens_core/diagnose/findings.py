"""What a diagnosis says, as plain data: the JSON of ``ranklens diagnose --json``."""

from __future__ import annotations

from enum import StrEnum

import msgspec

DIAGNOSIS_VERSION = 1


class Status(StrEnum):
    """What was found, the gravest first."""

    STRUCTURE = "structure-mismatch"
    HANG = "hang"
    DIED = "rank-died"
    VALUES = "values-diverged"
    OK = "ok"
    CUT_OFF = "cut-off"


class CallState(StrEnum):
    """How far a call came."""

    COMPLETED = "completed"
    IN_FLIGHT = "in flight"
    FAILED = "failed"


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """A call of one rank. ``seq_id`` counts from 0 in its group (a message: with its peer). ``call`` is op,
    reduce op, dtypes, shapes and root or peer in words; ``site`` the program's line, ``through`` the
    innermost line outside torch where that is another."""

    rank: int
    step: int
    op: str
    group: str
    role: str
    seq_id: int
    call: str
    in_split_sizes: tuple[int, ...]
    out_split_sizes: tuple[int, ...]
    site: str
    through: str
    state: CallState
    error: str


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that made the same call at one place of their group's sequence, and one of these calls."""

    ranks: tuple[int, ...]
    call: CallView


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """The first call of a group (or message) about which ranks disagree.

    ``fields`` are (field, what it is for whom). ``parties`` begin with the largest. ``odd`` are the ranks
    outside a majority, empty where there is none. ``lag`` says which calls a rank left out or made in
    addition, where the order of its calls shows it. ``completed`` is whether the calls completed all the
    same.
    """

    group: str
    role: str
    seq_id: int
    step: int
    fields: tuple[tuple[str, str], ...]
    parties: tuple[Party, ...]
    odd: tuple[int, ...]
    lag: str
    completed: bool
    start_ns: int


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """``ranks`` wait in ``call`` (the first one's) for ``for_ranks``, which ``reason``.

    ``waited_ns`` is how long the recording saw the longest of them wait, None if it does not tell.
    ``certain`` is false where the awaited ranks' recordings end too early to tell that they did not come.
    """

    ranks: tuple[int, ...]
    for_ranks: tuple[int, ...]
    reason: str
    call: CallView
    waited_ns: int | None
    certain: bool


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended. ``place`` is where in the program it was then, ``""`` if that is not known."""

    rank: int
    how: str
    exit_status: int | None
    signal: int
    error: str
    place: str
    calls: int
    last_call: CallView | None


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """The first call whose values should be the same on several ranks and are not.

    ``what`` is ``result`` (all members get the same), ``message`` (what arrived is not what was sent) or
    ``input`` (replicated up to here). ``parties`` are the ranks by value, the largest first; ``calls`` how
    many calls were compared, ``deviating`` how many of them deviate.
    """

    what: str
    call: CallView
    parties: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    calls: int
    deviating: int


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Who came last to the collectives of the training steps.

    ``last`` of ``exchanges`` collectives had ``rank`` as the last to come; the others waited
    ``waited_ns`` for it in all (each exchange: from the last but one's arrival). ``span_ns`` is the time
    from the first to the last of these collectives.
    """

    rank: int
    last: int
    exchanges: int
    waited_ns: int
    span_ns: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found. ``answer`` is one sentence; ``culprits`` the ranks it names."""

    version: int
    path: str
    source: str
    world_size: int
    status: Status
    answer: str
    culprits: tuple[int, ...]
    disagreements: tuple[Disagreement, ...]
    waits: tuple[Wait, ...]
    cycle: tuple[int, ...]
    ends: tuple[RankEnd, ...]
    values: tuple[Deviation, ...]
    values_compared: int
    stragglers: tuple[Straggler, ...]
    times: str
    notes: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """By the command line's contract: 3 where ranks part, wait for ever or died, 4 for values alone."""
        if self.status is Status.VALUES:
            return 4
        return 0 if self.status in (Status.OK, Status.CUT_OFF) else 3
