"""The time of calls that nobody recorded, from a network description."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.ops import Kind
from ranklens_core.c10d.signature import Interned
from ranklens_core.errors import UsageError
from ranklens_core.schema import NO_PEER, GroupRecord, Signature
from ranklens_core.timing.estimate import SAME_RANK, Estimate, Estimator


class NetworkTime:
    """Estimates the transfer of each call of ``rank``; the same call is estimated once.

    ``groups`` gives the ranks of a group by its key. ``sources`` counts calls by what their time came from
    (``nccl model ring/LL, h100-ib400``).
    """

    def __init__(self, estimator: Estimator, rank: int, groups: Mapping[str, GroupRecord]) -> None:
        self._estimator = estimator
        self._rank = rank
        self._groups = groups
        self._known: dict[int, Estimate] = {}
        self.sources: Counter[str] = Counter()

    def __call__(self, call: Call, interned: Interned) -> int:
        """ns from the last arrival to the end. Raises UsageError where the network cannot tell: it has no
        fabric, and the group spans nodes."""
        estimate = self._known.get(interned.id)
        if estimate is None:
            estimate = self._known[interned.id] = self._estimate(call, interned.signature)
        self.sources[estimate.source] += 1
        return estimate.transfer_ns

    def _estimate(self, call: Call, signature: Signature) -> Estimate:
        ranks = self._groups[signature.group].ranks
        if call.operator.kind in (Kind.SEND, Kind.RECV):
            ranks = (self._rank, self._peer(signature, ranks))
            if ranks[0] == ranks[1]:
                return Estimate(0, SAME_RANK, 0.0)
        dtypes = signature.in_dtypes or signature.out_dtypes
        return self._estimator.estimate(
            signature.op,
            ranks,
            signature.in_msg_bytes,
            signature.out_msg_bytes,
            dtypes[0] if dtypes else "float32",
        )

    def _peer(self, signature: Signature, ranks: tuple[int, ...]) -> int:
        """The other rank of a message; of one from any source, the next in the group: nobody knows better."""
        if signature.peer != NO_PEER:
            return ranks[signature.peer]
        return ranks[(ranks.index(self._rank) + 1) % len(ranks)]


def check_world(estimator: Estimator, world_size: int) -> None:
    """Raise UsageError, before the program runs, for a network that is too small for the job."""
    network = estimator.network
    if network.fabric is None and world_size > estimator.ranks_per_node:
        raise UsageError(
            f"Network {network.name} is one node of {estimator.ranks_per_node} ranks and the job has "
            f"{world_size}. Name a network with a fabric, say h100-ib400 (docs/network.md)."
        )
