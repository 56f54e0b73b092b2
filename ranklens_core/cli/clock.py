"""``--clock``, ``--network`` and ``--own-core`` of ``ranklens record``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ranklens_core.errors import UsageError

if TYPE_CHECKING:
    from ranklens_core.schema import RunRecord
    from ranklens_core.timing.network import NetworkDescription


class Timing(NamedTuple):
    """Where a recording's times come from: fields of ``RunRecord``."""

    clock: str
    network: str = ""
    network_content: str = ""
    own_cores: tuple[int, ...] = ()

    def describe(self, run: RunRecord) -> RunRecord:
        """``run`` with these."""
        return msgspec.structs.replace(run, **self._asdict())


WALL_TIME = Timing("wall")


def timing_of(
    clock: str,
    network: NetworkDescription | None,
    own_cores: tuple[int, ...],
    nproc: int | None,
    *,
    pin: bool,
) -> Timing:
    """The options, which must go with each other; the network's logs are read now.

    Raises UsageError saying what to write instead.
    """
    if clock == "wall":
        for option, value in (("--network", network), ("--own-core", own_cores)):
            if value:
                raise UsageError(
                    f"{option} belongs to --clock virtual: with the wall clock times are measured."
                )
        return WALL_TIME
    if network is None:
        raise UsageError(
            "--clock virtual needs the network whose transfers it estimates: --network NAME or FILE "
            "(loopback for gloo on one host; see docs/network.md)."
        )
    if own_cores and nproc is None:
        raise UsageError("--own-core is for local ranks (--nproc): elsewhere the launcher places the ranks.")
    if own_cores and pin:
        raise UsageError("--pin gives every rank a core, --own-core some of them: choose one.")
    from ranklens_core.timing.network_content import network_content

    return Timing("virtual", network.name, network_content(network), own_cores)
