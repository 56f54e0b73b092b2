"""Where the ranks of a group sit: which share a node, and what share of the NICs they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ranklens_core.errors import UsageError


@dataclass(frozen=True)
class Placement:
    """The shape of a group on nodes. Ranks fill nodes in order: node = rank // ranks_per_node."""

    n_ranks: int
    n_nodes: int
    most_on_node: int
    """Members on the node that holds most of them."""
    fewest_on_node: int
    """Members on the node that holds fewest: that node's NIC share limits a ring."""

    @property
    def crosses_nodes(self) -> bool:
        return self.n_nodes > 1


def place(group_ranks: Sequence[int], ranks_per_node: int) -> Placement:
    """Place a group of global ranks.

    Raises UsageError for an empty group, a repeated or a negative rank.
    """
    if not group_ranks:
        raise UsageError("cannot place an empty group: give its global ranks")
    if len(set(group_ranks)) != len(group_ranks) or min(group_ranks) < 0:
        raise UsageError(f"not a group of global ranks: {list(group_ranks)[:32]} (repeated or negative rank)")
    per_node = Counter(rank // ranks_per_node for rank in group_ranks)
    return Placement(
        n_ranks=len(group_ranks),
        n_nodes=len(per_node),
        most_on_node=max(per_node.values()),
        fewest_on_node=min(per_node.values()),
    )
