"""The jobs of ``fidelity.py``, and what its jobs should cover and cannot here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CASES = REPOSITORY.parent / "shared" / "cases"
OWN = REPOSITORY / "tests" / "programs"
DIRECTORY = "{directory}"
"""In a row's program: the directory of its run."""


@dataclass(frozen=True)
class Row:
    """A job: ``program`` as after ``--`` of ``ranklens record``; ``ranks`` to replay, None for all. ``needs``
    is a package without which it is left out."""

    name: str
    nproc: int
    program: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ranks: tuple[int, ...] | None = None
    needs: str = "torch"

    @property
    def missing(self) -> str:
        """What it needs and this machine lacks, ``""`` if nothing."""
        if self.program[0].startswith(str(CASES)) and not CASES.is_dir():
            return str(CASES)
        return "" if find_spec(self.needs) else self.needs

    @property
    def is_available(self) -> bool:
        return not self.missing


def case(file: str) -> tuple[str, ...]:
    return (str(CASES / file),)


def own(file: str, *args: str) -> tuple[str, ...]:
    return (str(OWN / file), *args)


# Megatron numbers ranks tp first, then dp, then pp: rank = tp + TP * (dp + DP * pp).
# Of the large jobs, ranks such that every position of every kind of group is replayed at least once.
RANKS_OF_TP4_PP2_DP4 = (0, 5, 10, 15, 16, 21, 26, 31)
RANKS_OF_TP4_PP4_DP4 = (0, 7, 21, 24, 42, 45, 50, 63)

ROWS = [
    Row("megatron TP2 PP2 DP2", 8, case("megatron_gpt.py"), {"TP": "2", "PP": "2"}),
    Row("megatron TP1 PP2 EP2", 8, case("megatron_gpt.py"), {"TP": "1", "PP": "2", "EP": "2"}),
    Row(
        "megatron TP4 PP2 DP4",
        32,
        case("megatron_gpt.py"),
        {"TP": "4", "PP": "2"},
        RANKS_OF_TP4_PP2_DP4,
    ),
    Row(
        "megatron TP4 PP4 DP4",
        64,
        case("megatron_gpt.py"),
        {"TP": "4", "PP": "4"},
        RANKS_OF_TP4_PP4_DP4,
    ),
    *[
        Row(
            f"zero stage {stage}, {nproc} ranks", nproc, case("deepspeed_zero.py"), {"ZERO_STAGE": str(stage)}
        )
        for stage in range(4)
        for nproc in (4, 8)
    ],
    *[
        Row(f"pipe {stages} stages, 4 ranks", 4, case("deepspeed_pipe.py"), {"STAGES": str(stages)})
        for stages in (2, 4)
    ],
    *[Row(f"ddp, {nproc} ranks", nproc, case("ddp.py")) for nproc in (4, 7)],
    *[
        Row(f"megatron {name}", 4, own("megatron_features.py", *flags))
        for name, flags in {
            "interleaved PP2 VP2": ("--pp", "2", "--vp", "2"),
            "DP, no dist. optimizer": ("--plain-optimizer",),
            "same, overlapped": ("--plain-optimizer", "--overlap", "--tp", "2"),
            "dist. optim. overlapped": ("--overlap", "--tp", "2"),
            "EP2 all-to-all": ("--ep", "2"),
            "sequence parallel": ("--tp", "2", "--sequence-parallel"),
            "gloo groups": ("--gloo-groups", "--tp", "2"),
            "evaluation, timers": ("--pp", "2", "--evaluate", "--timers"),
            "bf16": ("--tp", "2", "--bf16", "--overlap"),
            "checkpoint": ("--tp", "2", "--bf16", "--checkpoint", f"{DIRECTORY}/checkpoint"),
        }.items()
    ],
    *[
        Row(f"deepspeed {name}", 4, own("deepspeed_features.py", *flags))
        for name, flags in {
            "ZeRO-3 offload": ("--stage", "3", "--offload"),
            "ZeRO++ hpZ": ("--stage", "3", "--hpz", "2"),
            "tied pipe, 2 stages": ("--tied-stages", "2"),
            "tied pipe, 4 stages": ("--tied-stages", "4"),
            "MoE, expert groups": ("--stage", "1", "--experts", "2"),
            "Ulysses": ("--stage", "1", "--ulysses", "2"),
            "accumulation": ("--stage", "2", "--accumulate", "3"),
            "bf16": ("--stage", "3", "--bf16"),
            "checkpoint": ("--stage", "3", "--checkpoint", f"{DIRECTORY}/checkpoint"),
            "comms logger": ("--stage", "1", "--comms-logger"),
        }.items()
    ],
    Row("hugging face trainer", 4, own("hf_trainer.py"), needs="transformers"),
    Row("own fsdp2", 4, own("fsdp2.py")),
    Row("own dtensor", 4, own("dtensor.py")),
    Row("own tiny TP2", 4, own("tiny.py"), {"TP": "2"}),
    Row("own megatron TP2 PP2", 4, ("-m", "ranklens_megatron.examples.gpt", "--tp", "2", "--pp", "2")),
    Row("own zero stage 3", 2, ("-m", "ranklens_deepspeed.examples.zero", "--stage", "3")),
    Row("own pipe 2 stages", 2, ("-m", "ranklens_deepspeed.examples.pipe", "--stages", "2")),
]

NOT_ON_CPU = {
    "megatron context parallelism": "megatron-core: 'Context parallelism is only supported by "
    "TEDotProductAttention!'; Transformer Engine is built for CUDA only",
    "deepspeed ZeRO++ qwZ, qgZ": "deepspeed: 'This op had not been implemented on CPU backend.' "
    "(the quantizer is a CUDA kernel)",
    "deepspeed DeepCompile": "its C++ operators are built by nvcc",
}
"""What these rows should cover and cannot without a GPU (or a package), with the reason seen."""
