"""The report for people: the answer first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterator

from ranklens_core.diagnose.answer import call_at, deviation_words, short_site
from ranklens_core.diagnose.findings import Diagnosis, Disagreement, RankEnd, Wait
from ranklens_core.diagnose.job import How
from ranklens_core.text import ranks_words

FEWEST_EXCHANGES = 10
"""From fewer collectives nobody is called late."""

MOST_CHARS = 200
"""How much of an error's text is shown."""

MOST_LINES = 12
"""How many waits, and how many ends of ranks, are listed."""


def report(found: Diagnosis) -> str:
    """``found`` in words, a few lines."""
    return "\n".join(_lines(found))


def _lines(found: Diagnosis) -> Iterator[str]:
    yield found.answer[:1].upper() + found.answer[1:] + ("" if found.answer.endswith((".", ")")) else ".")
    for number, disagreement in enumerate(found.disagreements[:3]):
        yield ""
        yield from _disagreement(disagreement, is_first=number == 0)
    if len(found.disagreements) > 3:
        yield f"            and {len(found.disagreements) - 3} more groups disagree later"
    if found.waits:
        yield ""
        yield from _shortened([_wait(wait) for wait in found.waits], "waits")
    waiting = {rank for wait in found.waits for rank in wait.ranks}
    ends = list(_ends(found.ends, waiting))
    if ends:
        yield ""
        yield from _shortened(ends, "ranks")
    for value in found.values[:3]:
        label = "values" if value.what != "input" else "inputs"
        yield f"{label:<12}{deviation_words(value)}; {value.deviating} of {value.calls} calls deviate"
    if found.values_compared and not found.values:
        yield f"{'values':<12}{found.values_compared} calls compared, the same on all ranks"
    yield from _stragglers(found)
    for note in found.notes:
        yield f"{'note':<12}{note}"


def _disagreement(found: Disagreement, *, is_first: bool) -> Iterator[str]:
    role = f"{found.role} " if found.role else ""
    step = f"step {found.step}" if found.step >= 0 else "outside the steps"
    went_on = ", completed all the same" if found.completed else ""
    label = "disagree" if is_first else "later"
    yield f"{label:<12}call {found.seq_id} of {role}(ranks {found.group}), {step}{went_on}"
    for name, what in found.fields:
        yield f"{'':<12}{name}: {what}"
    for party in found.parties[:6]:
        odd = " (odd)" if party.ranks[0] in found.odd else ""
        yield f"  {ranks_words(party.ranks)}{odd}: {party.call.call}, {party.call.state}"
        for side, sizes in (("in", party.call.in_split_sizes), ("out", party.call.out_split_sizes)):
            if sizes:
                yield f"      {side} splits {list(sizes)}"
        if party.call.site:
            through = f", through {short_site(party.call.through)}" if party.call.through else ""
            yield f"      at {party.call.site}{through}"
        if party.call.error:
            yield f"      {party.call.error}"
    if found.lag:
        yield f"{'':<12}{found.lag}"


def _wait(wait: Wait) -> str:
    seconds = f" ({wait.waited_ns / 1e9:.1f} s)" if wait.waited_ns is not None else ""
    likely = "" if wait.certain else " (likely)"
    whom = ranks_words(wait.for_ranks)
    return f"{ranks_words(wait.ranks)} -> {whom}{likely}: {wait.reason}, {call_at(wait.call)}{seconds}"


def _ends(ends: tuple[RankEnd, ...], waiting: set[int]) -> Iterator[str]:
    """What is known of the ranks that did not come to a good end, but for those that only waited."""
    for end in ends:
        if end.how in (How.FINISHED, How.DUMPED) or end.rank in waiting:
            continue
        detail = [str(end.how)]
        if end.signal:
            detail = [f"killed by signal {end.signal}"]
        elif end.exit_status:
            detail = [f"exit status {end.exit_status}"]
        if end.error:
            detail.append(end.error[:MOST_CHARS])
        if end.place:
            detail.append(f"at {short_site(end.place)}")
        if end.last_call:
            detail.append(f"last call {call_at(end.last_call)}, {end.last_call.state}")
        yield f"rank {end.rank}: {', '.join(detail)}"


def _stragglers(found: Diagnosis) -> Iterator[str]:
    late_ones = [late for late in found.stragglers if late.exchanges >= FEWEST_EXCHANGES]
    for number, late in enumerate(late_ones):
        share = 100 * late.waited_ns / late.span_ns if late.span_ns else 0.0
        source = f"; times: {found.times}" if number == 0 else ""
        yield (
            f"{'late' if number == 0 else '':<12}rank {late.rank} came last to {late.last} of its "
            f"{late.exchanges} collectives, others waited {late.waited_ns / 1e9:.3f} s for it ({share:.1f}% "
            f"of the time){source}"
        )


def _shortened(lines: list[str], label: str) -> Iterator[str]:
    for number, line in enumerate(lines[:MOST_LINES]):
        yield f"{label if number == 0 else '':<12}{line}"
    if len(lines) > MOST_LINES:
        yield f"{'':<12}and {len(lines) - MOST_LINES} more (--json has all)"
