"""Train a small network with DeepSpeed's PipelineModule: pipeline and data parallelism.

    torchrun --nproc-per-node 8 -m ranklens_deepspeed.examples.pipe --stages 4

The labels are a fixed random projection's largest coordinate: the loss falls from log(classes).
Prints ``rank R step S loss L grad_norm nan`` (the pipeline engine keeps no gradient norm).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule

INPUTS, CLASSES = 16, 8


def parse_arguments() -> argparse.Namespace:
    """The command line; DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages")
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--num-blocks", type=int, default=6)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


class Block(torch.nn.Module):
    """A residual layer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: float [micro-batch, hidden]."""
        return x + torch.tanh(self.linear(x))


def batches(args: argparse.Namespace, data_parallel_rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs float32 [micro-batch, INPUTS], labels int64 [micro-batch]) without end."""
    projection = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(args.seed))
    draw = torch.Generator().manual_seed(args.seed + 1 + data_parallel_rank)
    while True:
        x = torch.randn(args.micro_batch_size, INPUTS, generator=draw)
        yield x, (x @ projection).argmax(dim=1)


def main() -> None:
    """Train, printing one line a step."""
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = PipelineModule(
        [
            LayerSpec(torch.nn.Linear, INPUTS, args.hidden_size),
            *(LayerSpec(Block, args.hidden_size) for _ in range(args.num_blocks)),
            LayerSpec(torch.nn.Linear, args.hidden_size, CLASSES),
        ],
        num_stages=args.stages,
        loss_fn=torch.nn.CrossEntropyLoss(),
    )
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.num_microbatches,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    data = batches(args, engine.grid.get_data_parallel_rank())
    for step in range(args.steps):
        loss = engine.train_batch(data_iter=data)
        print(f"rank {dist.get_rank()} step {step} loss {loss.item():.9f} grad_norm nan", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
