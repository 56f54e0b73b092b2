"""``ranklens run``: a Hydra application over ``configs/``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from ranklens_core.configs_dir import configs_dir

GROUPS = {
    "target": "which job: framework, layout and number of ranks",
    "workload": "which program (a target brings one; own is yours)",
    "task": "what the replay is for",
    "network": "what if the network were this one",
    "record": "whether and how the target is recorded",
    "hydra/launcher": "how a sweep's jobs are started (besides Hydra's own: basic, joblib)",
}


class _WithGroups(click.Command):
    """The help ends with what there is in ``configs/``."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, about in GROUPS.items():
            with formatter.section(f"{group}=..., {about}"):
                formatter.write_dl(options_of(group) or [("", "")])


def options_of(group: str) -> list[tuple[str, str]]:
    """The shipped files of a group with their first words: its description, or its comment."""
    found = []
    for file in sorted((configs_dir() / group).glob("*.yaml")):
        about = re.search(r"^ *(?:description: |# (?!@)|when: \w+ +# )(.*)", file.read_text(), re.MULTILINE)
        found.append((file.stem, about[1] if about else ""))
    return found


@click.command(cls=_WithGroups)
@click.option("-m", "--multirun", is_flag=True, help="Sweep: a,b,c or range(0,64) for any key.")
@click.option(
    "--config-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Your own files: DIR/target/mine.yaml is target=mine.",
)
@click.option(
    "--cfg", type=click.Choice(["job", "hydra", "all"]), help="Show the configuration, run nothing."
)
@click.option("--resolve", is_flag=True, help="With --cfg: fill in ${...}.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE...]")
def command(
    multirun: bool, config_dir: Path | None, cfg: str | None, resolve: bool, overrides: tuple[str, ...]
) -> None:
    """Record a target if there is no trace of it yet, then replay a rank of it: a Hydra application.

    \b
      ranklens run target=megatron_tp4_pp4_dp4 task=debug rank=37
      ranklens run -m target=deepspeed_zero3_16 rank=0,7,15 task=debug,profile,memory
      ranklens run -m target=megatron_tp4_pp4_dp4 'rank=range(0,64)' hydra/launcher=joblib
      ranklens run -m record=virtual task=profile network=h100-ib400,h100-eth100 rank=0,7
      ranklens run -m task=tune what_if.micro_batches=4,8 rank=5
      ranklens run target=own target.world_size=4 workload=own workload.program=train.py rank=3

    Each command that it runs is printed. The exit status is the replay's, of a sweep the greatest.
    """
    from ranklens_core.run.application import run_once, run_sweep, show_config

    if cfg is not None:
        click.echo(show_config(overrides, config_dir, cfg, resolve=resolve), nl=False)
        return
    sys.exit((run_sweep if multirun else run_once)(overrides, config_dir))
