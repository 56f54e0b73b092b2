"""Train a small mixture of experts with DeepSpeed: expert and data parallelism.

    torchrun --nproc-per-node 8 -m ranklens_deepspeed.examples.moe --ep 4

Each token of the data follows from the one before by a fixed random table: the loss falls from
log(vocabulary). Prints ``rank R step S loss L grad_norm G``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer


def parse_arguments() -> argparse.Namespace:
    """The command line; DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stage", type=int, default=1, choices=range(3), help="ZeRO stage")
    parser.add_argument("--ep", type=int, default=2, help="expert-parallel ranks")
    parser.add_argument("--num-experts", type=int, help="default: two an expert-parallel rank")
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


class Block(torch.nn.Module):
    """A residual layer that mixes neighbours and sends each token to one expert."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(2 * args.hidden_size, args.hidden_size)
        expert = torch.nn.Sequential(
            torch.nn.Linear(args.hidden_size, 2 * args.hidden_size),
            torch.nn.GELU(),
            torch.nn.Linear(2 * args.hidden_size, args.hidden_size),
        )
        self.experts = MoE(
            args.hidden_size,
            expert,
            num_experts=args.num_experts or 2 * args.ep,
            ep_size=args.ep,
            k=1,
            min_capacity=0,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x``: float [micro-batch, sequence, hidden]; the same, and the load-balancing loss."""
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        x = x + torch.tanh(self.mix(torch.cat((before, x), dim=-1)))
        out, balance, _ = self.experts(x)
        return x + out, balance


class LanguageModel(torch.nn.Module):
    """Predicts the next token; returns the mean loss with the experts' load-balancing loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(args.vocab_size, args.hidden_size)
        self.blocks = torch.nn.ModuleList(Block(args) for _ in range(args.num_layers))
        self.head = torch.nn.Linear(args.hidden_size, args.vocab_size)
        self.balance = args.balance

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``tokens`` and ``labels``: int64 [micro-batch, sequence]."""
        hidden = self.embedding(tokens)
        balance = hidden.new_zeros(())
        for block in self.blocks:
            hidden, more = block(hidden)
            balance = balance + more.float()
        loss: torch.Tensor = torch.nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1), labels.flatten()
        )
        loss += self.balance * balance
        return loss


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Tokens [micro-batch, sequence + 1], int64, other ones on every rank."""
    follows = torch.randperm(args.vocab_size, generator=torch.Generator().manual_seed(args.seed))
    draw = torch.Generator().manual_seed(args.seed + 1 + dist.get_rank())
    while True:
        tokens = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=draw)
        for i in range(1, tokens.shape[1]):
            tokens[:, i] = follows[tokens[:, i - 1]]
        yield tokens


def main() -> None:
    """Train, printing one line a step."""
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = LanguageModel(args)
    groups = split_params_into_different_moe_groups_for_optimizer(
        [{"params": list(model.parameters()), "name": "all"}]
    )
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, config=config, optimizer=torch.optim.Adam(groups, lr=args.lr)
    )
    data = batches(args)
    for step in range(args.steps):
        for _ in range(args.gradient_accumulation_steps):
            tokens = next(data).to(engine.device)
            loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        print(
            f"rank {dist.get_rank()} step {step} loss {loss.item():.9f} "
            f"grad_norm {float('nan' if norm is None else norm):.9f}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
