"""The tasks: which result and which time a replayed call gets, and what a mismatch does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ranklens_core.errors import UsageError


class Result(StrEnum):
    """Where a call's result comes from."""

    RECORDED = "recorded"
    SYNTHESISED = "synthesised"

    __hash__ = str.__hash__  # Enum's own, in Python, is slow for what every call counts by


class OnMismatch(StrEnum):
    """What a call does that the trace does not have at its place."""

    STOP = "stop"
    ESTIMATE = "estimate"
    REPORT = "report"


@dataclass(frozen=True)
class Task:
    """``result`` is the preferred source; with ``falls_back`` a call without recorded values is
    synthesised instead of being an error. ``keeps_time`` says whether results arrive when they would
    have; ``compares`` whether inputs are checked, in training steps or with ``compares_all`` everywhere;
    ``watches_memory`` whether each step's peak is taken.
    """

    name: str
    result: Result
    on_mismatch: OnMismatch
    about: str
    falls_back: bool = False
    keeps_time: bool = False
    compares: bool = False
    compares_all: bool = False
    watches_memory: bool = False


TASKS = {
    task.name: task
    for task in (
        Task(
            "debug",
            Result.RECORDED,
            OnMismatch.STOP,
            "recorded results as soon as possible; every input is compared with the record",
            compares=True,
        ),
        Task(
            "profile",
            Result.RECORDED,
            OnMismatch.STOP,
            "recorded results at the recorded times; step times are compared with the record",
            falls_back=True,
            keeps_time=True,
        ),
        Task(
            "memory",
            Result.RECORDED,
            OnMismatch.REPORT,
            "recorded results as soon as possible; the peak of memory in each step",
            falls_back=True,
            watches_memory=True,
        ),
        Task(
            "tune",
            Result.RECORDED,
            OnMismatch.ESTIMATE,
            "as profile for calls as recorded; changed ones get made-up results and estimated times",
            falls_back=True,
            keeps_time=True,
        ),
        Task(
            "structure",
            Result.SYNTHESISED,
            OnMismatch.REPORT,
            "made-up results; the sequence of calls is compared with the record",
        ),
    )
}
"""Every task by its name on the command line."""


def on_mismatch_named(name: str) -> OnMismatch:
    """What a mismatch does, or ``UsageError`` listing the choices."""
    if name not in list(OnMismatch):
        raise UsageError(f"on_mismatch is {name!r}. Choices: {', '.join(OnMismatch)}.")
    return OnMismatch(name)


def task_named(name: str) -> Task:
    """The task, or ``UsageError`` listing those there are."""
    if name not in TASKS:
        raise UsageError(f"There is no task {name!r}. Tasks: {', '.join(TASKS)}.")
    return TASKS[name]
