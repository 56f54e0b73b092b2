"""From a live call to its ``Signature``, interned: the same for recorder and replayer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import torch

from ranklens_core.c10d.call import Call
from ranklens_core.c10d.groups import Groups
from ranklens_core.c10d.ops import Kind
from ranklens_core.c10d.site import NOWHERE, Site, Sites
from ranklens_core.c10d.values import dtype_name
from ranklens_core.schema import Purpose, Signature


class Interned:
    """A signature with its number (in order of first appearance in this process)."""

    __slots__ = ("floating", "id", "lane", "signature")

    def __init__(self, number: int, signature: Signature, floating: bool) -> None:
        self.id = number
        self.signature = signature
        self.lane = lane_of(signature)
        self.floating = floating


Lane = tuple[str, str, int]
"""What ``seq_id`` counts in: (group key, ``""`` or send/recv, peer or NO_PEER)."""


def lane_of(signature: Signature) -> Lane:
    """The sequence a call belongs to: its group's, or its peer's for point-to-point calls."""
    if signature.op in ("send", "recv", "recv_any_source"):
        return (signature.group, signature.op, signature.peer)
    return (signature.group, "", 0)


class Signatures:
    """Interns the signature of each call; ``on_new`` is told of every new one.

    With ``sites`` None signatures have no site and are cheaper: see ``located``.
    """

    def __init__(self, groups: Groups, sites: Sites | None, on_new: Callable[[Signature], None]) -> None:
        self._groups = groups
        self._sites = sites
        self._on_new = on_new
        self._lock = threading.Lock()
        self._known: dict[object, Interned] = {}

    def of(self, call: Call) -> Interned:
        """The signature of ``call``, whose site is the current stack."""
        site = self._sites.find() if self._sites is not None else NOWHERE
        # the group's object identity is no key: a record must not keep the group alive, and a name
        # may come back for another group, so the key string is looked up each time
        group = self._groups.record(call.pg).key
        key = (
            call.operator.name,
            group,
            call.peer,
            call.reduce_op,
            call.tag,
            call.is_async,
            tuple([(t.shape, t.dtype) for t in call.inputs]),
            None if call.outputs is call.inputs else tuple([(t.shape, t.dtype) for t in call.outputs]),
            call.in_split_sizes,
            call.out_split_sizes,
            call.device,
            id(site),
        )
        return self._known.get(key) or self._add(key, call, group, site)

    def _add(self, key: object, call: Call, group: str, site: Site) -> Interned:
        with self._lock:
            found = self._known.get(key)  # another thread may have come first
            if found is None:
                signature = _signature(call, group, site)
                tensors = call.inputs or call.outputs
                floating = bool(tensors) and all(_floats(t.dtype) for t in tensors)
                self._on_new(signature)
                found = self._known[key] = Interned(len(self._known), signature, floating)
        return found


def located(signature: Signature, sites: Sites) -> Signature:
    """``signature`` with the site of the current stack, for a message about the call being made."""
    site = sites.find()
    return msgspec.structs.replace(signature, site=site.site, program_site=site.program_site)


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _signature(call: Call, group: str, site: Site) -> Signature:
    purpose = site.purpose or (Purpose.SYNC if call.operator.kind is Kind.SYNC else Purpose.TENSOR)
    return Signature(
        op=call.operator.op,
        group=group,
        purpose=purpose,
        peer=call.peer,
        reduce_op=call.reduce_op,
        tag=call.tag,
        is_async=call.is_async,
        device=call.device_type,
        in_dtypes=tuple(dtype_name(t.dtype) for t in call.inputs),
        in_shapes=tuple(tuple(t.shape) for t in call.inputs),
        out_dtypes=tuple(dtype_name(t.dtype) for t in call.outputs),
        out_shapes=tuple(tuple(t.shape) for t in call.outputs),
        in_split_sizes=call.in_split_sizes,
        out_split_sizes=call.out_split_sizes,
        in_msg_bytes=sum(t.numel() * t.element_size() for t in call.inputs),
        out_msg_bytes=sum(t.numel() * t.element_size() for t in call.outputs),
        site=site.site,
        program_site=site.program_site,
    )
