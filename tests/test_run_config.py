"""``configs/``: every target, workload, task and launcher composes; a wrong key or value is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ranklens_core.cli.run import GROUPS, command, options_of
from ranklens_core.configs_dir import configs_dir
from ranklens_core.errors import UsageError
from ranklens_core.run.application import show_config
from ranklens_core.run.commands import program_of, record_command, replay_command
from ranklens_core.run.compose import compose_run, compose_sweep, search_path, shown
from ranklens_core.run.config import RunConfig
from ranklens_core.task import TASKS

TARGETS = [name for name, _ in options_of("target") if name != "own"]


def config_of(*overrides: str) -> RunConfig:
    return compose_run(overrides)[0].config


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_composes(target: str) -> None:
    config = config_of(f"target={target}")
    assert config.target.name == target
    assert config.workload.name.split("_")[0] == target.split("_")[0]
    assert f"-{config.workload.name}" in config.trace
    program = program_of(config.workload)
    command = record_command(config, program, overwrite=False)
    assert command.args[:3] == ("record", "--nproc", str(config.target.world_size))
    # every option that the target names is one that the program has
    source = Path(str(program.source_path())).read_text()
    assert all(f'"--{key}"' in source for key in config.workload.options)


def test_both_frameworks_at_every_size() -> None:
    sizes: dict[str, set[int]] = {"deepspeed": set(), "megatron": set()}
    for target in TARGETS:
        sizes[target.split("_")[0]].add(config_of(f"target={target}").target.world_size)
    assert all(found == {8, 16, 32, 64} for found in sizes.values())
    assert len(TARGETS) >= 12


def test_the_layout_becomes_the_programs_arguments() -> None:
    config = config_of("target=megatron_tp4_pp4_dp4", "rank=37", "workload.options.steps=2")
    assert program_of(config.workload).describe() == (
        "-m ranklens_megatron.examples.gpt --tp 4 --pp 4 --vp 1 --ep 1 --num-microbatches 4 "
        "--micro-batch-size 2 --steps 2"
    )
    command = replay_command(config, program_of(config.workload), None, Path("v.json"))
    assert command.typed().startswith(
        "ranklens replay ranklens-runs/traces/megatron_tp4_pp4_dp4-megatron_gpt --rank 37 "
        "--verdict v.json -- "
    )


def test_tasks_are_those_of_the_replay() -> None:
    assert {name for name, _ in options_of("task")} == set(TASKS)
    for name, about in options_of("task"):
        assert config_of(f"task={name}").task.name == name
        assert about == TASKS[name].about


def test_your_own_program(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.touch()
    config = config_of(
        "target=own",
        "target.world_size=4",
        "workload=own",
        f"workload.program={program}",
        "+workload.options.lr=0.1",
        "+workload.options.sizes=[1,2]",
        "+workload.options.fast=true",
        "+workload.options.slow=false",
        "workload.arguments=[a b]",
        "+workload.environment.TP=2",
    )
    command = record_command(config, program_of(config.workload), overwrite=True)
    assert command.typed() == (
        "TP=2 ranklens record --nproc 4 --out ranklens-runs/traces/own_4-own --overwrite -- "
        f"{program} --lr 0.1 --sizes 1 2 --fast 'a b'"
    )
    assert command.environ()["TP"] == "2"


def test_your_own_directory_of_configs(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "network").mkdir()
    (tmp_path / "target" / "mine.yaml").write_text("name: mine\nworld_size: 2\ndp: 2\n")
    (tmp_path / "network" / "lab.yaml").write_text("name: lab\ndescription: ours\nnode: h100\n")
    where = search_path(tmp_path)
    job, _ = compose_run([*where, "target=mine", "workload=deepspeed_zero", "network=lab", "task=tune"])
    assert job.config.target.world_size == 2
    assert job.network is not None
    assert job.network.option(tmp_path) == str(tmp_path / "network" / "lab.yaml")
    with pytest.raises(UsageError, match="--config-dir nowhere: there is no such directory"):
        search_path(Path("nowhere"))


def test_a_network_by_name_or_changed(tmp_path: Path) -> None:
    job, _ = compose_run(["network=h100-ib400", "task=tune"])
    assert job.network is not None
    assert job.network.option(tmp_path) == "h100-ib400"
    job, _ = compose_run(["network=loopback", "network.description=ours", "task=tune"])
    assert job.network is not None
    assert job.network.option(tmp_path) == str(tmp_path / "network.yaml")
    assert "description: ours" in (tmp_path / "network.yaml").read_text()


def test_what_ifs_change_the_replay_alone() -> None:
    config = config_of(
        "task=profile", "record=virtual", "record.own_core=[5]", "what_if.bandwidth=0.5", "rank=5"
    )
    assert "--own-core 5" in record_command(config, program_of(config.workload), overwrite=False).typed()
    replay = replay_command(config, program_of(config.workload), "h100-eth100", Path("v"))
    assert "--task profile --network h100-eth100 --bandwidth 0.5" in replay.typed()
    config = config_of("task=tune", "what_if.micro_batches=8")
    assert "--num-microbatches 4" in program_of(config.workload).describe()
    assert "--num-microbatches 8" in program_of(config.workload, 8).describe()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rnak=5"], "Could not override 'rnak'.*Did you mean rank"),
        (["target.wrld_size=5"], "target.wrld_size.*Did you mean world_size"),
        (["target=megatron_tp3"], r"Could not find 'target/megatron_tp3'.*Available options.*megatron_dp8"),
        (["rank=abc"], "rank=abc.*'abc'.*could not be converted to Integer"),
        (["rank=8"], "rank is 8. Allowed: the ranks of target megatron_tp2_pp2_dp2, 0 to 7"),
        (["rank=-1"], "rank is -1"),
        (["rank=0,1"], "rank has several values: a sweep, ranklens run -m"),
        (["rank="], "rank"),
        (["trace=''"], "trace is ''"),
        (["target.dp=3"], r"target.world_size is 8, but .* = 2 \* 2 \* 3 = 12"),
        (["target.tp=0"], "target.tp is 0"),
        (["target.zero=4"], "target.zero is 4"),
        (["target.ep=3"], "target.ep is 3. Allowed: a divisor of target.dp, 2"),
        (["target=own"], "target.world_size"),
        (["workload=own"], "workload.program"),
        (
            ["workload.micro_batches=batches"],
            "workload.micro_batches is 'batches'. Allowed: .*num-microbatches",
        ),
        (["task.name=debgu"], "task.name is 'debgu'. Allowed: debug, profile"),
        (["task.on_mismatch=go"], "task.on_mismatch is 'go'. Allowed: stop, estimate, report"),
        (["record.when=x"], "record.when is 'x'. Allowed: once, never, again"),
        (["record.clock=x"], "record.clock is 'x'. Allowed: wall, virtual"),
        (["record.payload='0;8'"], "record.payload is '0;8'"),
        (["record.payload='8'"], "record.payload is '8'. Allowed: all, none or ranks below 8"),
        (["record.steps='3:1'"], "record.steps is '3:1'"),
        (["record.network=loopback"], "record.network is for the virtual clock"),
        (["record=virtual", "record.network=null"], "record.network is missing"),
        (["record=virtual", "record.own_core=[9]"], r"record.own_core is \[9\]. Allowed: ranks from 0 to 7"),
        (["what_if.bandwidth=0", "record=virtual", "task=profile"], "what_if.bandwidth is 0"),
        (["what_if.bandwidth=2", "task=profile"], "what_if.bandwidth would change nothing.*wall clock"),
        (["what_if.bandwidth=2", "task=tune"], "what_if.bandwidth scales a network: name it"),
        (["network=h100-ib400"], "network would change nothing: task debug"),
        (["network=h100"], "Could not find 'network/h100'"),
        (["network=h100-ib400", "network.node=h1000", "task=tune"], "node.*h1000"),
        (["what_if.micro_batches=0", "task=tune"], "what_if.micro_batches is 0"),
        (["what_if.micro_batches=8"], "what_if.micro_batches makes other calls .* task debug stops"),
        (["what_if.micro_batches=8", "task=tune", "workload.micro_batches=null"], "name it with"),
    ],
)
def test_what_is_wrong_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        compose_run(overrides)
    assert error.match(f"(?s){message}")
    assert error.value.exit_status == 2


def test_a_program_that_is_not_there() -> None:
    config = config_of("workload=own", "workload.program=nowhere.py")
    with pytest.raises(UsageError, match=r"workload\.program: nowhere\.py: no such program file"):
        program_of(config.workload)
    config = config_of("workload.requires=no_such_package.part")
    with pytest.raises(UsageError, match=r"workload megatron_gpt needs no_such_package\.part"):
        program_of(config.workload)


def test_the_jobs_of_a_sweep() -> None:
    jobs, directory = compose_sweep(["target=deepspeed_zero3_16", "rank=0,7,15", "task=debug,memory"])
    assert [(job.config.rank, job.config.task.name) for job in jobs] == [
        (rank, task) for rank in (0, 7, 15) for task in ("debug", "memory")
    ]
    assert directory.startswith("ranklens-runs/sweeps/")
    jobs, directory = compose_sweep(["rank=range(0,8)", "hydra.sweep.dir=here"])
    assert ([job.config.rank for job in jobs], directory) == (list(range(8)), "here")
    with pytest.raises(UsageError, match="rank is 16"):
        compose_sweep(["target=deepspeed_zero3_16", "rank=0,16"])


@pytest.mark.parametrize(
    ("launcher", "target"),
    [
        ("slurm", "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"),
        ("ray_cluster", "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"),
    ],
)
def test_launchers_compose_without_their_plugins(launcher: str, target: str) -> None:
    composed = shown([f"hydra/launcher={launcher}"], "hydra")
    assert composed.hydra.launcher._target_ == target
    if launcher == "slurm":
        composed = shown(["hydra/launcher=slurm", "hydra.launcher.partition=gpu"], "hydra")
        assert (composed.hydra.launcher.partition, composed.hydra.launcher.tasks_per_node) == ("gpu", 1)
        assert composed.hydra.launcher.submitit_folder.endswith("/.submitit/%j")
    else:
        assert composed.hydra.launcher.ray.init.address == "auto"
        assert composed.hydra.launcher.ray.remote.num_cpus == 2


def test_a_launcher_whose_plugin_is_missing(tmp_path: Path) -> None:
    launchers = tmp_path / "hydra" / "launcher"
    launchers.mkdir(parents=True)
    (launchers / "mine.yaml").write_text("_target_: hydra_plugins.hydra_mine_launcher.x.Launcher\n")
    with pytest.raises(
        UsageError, match="hydra/launcher=mine needs hydra-mine-launcher, which is not installed"
    ):
        compose_sweep([*search_path(tmp_path), "rank=0,1", "hydra/launcher=mine"])


def test_the_configuration_can_be_seen() -> None:
    text = show_config(["target=deepspeed_pp4_dp2"], None, "job", resolve=True)
    assert "stages: 4" in text
    assert "hydra:" not in text
    assert show_config([], None, "hydra", resolve=False).startswith("hydra:")


def test_the_help_lists_groups_and_examples() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    assert "ranklens run target=megatron_tp4_pp4_dp4 task=debug rank=37" in result.output
    for group in GROUPS:
        assert f"{group}=..." in result.output
        for file in (configs_dir() / group).glob("*.yaml"):
            assert f"  {file.stem}" in result.output
    assert all(about for group in GROUPS for _, about in options_of(group))
