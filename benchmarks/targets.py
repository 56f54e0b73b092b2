"""The largest targets of ``ranklens run``: 64 ranks of each framework recorded here, ranks replayed alone.

    python benchmarks/targets.py                     both, about five minutes on two cores
    python benchmarks/targets.py --only megatron

Prints the commands and tables of ``ranklens run -m`` and how long each sweep took, recording included.
Exit status 1 unless every call and every compared input of every replay is as recorded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

SWEEPS = {
    "megatron": ("target=megatron_tp4_pp4_dp4", "rank=0,37,63"),
    "deepspeed": ("target=deepspeed_zero3_64", "rank=0,37,63"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=sorted(SWEEPS))
    parser.add_argument("--task", default="debug,memory", help="tasks of each rank (default: %(default)s)")
    args = parser.parse_args()
    worst = 0
    for framework, overrides in SWEEPS.items():
        if args.only not in (None, framework):
            continue
        words = ["run", "-m", *overrides, f"task={args.task}"]
        print(f"$ ranklens {' '.join(words)}", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            done = subprocess.run([sys.executable, "-m", "ranklens_core", *words], cwd=directory)
        print(
            f"{framework}: exit status {done.returncode}, {time.monotonic() - began:.0f} s in all\n",
            flush=True,
        )
        worst = max(worst, done.returncode)
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main())
