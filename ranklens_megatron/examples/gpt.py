"""Train a small GPT with Megatron-core: tensor, pipeline (interleaved too), expert and data parallelism.

    torchrun --nproc-per-node 8 -m ranklens_megatron.examples.gpt --tp 2 --pp 2

Each token of the data follows from the one before by a fixed random table, with a little noise: the
loss falls from log(vocabulary) towards the noise. Prints ``rank R step S loss L grad_norm G``; only
the last pipeline stage knows the loss, the others print ``nan``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

# megatron-core 0.16 leaves this name undefined where Transformer Engine is absent
vars(moe_utils).setdefault("te_general_gemm", None)

NOISE = 0.1
"""Share of tokens that do not follow the table."""


def parse_arguments() -> argparse.Namespace:
    """The command line; sizes that train a step in about a second on eight ranks of two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument(
        "--vp", type=int, default=1, help="model chunks a stage; above 1: interleaved schedule"
    )
    parser.add_argument(
        "--ep", type=int, default=1, help="expert-parallel ranks; above 1: mixture of experts"
    )
    parser.add_argument("--num-layers", type=int, help="default: two a pipeline stage, or one a chunk")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-attention-heads", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", metavar="DIR", help="save a checkpoint there before --save-step")
    parser.add_argument("--save-step", type=int, default=1)
    parser.add_argument("--load", metavar="DIR", help="go on from the checkpoint there")
    return parser.parse_args()


def build_model(args: argparse.Namespace) -> tuple[TransformerConfig, list[DistributedDataParallel]]:
    """This rank's chunks of the model, each wrapped for data parallelism."""
    experts = (
        {
            "num_moe_experts": 2 * args.ep,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": 2,
            "add_bias_linear": False,
        }
        if args.ep > 1
        else {}
    )
    config = TransformerConfig(
        num_layers=args.num_layers or max(2, args.vp) * args.pp,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vp if args.vp > 1 else None,
        expert_model_parallel_size=args.ep,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **experts,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts.get("num_moe_experts"), normalization="LayerNorm")
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=20_000
    )
    chunks = []
    for chunk in range(args.vp):
        stage: dict[str, Any] = {"vp_stage": chunk} if args.vp > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.vocab_size,
            max_sequence_length=args.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=True,
            **stage,
        ).cuda()
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return config, chunks


def build_optimizer(
    args: argparse.Namespace, config: TransformerConfig, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Adam whose state is sharded over the data-parallel ranks."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=args.lr, use_distributed_optimizer=True, params_dtype=torch.float32
        ),
        chunks,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    no_syncs = [chunk.no_sync for chunk in chunks]
    config.no_sync_func = no_syncs if args.vp > 1 else no_syncs[0]
    return optimizer


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Tokens [micro-batch, sequence + 1], int64, other ones on every data-parallel rank."""
    follows = torch.randperm(args.vocab_size, generator=torch.Generator().manual_seed(args.seed))
    rank = parallel_state.get_data_parallel_rank()
    draw = torch.Generator().manual_seed(args.seed + 1 + rank)
    while True:
        tokens = torch.randint(args.vocab_size, (args.micro_batch_size, args.seq_length + 1), generator=draw)
        noisy = torch.rand(tokens.shape, generator=draw) < NOISE
        for i in range(1, tokens.shape[1]):
            tokens[:, i] = torch.where(noisy[:, i], tokens[:, i], follows[tokens[:, i - 1]])
        yield tokens


def sharded_state(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, *, loading: bool
) -> dict[str, Any]:
    """What Megatron's distributed checkpoint is to save or to load."""
    parts = {f"model{index}": chunk.module.sharded_state_dict() for index, chunk in enumerate(chunks)}
    model = {key: value for part in parts.values() for key, value in part.items()}
    sharding = {"distrib_optim_sharding_type": "dp_reshardable"}
    return {**parts, "optimizer": optimizer.sharded_state_dict(model, is_loading=loading, metadata=sharding)}


def save(path: Path, step: int, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Save the state before ``step``."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save({**sharded_state(chunks, optimizer, loading=False), "step": step}, str(path))


def make_adam_state(adam: torch.optim.Optimizer) -> None:
    """Give torch's Adam, which makes its state at its first step, what Megatron reads before it loads."""
    if not isinstance(adam, torch.optim.Adam):
        return
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


@torch.no_grad()
def load(path: Path, chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> int:
    """Load what ``save`` saved; the step to go on with."""
    adams = [inner.optimizer for inner in getattr(optimizer, "chained_optimizers", [optimizer])]
    for adam in adams:
        make_adam_state(adam)
    state = dist_checkpointing.load({**sharded_state(chunks, optimizer, loading=True), "step": 0}, str(path))
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{index}"])
    optimizer.load_state_dict(state["optimizer"])
    for adam in adams:
        for group in adam.param_groups:
            for parameter in group["params"]:
                # Megatron (0.16.1) leaves it at 0, and the same tensor for all parameters
                adam.state[parameter]["step"] = torch.tensor(float(group["step"]))
    return int(state["step"])


def forward_step(
    data: Iterator[torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
    """One micro-batch through this stage; the schedule calls it."""
    tokens = next(data).cuda()
    length = tokens.shape[1] - 1
    positions = torch.arange(length, device="cuda").expand(tokens.shape[0], -1)
    mask = torch.ones(1, 1, length, length, device="cuda").tril() < 0.5
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        # a copy: the schedule divides the loss itself by the number of micro-batches, in place
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def main() -> None:
    """Train, printing one line a step."""
    args = parse_arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if dist.is_nccl_available() else "gloo"
    dist.init_process_group(os.environ.get("BACKEND", backend))
    parallel_state.initialize_model_parallel(
        args.tp,
        args.pp,
        virtual_pipeline_model_parallel_size=args.vp if args.vp > 1 else None,
        expert_model_parallel_size=args.ep,
    )
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    config, chunks = build_model(args)
    optimizer = build_optimizer(args, config, chunks)
    forward_backward = get_forward_backward_func()
    data = [batches(args) for _ in chunks]  # every chunk reads the same batches in its own time
    first = 0
    if args.load:
        first = load(Path(args.load), chunks, optimizer)
        for read in data:
            for _ in range(first * args.num_microbatches):  # those are trained on
                next(read)
    for step in range(first, args.steps):
        if args.save and step == args.save_step:
            save(Path(args.save), step, chunks, optimizer)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        results: list[dict[str, Any]] = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data if args.vp > 1 else data[0],
            model=chunks,
            num_microbatches=args.num_microbatches,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        losses = [float(result["loss"]) for result in results]
        loss = sum(losses) / len(losses) if losses else float("nan")
        print(f"rank {dist.get_rank()} step {step} loss {loss:.9f} grad_norm {grad_norm:.9f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
