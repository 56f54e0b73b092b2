"""Hugging Face's Trainer with a DeepSpeed config, on a tiny random model.

Needs transformers and accelerate, which are not among RankLens' own test packages.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Tokens(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PrintMetrics(TrainerCallback):
    """One line a rank and step, as the other programs print it."""

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if "loss" in logs:
            metrics = f"loss {logs['loss']:.9f} grad_norm {logs['grad_norm']:.9f}"
            print(f"rank {dist.get_rank()} step {state.global_step} {metrics}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    stage = parser.parse_args().stage
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
    }
    with tempfile.TemporaryDirectory() as directory:
        args = TrainingArguments(
            directory,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            deepspeed=config,
            learning_rate=0.01,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            seed=1,
            disable_tqdm=True,
        )
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
            )
        )
        Trainer(model, args, train_dataset=Tokens(), callbacks=[PrintMetrics()]).train()
    dist.barrier()
    dist.destroy_process_group()


main()
