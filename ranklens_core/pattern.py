"""Which recorded call a call that nobody recorded is like: it stands where the recorded one stood."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class Pattern:
    """The calls of one sequence in recorded order, by structure (a number) and step (never falling).

    A program with more micro-batches makes the recorded calls of a micro-batch again, and one that trains for
    longer those of a step. Where it is in them is what its peers' pace is taken from.
    """

    def __init__(self, structures: Sequence[int], steps: Sequence[int]) -> None:
        self._structures = structures
        self._steps = steps
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        for place, structure in enumerate(structures):
            self._places[structure].append(place)
        self._last = -1

    def at(self, place: int) -> None:
        """The program made the call recorded at ``place``, or one like it."""
        self._last = place

    def alike(self, structure: int, step: int) -> int | None:
        """The place of the recorded call that one of ``structure`` is like, made in ``step``, not recorded.

        It is the one after the place where the program is, if that is of this structure. Else it is in this
        step (or, where the step has none, in the latest before it that has), after the same call as this one
        if there is such a one, and the last of those. None where no recorded call has this structure.
        """
        following = self._last + 1
        if (
            following < len(self._structures)
            and self._structures[following] == structure
            and self._steps[following] <= step
        ):
            return following
        places = self._places.get(structure, [])
        end = bisect_left(places, step + 1, key=self._steps.__getitem__)
        if not end:
            return places[0] if places else None
        begin = bisect_left(places, self._steps[places[end - 1]], 0, end, key=self._steps.__getitem__)
        before = self._structures[self._last] if self._last >= 0 else None
        same = [place for place in places[begin:end] if place and self._structures[place - 1] == before]
        return (same or places[begin:end])[-1]
