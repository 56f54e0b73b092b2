"""This process's place in a job: rank, world size, local rank, and which run it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ranklens_core.errors import UsageError
from ranklens_core.trace import content_address


@dataclass(frozen=True)
class RankEnvironment:
    """This process's place in the job, as its launcher set it."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankEnvironment:
        """From RANK, WORLD_SIZE and LOCAL_RANK (torchrun, DeepSpeed, Slurm, Open MPI)."""
        rank = _first(environ, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        world = _first(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        if rank is None or world is None:
            raise UsageError(
                "This process is no rank of a job: RANK and WORLD_SIZE are not set. Start it with "
                "torchrun, deepspeed, srun or mpirun, or let RankLens start local ranks: --nproc N."
            )
        local = _first(environ, "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
        return cls(rank, world, local if local is not None else rank)


def _first(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if name in environ:
            try:
                return int(environ[name])
            except ValueError:
                raise UsageError(f"{name}={environ[name]!r} is no number.") from None
    return None


def run_id_of(environ: Mapping[str, str]) -> str:
    """A run id that all ranks of a job find by themselves: its launcher's variables are the same in each.

    Two jobs of one launcher and address share it; ``c10d/meeting.py`` tells them apart.
    """
    names: tuple[str, ...] = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    names += (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "OMPI_COMM_WORLD_JOBID",
        "PMIX_NAMESPACE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
    )
    text = "\0".join(f"{name}={environ.get(name, '')}" for name in names)
    return content_address(text.encode()).hex()[:16]


def check_place(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """Refuse an environment that says something else than what is to be replayed.

    Raises ``UsageError`` if RANK or WORLD_SIZE is set and differs.
    """
    for name, wanted in (("WORLD_SIZE", world_size), ("RANK", rank)):
        value = environ.get(name)
        if value is not None and value != str(wanted):
            raise UsageError(
                f"This environment says {name}={value}, but the replay is of rank {rank} of {world_size}. "
                f"A replay is one plain process: start it without torchrun, or unset {name}."
            )
