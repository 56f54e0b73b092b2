"""Train a small transformer with DeepSpeed ZeRO.

    deepspeed --num_gpus 8 --module ranklens_deepspeed.examples.zero --stage 3
    torchrun --nproc-per-node 8 -m ranklens_deepspeed.examples.zero --stage 3

Each token of the data follows from the one before by a fixed random table: the loss falls from
log(vocabulary). Prints ``rank R step S loss L grad_norm G``.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist


def parse_arguments() -> argparse.Namespace:
    """The command line; DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", metavar="DIR", help="save a checkpoint there before --save-step")
    parser.add_argument("--save-step", type=int, default=1)
    parser.add_argument("--load", metavar="DIR", help="go on from the checkpoint there")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


class LanguageModel(torch.nn.Module):
    """A transformer that predicts the next token; returns the mean loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                args.hidden_size,
                args.num_attention_heads,
                4 * args.hidden_size,
                dropout=0.0,
                batch_first=True,
            )
            for _ in range(args.num_layers)
        )
        self.head = torch.nn.Linear(args.hidden_size, args.vocab_size)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """``tokens`` and ``labels``: int64 [micro-batch, sequence]."""
        length = tokens.shape[1]
        mask = torch.ones(length, length, device=tokens.device, dtype=torch.bool).triu(1)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


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
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "Adam", "params": {"lr": args.lr, "torch_adam": True}},
    }
    sharded = deepspeed.zero.Init(config_dict_or_path=config) if args.stage == 3 else contextlib.nullcontext()
    with sharded:
        model = LanguageModel(args)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    data = batches(args)
    first = 0
    if args.load:
        _, state = engine.load_checkpoint(args.load)
        first = state["step"]
        for _ in range(first * args.gradient_accumulation_steps):  # those are trained on
            next(data)
    for step in range(first, args.steps):
        if args.save and step == args.save_step:
            engine.save_checkpoint(args.save, client_state={"step": step})
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
