"""Does a call have the structure of its record, and if not, in words, what differs."""

from __future__ import annotations

import msgspec

from ranklens_core.schema import MATCHED_FIELDS, NO_PEER, GroupRecord, Signature


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first call that is not the recorded one. ``fields`` are (name, recorded, now)."""

    text: str
    step: int
    op: str
    group: str
    seq_id: int
    fields: tuple[tuple[str, str, str], ...]
    site: str


def structure_of(signature: Signature) -> tuple[object, ...]:
    """The part of a signature that a replayed call must share."""
    return tuple(getattr(signature, name) for name in MATCHED_FIELDS)


def differing_fields(recorded: Signature, now: Signature) -> tuple[tuple[str, str, str], ...]:
    """(field, recorded, now) for each matched field that differs, in ``MATCHED_FIELDS`` order."""
    return tuple(
        (name, _text(getattr(recorded, name)), _text(getattr(now, name)))
        for name in MATCHED_FIELDS
        if getattr(recorded, name) != getattr(now, name)
    )


def describe(signature: Signature, group: GroupRecord | None = None) -> str:
    """A call in one line: ``all_reduce sum float32[64, 32] on tp (ranks 4-5)``."""
    shapes = signature.out_shapes or signature.in_shapes
    dtypes = signature.out_dtypes or signature.in_dtypes
    tensors = ", ".join(f"{d}{list(s)}" for d, s in zip(dtypes[:3], shapes[:3], strict=True))
    if len(shapes) > 3:
        tensors += f" and {len(shapes) - 3} more"
    peer = ""
    if signature.peer != NO_PEER:
        word = {"send": "to", "recv": "from"}.get(signature.op, "root")
        peer = f" {word} {group.ranks[signature.peer] if group else signature.peer}"
    role = f"{group.role} " if group and group.role else ""
    parts = (signature.op, signature.reduce_op, tensors)
    return " ".join(part for part in parts if part) + f"{peer} on {role}(ranks {signature.group})"


def explain(
    *,
    now: Signature,
    group: GroupRecord | None,
    seq_id: int,
    step: int,
    recorded: Signature | None,
    nearest: str,
    ended: str,
) -> Mismatch:
    """Say what was called, what the record has there, which fields differ and where in the program.

    ``recorded`` is the record at that place, None if the sequence ended (``ended`` says why);
    ``nearest`` tells where in the sequence the same structure does stand, ``""`` if nowhere.
    """
    fields = differing_fields(recorded, now) if recorded else ()
    where = "set-up" if step < 0 else f"step {step}"
    lines = [
        f"structure mismatch in {where}, call {seq_id} of its sequence",
        f"  now       {describe(now, group)}",
        f"            at {now.program_site or now.site or 'an unknown place'}",
    ]
    if now.site and now.site != now.program_site:
        lines.append(f"            through {now.site}")
    if recorded is None:
        lines.append(f"  recorded  {ended}")
    else:
        lines.append(f"  recorded  {describe(recorded, group)}")
        lines.append(f"            at {recorded.program_site or recorded.site or 'an unknown place'}")
        lines.extend(f"  differs   {name}: recorded {then}, now {here}" for name, then, here in fields)
    if nearest:
        lines.append(f"  nearest   {nearest}")
    return Mismatch(
        text="\n".join(lines),
        step=step,
        op=now.op,
        group=now.group,
        seq_id=seq_id,
        fields=fields,
        site=now.program_site or now.site,
    )


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value) if value != "" else "none"
