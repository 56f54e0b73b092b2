"""What Megatron-core can be told to do, a flag each, on a GPT of a few thousand parameters.

    torchrun --nproc-per-node 4 megatron_features.py --pp 2 --vp 2
    torchrun --nproc-per-node 4 megatron_features.py --tp 2 --sequence-parallel --evaluate --timers

Prints ``rank R step S loss L grad_norm G``; stages that do not know the loss print ``nan``.
"""

from __future__ import annotations

import argparse
import os
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
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.timers import Timers
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

# megatron-core 0.16 leaves this name undefined where Transformer Engine is absent
vars(moe_utils).setdefault("te_general_gemm", None)

SEQ, MICRO, VOCAB, MICROBATCHES, STEPS = 16, 2, 64, 4, 3


class Norm(torch.nn.LayerNorm):
    """A layer norm for sequence parallelism, which torch's own is refused for: its gradients, each from a
    part of the sequence, are summed over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tp", "pp", "cp", "ep", "vp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in (
        "sequence-parallel",
        "plain-optimizer",
        "overlap",
        "gloo-groups",
        "evaluate",
        "timers",
        "bf16",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--checkpoint", type=Path, help="save there after the second step and go on from it")
    return parser.parse_args()


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    experts: dict[str, Any] = {}
    if args.ep > 1:
        experts = {
            "num_moe_experts": 2 * args.ep,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": 2,
            "add_bias_linear": False,
        }
    return TransformerConfig(
        num_layers=2 * args.pp * args.vp,
        hidden_size=16,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vp if args.vp > 1 else None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        sequence_parallel=args.sequence_parallel,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        bf16=args.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **experts,
    )


def build(args: argparse.Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="LayerNorm")
    if args.sequence_parallel:
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        count = config.num_layers // args.pp
        spec = TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=Norm)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and not args.plain_optimizer,
        use_distributed_optimizer=not args.plain_optimizer,
        check_for_nan_in_grad=True,
        bucket_size=5_000,
    )
    chunks = []
    for chunk in range(args.vp):
        stage = {"vp_stage": chunk} if args.vp > 1 else {}
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCAB,
            max_sequence_length=SEQ,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=True,
            **stage,
        ).cuda()
        if args.bf16:
            model = model.bfloat16()
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0))
    return chunks


def save_and_load(path: Path, chunks: list[DistributedDataParallel], optimizer: Any) -> None:
    """Through Megatron's distributed checkpoint; what was loaded is what was saved."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()

    sharding = {"distrib_optim_sharding_type": "dp_reshardable"}

    def sharded() -> dict[str, Any]:
        model = {f"model{index}": chunk.module.sharded_state_dict() for index, chunk in enumerate(chunks)}
        whole = {key: value for part in model.values() for key, value in part.items()}
        return {**model, "optimizer": optimizer.sharded_state_dict(whole, metadata=sharding)}

    dist_checkpointing.save(sharded(), str(path))
    loaded = dist_checkpointing.load(sharded(), str(path))
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[f"model{index}"])
    optimizer.load_state_dict(loaded["optimizer"])


def main() -> None:
    args = arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tp,
        args.pp,
        virtual_pipeline_model_parallel_size=args.vp if args.vp > 1 else None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        create_gloo_process_groups=args.gloo_groups,
    )
    torch.manual_seed(1234)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    config = transformer_config(args)
    chunks = build(args, config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            use_distributed_optimizer=not args.plain_optimizer,
            overlap_param_gather=args.overlap and not args.plain_optimizer,
            params_dtype=config.params_dtype,
            bf16=args.bf16,
        ),
        chunks,
        use_gloo_process_groups=args.gloo_groups,
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.vp > 1:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
    else:
        config.no_sync_func = chunks[0].no_sync
    timers = Timers(2, "minmax") if args.timers else None
    config.timers = timers
    draws = [torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank()) for _ in chunks]
    if args.vp == 1:
        draws = draws[:1]

    def forward_step(draw: torch.Generator, model: torch.nn.Module) -> Any:
        tokens = torch.randint(0, VOCAB, (MICRO, SEQ + 1), generator=draw).cuda()
        positions = torch.arange(SEQ).expand(MICRO, -1).cuda()
        mask = (torch.tril(torch.ones(1, 1, SEQ, SEQ)) < 0.5).cuda()
        output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = losses.float().mean()
            return mean, {"loss": mean.detach().clone()}

        return output, loss

    def run(*, forward_only: bool) -> float:
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=draws if args.vp > 1 else draws[0],
            model=chunks if args.vp > 1 else chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=SEQ,
            micro_batch_size=MICRO,
            forward_only=forward_only,
        )
        losses = [float(result["loss"]) for result in results]
        return sum(losses) / len(losses) if losses else float("nan")

    for step in range(STEPS):
        if timers:
            timers("step", log_level=0).start(barrier=True)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = run(forward_only=False)
        _, grad_norm, _ = optimizer.step()
        if timers:
            timers("step").stop()
            timers.log(["step"])
        print(f"rank {dist.get_rank()} step {step} loss {loss:.9f} grad_norm {grad_norm:.9f}", flush=True)
        if args.evaluate:
            for chunk in chunks:
                chunk.eval()
            with torch.no_grad():
                loss = run(forward_only=True)
            for chunk in chunks:
                chunk.train()
            print(f"rank {dist.get_rank()} evaluated loss {loss:.9f}", flush=True)
        if args.checkpoint and step == 1:
            save_and_load(args.checkpoint, chunks, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
