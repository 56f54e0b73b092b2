"""What DeepSpeed's config can ask for, a flag each, on a model of a few thousand parameters.

    torchrun --nproc-per-node 4 deepspeed_features.py --stage 3 --offload
    torchrun --nproc-per-node 4 deepspeed_features.py --experts 2

Prints ``rank R step S loss L grad_norm G``.
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.sequence.layer import DistributedAttention

HIDDEN, VOCAB, SEQ, HEADS, MICRO, STEPS = 16, 32, 8, 4, 2, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=0, choices=range(4))
    parser.add_argument("--hpz", type=int, default=1, help="ZeRO++: ranks of a secondary partition")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--experts", type=int, default=0, help="expert-parallel ranks; twice as many experts")
    parser.add_argument("--ulysses", type=int, default=1, help="sequence-parallel ranks")
    parser.add_argument("--tied-stages", type=int, default=0, help="a pipeline whose embedding is its head")
    for name in ("offload", "qgz", "qwz", "bf16", "comms-logger"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--checkpoint", help="save there after the second step and go on from it")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": args.stage}
    if args.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
        zero["zero_hpz_partition_size"] = args.hpz
        zero["zero_quantized_weights"] = args.qwz
        zero["zero_quantized_gradients"] = args.qgz
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": args.bf16},
        "comms_logger": {"enabled": args.comms_logger, "prof_all": True, "verbose": False, "debug": False},
    }


class Local(torch.nn.Module):
    """Causal attention on (batch, sequence, heads, head size)."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
        )
        return out.transpose(1, 2).contiguous()


class Block(torch.nn.Module):
    def __init__(self, args: argparse.Namespace, sequence_group: Any) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN)
        local = Local()
        self.attention = DistributedAttention(local, sequence_group) if sequence_group else local
        self.is_distributed = sequence_group is not None
        self.has_experts = args.experts > 0
        feed = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, 2 * HIDDEN), torch.nn.GELU(), torch.nn.Linear(2 * HIDDEN, HIDDEN)
        )
        self.feed: torch.nn.Module = (
            MoE(HIDDEN, feed, num_experts=2 * args.experts, ep_size=args.experts, k=1, min_capacity=0)
            if self.has_experts
            else feed
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (
            y.unflatten(-1, (HEADS, HIDDEN // HEADS)).contiguous() for y in self.qkv(x).chunk(3, dim=-1)
        )
        attended = self.attention(q, k, v, 0) if self.is_distributed else self.attention(q, k, v)
        x = x + attended.flatten(2)
        if not self.has_experts:
            return x + self.feed(x), x.new_zeros(())
        out, balance, _ = self.feed(x)
        return x + out, balance


class Model(torch.nn.Module):
    def __init__(self, args: argparse.Namespace, sequence_group: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block(args, sequence_group) for _ in range(2))
        self.head = torch.nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, balance = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            hidden, more = block(hidden)
            balance = balance + more.float()
        logits = self.head(hidden).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance


class Tied(torch.nn.Embedding):
    """The pipeline's first and last layer."""


def as_head(layer: Tied, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ layer.weight.T


class PipeBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SequenceGrid:
    """Tells DeepSpeed which ranks share a sequence: consecutive ones."""

    def __init__(self, size: int) -> None:
        world = dist.get_world_size()
        self.size = size
        for start in range(0, world, size):
            ranks = list(range(start, start + size))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.sequence = group
        for start in range(size):
            ranks = list(range(start, world, size))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.data = group
        self.all = dist.new_group(list(range(world)))
        alone = [dist.new_group([rank]) for rank in range(world)]
        self.model = alone[dist.get_rank()]

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_sequence_parallel_group(self) -> Any:
        return self.sequence

    def get_sequence_parallel_world_size(self) -> int:
        return self.size

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank() % self.size

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.size

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self.size

    def get_sequence_data_parallel_group(self) -> Any:
        return self.all

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()


def say(step: int, loss: torch.Tensor, norm: Any) -> None:
    norm = float("nan") if norm is None else float(norm)
    print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9f} grad_norm {norm:.9f}", flush=True)


def train_pipeline(args: argparse.Namespace) -> None:
    layers = [
        TiedLayerSpec("embedding", Tied, VOCAB, HIDDEN),
        *(LayerSpec(PipeBlock) for _ in range(4)),
        TiedLayerSpec("embedding", Tied, VOCAB, HIDDEN, forward_fn=as_head),
    ]
    model = PipelineModule(
        layers, num_stages=args.tied_stages, loss_fn=token_loss, partition_method="uniform"
    )
    config = {**config_of(args), "gradient_accumulation_steps": 4}
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2)
    )
    draw = torch.Generator().manual_seed(7 + engine.grid.get_data_parallel_rank())

    def batches() -> Any:
        while True:
            tokens = torch.randint(0, VOCAB, (MICRO, SEQ + 1), generator=draw)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    data = batches()
    for step in range(STEPS):
        say(step, engine.train_batch(data_iter=data), None)


def train(args: argparse.Namespace) -> None:
    grid = SequenceGrid(args.ulysses) if args.ulysses > 1 else None
    model = Model(args, grid.sequence if grid else None)
    parameters: Any = list(model.parameters())
    if args.experts:
        parameters = split_params_into_different_moe_groups_for_optimizer(
            [{"params": parameters, "name": "all"}]
        )
    engine, *_ = deepspeed.initialize(
        model=model, config=config_of(args), optimizer=torch.optim.Adam(parameters, lr=1e-2), mpu=grid
    )
    part = grid.get_sequence_parallel_rank() if grid else 0
    draw = torch.Generator().manual_seed(7 + (grid.get_data_parallel_rank() if grid else dist.get_rank()))
    for step in range(STEPS):
        for _ in range(args.accumulate):
            tokens = torch.randint(0, VOCAB, (MICRO, args.ulysses * SEQ + 1), generator=draw)
            own = slice(part * SEQ, (part + 1) * SEQ)
            loss = engine(tokens[:, :-1][:, own].contiguous(), tokens[:, 1:][:, own].contiguous())
            engine.backward(loss)
            engine.step()
        say(step, loss, engine.get_global_grad_norm())
        if args.checkpoint and step == 1:
            engine.save_checkpoint(args.checkpoint, tag="one")
            engine.load_checkpoint(args.checkpoint, tag="one")
    if args.comms_logger:
        deepspeed.comm.log_summary()


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(1234)
    if args.tied_stages:
        train_pipeline(args)
    else:
        train(args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
