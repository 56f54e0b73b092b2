"""Which recorded call an added one is like. A letter is a structure, a digit a step."""

from __future__ import annotations

import pytest

from ranklens_core.pattern import Pattern


def pattern(*steps: str) -> Pattern:
    structures = [ord(letter) for step in steps for letter in step]
    return Pattern(structures, [index for index, step in enumerate(steps) for _ in step])


@pytest.mark.parametrize(
    ("made", "letter", "step", "alike"),
    [
        (-1, "g", 0, 0),  # nothing made yet: what comes first
        (3, "g", 0, 3),  # after the same call as the recorded one there
        (4, "g", 0, 2),
        (0, "r", 0, 1),  # what follows
        (5, "g", 0, 3),  # what follows is of a later step: the last of this one
        (5, "g", 2, 6),
        (10, "g", 2, 6),  # the step is beyond the recording: of the last that there is
        (10, "r", 2, 8),
        (0, "x", 0, None),
    ],
)
def test_alike(made: int, letter: str, step: int, alike: int | None) -> None:
    two_steps = pattern("grggro", "grrgo")
    if made >= 0:
        two_steps.at(made)
    assert two_steps.alike(ord(letter), step) == alike


def test_a_micro_batch_again_is_followed_call_by_call() -> None:
    step = pattern("gsrgsro")
    for place in range(6):
        step.at(place)
    followed = []
    for letter in "gsrgsr":
        place = step.alike(ord(letter), 0)
        assert place is not None
        step.at(place)
        followed.append(place)
    assert followed == [3, 4, 5, 3, 4, 5]


def test_a_sequence_without_records_is_like_nothing() -> None:
    assert Pattern([], []).alike(1, 0) is None
    assert pattern("", "g").alike(ord("g"), 0) == 0  # recorded later only: better than nobody's pace
