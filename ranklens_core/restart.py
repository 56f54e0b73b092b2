"""Replaying a program that goes on from its own checkpoint: which step it can start with."""

from __future__ import annotations

from ranklens_core.errors import UsageError
from ranklens_core.schema import RankRecord
from ranklens_core.task import Task


def check_restart(record: RankRecord, task: Task, from_step: int) -> None:
    """Refuse a start with ``from_step`` that cannot be.

    Raises:
        UsageError: the task keeps time (peers' arrivals are known from the calls before, which are not made),
            the rank has no such step, or only inputs of other steps can be compared.
    """
    if task.keeps_time:
        raise UsageError(
            f"--from-step is not for --task {task.name}: when peers come is known from the calls before, "
            "which are not made. Use --task debug, memory or structure, or record the job that goes on from "
            "the checkpoint."
        )
    last = len(record.steps) - (1 if record.complete else 0)
    if from_step > last:
        raise UsageError(
            f"--from-step {from_step}: rank {record.rank} was recorded in the steps 0 to {max(last, 0)}."
        )
    window = record.value_steps
    if window is not None and not (window[0] <= from_step and (window[1] is None or from_step < window[1])):
        until = "the end" if window[1] is None else f"{window[1] - 1}"
        raise UsageError(
            f"--from-step {from_step}: rank {record.rank} has values of the steps {window[0]} to {until}. "
            f"Start from the checkpoint of step {window[0]}."
        )
