"""The answer in one sentence, and the ranks it blames."""

from __future__ import annotations

from dataclasses import dataclass, field

from ranklens_core.diagnose.findings import CallView, Deviation, Disagreement, RankEnd, Status, Wait
from ranklens_core.diagnose.job import How
from ranklens_core.diagnose.waiting import ABSENT, MARGIN_NS, End
from ranklens_core.rank_failure import signal_name
from ranklens_core.text import ranks_words

MOST_OF_A_CIRCLE = 4
"""How many ranks of a circle the answer tells one by one."""


@dataclass
class Answer:
    """Chooses among what was found; the first cause comes first:

    calls that do not fit each other, then the rank (or circle) at which the waiting ends, then ranks that
    died, then transfers that did not end, then values.
    """

    disagreements: tuple[Disagreement, ...]
    waits: tuple[Wait, ...]
    ends: tuple[RankEnd, ...]
    last: tuple[End, ...]
    cycle: tuple[int, ...]
    stalled: tuple[Wait, ...]
    lag: str
    values: tuple[Deviation, ...]
    compared: int
    status: Status = field(init=False)
    culprits: tuple[int, ...] = field(init=False, default=())
    text: str = field(init=False)

    def __post_init__(self) -> None:
        died = [end for end in self.ends if end.how == How.FAILED or end.signal]
        stalled = [w for w in self.stalled if w.waited_ns is None or w.waited_ns >= MARGIN_NS]
        deviations = [value for value in self.values if value.what != "input"]
        if self.disagreements:
            self.status, self.text = Status.STRUCTURE, self._disagreement(self.disagreements[0])
        elif self.last:
            self.status, self.text = Status.HANG, self._waiting()
        elif died:
            self.status, self.culprits = Status.DIED, tuple(end.rank for end in died)
            self.text = "; ".join(_died(end) for end in died[:3])
        elif stalled:
            self.status, self.text = Status.HANG, _stalled(stalled[0])
        elif deviations:
            self.status, self.culprits = Status.VALUES, deviations[0].odd
            self.text = deviation_words(deviations[0])
        else:
            self.status, self.text = self._nothing()

    def _disagreement(self, found: Disagreement) -> str:
        self.culprits = found.odd
        order = sorted(found.parties, key=lambda party: party.ranks[0] not in found.odd)
        first, second, *more = order
        text = f"{ranks_words(first.ranks)} made {call_at(first.call)}"
        if {name for name, _ in found.fields} <= {"op"} or first.call.site != second.call.site:
            text += f" where {ranks_words(second.ranks)} made {call_at(second.call)}"
        else:
            text += f", and {ranks_words(second.ranks)} the same call with other terms"
        if more:
            text += f", and others yet other calls ({len(order)} in all)"
        differing = [item for item in found.fields if item[0] != "op"]
        if differing:
            text += "; they differ in " + " and ".join(f"{name} ({what})" for name, what in differing)
        return f"{text}{'. ' + _capital(found.lag) if found.lag else ''}"

    def _waiting(self) -> str:
        """For the ends that hold up most ranks; of several the one that is known to have come to grief."""
        most = max(len(end.waiters) for end in self.last)
        chosen = [end for end in self.last if len(end.waiters) == most]
        end = min(chosen, key=lambda end: (self._gravity(end), end.ranks))
        if len(end.ranks) > 1:
            self.culprits = self.cycle
            return self._circle(end)
        (rank,) = end.ranks
        wait = max(
            (wait for wait in self.waits if rank in wait.for_ranks), key=lambda wait: wait.waited_ns or 0
        )
        alike = [e.ranks[0] for e in chosen if len(e.ranks) == 1 and self._gravity(e) == self._gravity(end)]
        self.culprits = tuple(sorted(r for r in alike if r in wait.for_ranks))
        behind = [w for w in self.waits if rank in w.for_ranks]
        by = ranks_words([r for w in behind for r in w.ranks])
        others = tuple(r for r in self.culprits if r != rank)
        likewise = f" (likewise {ranks_words(others)})" if others else ""
        whom = "them" if others else "it"
        text = f"{self._what_became_of(rank, wait)}{likewise}; {by} {_wait_verb(by)} for {whom}"
        text += f" in {call_at(wait.call)}"
        if wait.waited_ns is not None and wait.waited_ns >= MARGIN_NS:
            text += f", for {wait.waited_ns / 1e9:.1f} s when the recording ended"
        further = [r for r in end.waiters if not any(r in w.ranks for w in behind)]
        if further:
            text += f", and {ranks_words(further)} behind them"
        if self.lag:
            text += f". {_capital(self.lag)}"
        if not wait.certain and self._end_of(rank).how == How.KILLED:
            text += ". (Likely, not certain: its recording ends too early to show that it did not come.)"
        return text

    def _gravity(self, end: End) -> int:
        """How much speaks for the trouble to have begun at ``end``, the least first."""
        state = self._end_of(end.ranks[0])
        if len(end.ranks) > 1 or state.how == How.FAILED or state.signal:
            return 0
        return 1 if state.how == How.FINISHED else 2

    def _end_of(self, rank: int) -> RankEnd:
        return next(end for end in self.ends if end.rank == rank)

    def _circle(self, end: End) -> str:
        steps = []
        for rank, other in zip(self.cycle, (*self.cycle[1:], self.cycle[0]), strict=True):
            wait = next(w for w in self.waits if rank in w.ranks and other in w.for_ranks)
            steps.append(f"rank {rank} in {call_at(wait.call)} for rank {other}")
        shown = steps[:MOST_OF_A_CIRCLE]
        if len(steps) > len(shown):
            shown.append(f"and so on round {len(steps)} ranks")
        text = f"deadlock: {ranks_words(self.cycle)} wait for each other: {', '.join(shown)}"
        behind = ranks_words([rank for rank in end.waiters if rank not in self.cycle])
        return f"{text}; {behind} {_wait_verb(behind)} for them" if behind != ranks_words([]) else text

    def _what_became_of(self, rank: int, wait: Wait) -> str:
        state = self._end_of(rank)
        if state.how == How.FAILED or state.signal:
            return _died(state)
        if state.how in (How.UNRECORDED, How.UNREADABLE):
            return f"nothing is known of rank {rank} ({state.how})"
        last = f"after {call_at(state.last_call)}" if state.last_call else "before its first call"
        if state.how == How.FINISHED:
            return f"rank {rank} ended (exit status 0) {last} without the call that others made"
        where = f": it was at {short_site(state.place)}" if state.place else f" {last}"
        did_not = "did not make the call" if wait.reason == ABSENT else wait.reason
        return f"rank {rank} {did_not}{where}"

    def _nothing(self) -> tuple[Status, str]:
        cut = [end.rank for end in self.ends if end.how in (How.KILLED, How.STOPPED)]
        missing = [end.rank for end in self.ends if end.how in (How.UNRECORDED, How.UNREADABLE)]
        values = f"; values of {self.compared} calls are the same on all ranks that have them"
        text = f"nothing found: all calls fit each other{values if self.compared else ''}"
        if missing:
            text += f"; nothing is known of {ranks_words(missing)}"
        if cut:
            text += f"; the recording of {ranks_words(cut)} was cut off, nobody was seen to wait there"
        return (Status.CUT_OFF if cut or missing else Status.OK), text


