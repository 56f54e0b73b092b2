"""Careless and hostile use: every fault that an attempt to break RankLens has shown stays repaired."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import RunCli
from trace_samples import make_call, make_completion, make_header, make_run, make_signature

from ranklens_core.errors import TraceDamagedError, UnsupportedError
from ranklens_core.schema import EnvironmentItem, GroupRecord, Signature
from ranklens_core.trace import TraceWriter, content_address, open_trace, verify

TRAIN = """
import os, sys, torch, torch.distributed as dist
torch.manual_seed(1)
def train(steps=3):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.randn(2, 2)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        print(f"loss {loss.item():.9f}", flush=True)
dist.init_process_group("gloo")
"""
CALLS = 6  # 3 steps x 2 parameters
