"""Do a call's inputs have the recorded bits: the first divergence, and the score."""

from __future__ import annotations

import msgspec

from ranklens_core.schema import GroupRecord, Signature


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first input that differs from the record."""

    text: str
    step: int
    op: str
    group: str
    role: str
    seq_id: int
    tensor: int
    site: str
    recorded_site: str


class ValueScore:
    """Counts compared inputs (one per call) and keeps the first divergence."""

    def __init__(self) -> None:
        self.compared = 0
        self.identical = 0
        self.first_divergence: Divergence | None = None

    def agreed(self) -> None:
        """A call's inputs have the recorded bits."""
        self.compared += 1
        self.identical += 1

    def differed(
        self,
        recorded: tuple[bytes, ...],
        now: tuple[bytes, ...],
        *,
        signature: Signature,
        recorded_signature: Signature,
        group: GroupRecord | None,
        seq_id: int,
        step: int,
    ) -> None:
        """A call's inputs have other bits; ``recorded`` and ``now`` are their content addresses."""
        self.compared += 1
        if self.first_divergence is None:
            tensor = next(i for i, (then, here) in enumerate(zip(recorded, now, strict=True)) if then != here)
            self.first_divergence = _divergence(tensor, signature, recorded_signature, group, seq_id, step)


def _divergence(
    tensor: int,
    now: Signature,
    recorded: Signature,
    group: GroupRecord | None,
    seq_id: int,
    step: int,
) -> Divergence:
    role = group.role if group else ""
    site = now.program_site or now.site
    recorded_site = recorded.program_site or recorded.site
    where = f"{now.in_dtypes[tensor]}{list(now.in_shapes[tensor])}" if now.in_shapes else "input"
    lines = [
        f"first divergence in {'set-up' if step < 0 else f'step {step}'}: "
        f"input {tensor} of {now.op} {seq_id} on {role or 'group'} (ranks {now.group})",
        f"  input     {where} has other bits than recorded",
        f"  now       at {site or 'an unknown place'}",
        f"  recorded  at {recorded_site or 'an unknown place'}",
    ]
    return Divergence(
        text="\n".join(lines),
        step=step,
        op=now.op,
        group=now.group,
        role=role,
        seq_id=seq_id,
        tensor=tensor,
        site=site,
        recorded_site=recorded_site,
    )