def call_at(call: CallView) -> str:
    """A call with its number, step and line."""
    step = f", step {call.step}" if call.step >= 0 else ""
    at = f" at {short_site(call.site)}" if call.site else ""
    return f"{call.call}{at} (call {call.seq_id}{step})"


def short_site(site: str) -> str:
    """``directory/file:line function``: the JSON has the whole path."""
    path, colon, rest = site.partition(":")
    return "/".join(path.split("/")[-2:]) + colon + rest


def deviation_words(value: Deviation) -> str:
    """One deviation of values in words."""
    call = call_at(value.call)
    match value.what:
        case "message":
            sender, receiver = (party[0] for party in value.parties)
            return (
                f"what rank {receiver} received is not what rank {sender} had sent in {call}: the buffer "
                "changed on the way"
            )
        case "result":
            what = "got another result than"
        case _:
            what = "put in something else than"
    if value.odd:
        rest = tuple(rank for party in value.parties for rank in party if rank not in value.odd)
        return f"{ranks_words(value.odd)} {what} {ranks_words(rest)} in {call}"
    parties = " and ".join(ranks_words(party) for party in value.parties[:4])
    return f"{parties} {what} each other in {call}"


def _stalled(wait: Wait) -> str:
    seconds = f" for {wait.waited_ns / 1e9:.1f} s" if wait.waited_ns is not None else ""
    return f"all ranks came to {call_at(wait.call)} and it did not end{seconds}: the transfer itself hangs"


def _died(end: RankEnd) -> str:
    if end.signal:
        last = f"; the last call its recording has is {call_at(end.last_call)}" if end.last_call else ""
        return f"rank {end.rank} was killed by signal {end.signal} ({signal_name(end.signal)}){last}"
    what = end.error or f"exit status {end.exit_status}"
    return f"rank {end.rank} failed with {what}{f' at {short_site(end.place)}' if end.place else ''}"


def _wait_verb(ranks: str) -> str:
    return "waits" if ranks.startswith("rank ") else "wait"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
