"""The command of a run, and the same command inside every template."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from halftune.cli import main
from halftune.config.load import load_config
from halftune.config.run import RunConfig
from halftune.config.sections.training import DistributedSection
from halftune.core.errors import PlanError
from halftune.core.processes import heartbeat
from halftune.hardware.catalogue import lookup
from halftune.launch.command import RUNNER, command, processes
from halftune.launch.templates import TEMPLATES, render

ARGUMENTS = ["train", "--config", "my recipes/a 'b'.yaml", "training.seed=7"]
TWO = DistributedSection(num_processes=4, num_machines=2, main_process_ip="10.0.0.1", machine_rank=1)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def config(**distributed: Any) -> RunConfig:
    tree = {"model": {"name_or_path": "x"}, "data": {"train": ["x"]}, "training": {"output_dir": "runs/x"}}
    return RunConfig.model_validate({**tree, "distributed": distributed})


def test_one_machine_meets_at_a_fixed_port() -> None:
    words = command(DistributedSection(max_restarts=3, main_process_port=29777), 2, ARGUMENTS)
    assert words[1:3] == ["-m", RUNNER]
    assert option(words, "--master-port") == "29777"
    assert option(words, "--nproc-per-node") == "2"
    assert option(words, "--max-restarts") == "3"
    assert option(words, "--shutdown-timeout") == "600"
    larger = command(DistributedSection(), 2, ARGUMENTS, checkpoint=10 * heartbeat.SLOWEST)
    assert option(larger, "--shutdown-timeout") == "610", "a checkpoint is written after the signal"
    assert words[words.index("halftune") - 1 :] == ["-m", "halftune", *ARGUMENTS]


def test_several_machines_meet_at_the_first() -> None:
    words = command(TWO, 4, ARGUMENTS)
    assert option(words, "--nnodes") == "2"
    assert option(words, "--node-rank") == "1"
    assert option(words, "--nproc-per-node") == "2"
    assert option(words, "--rdzv-backend") == "c10d"
    assert option(words, "--rdzv-endpoint") == "10.0.0.1:29500"
    with pytest.raises(PlanError, match="address of machine 0"):
        command(DistributedSection(num_machines=2), 2, ARGUMENTS)


def test_torchrun_understands_it() -> None:
    from torch.distributed.run import get_args_parser

    for section in (DistributedSection(num_processes=2), TWO):
        words = command(section, 4, ARGUMENTS)
        parsed = get_args_parser().parse_args(words[3:])
        assert (parsed.module, parsed.training_script) == (True, "halftune")
        assert parsed.training_script_args == ARGUMENTS


def test_every_visible_device_is_used_unless_told_otherwise() -> None:
    assert processes(config(), lookup("a100x8")) == 8
    assert processes(config(num_machines=2, main_process_ip="x"), lookup("a100x8")) == 16
    assert processes(config(num_processes=4), lookup("a100x8")) == 4
    assert processes(config(), lookup("cpu")) == processes(config(), lookup("m2")) == 1
    assert processes(config(num_processes=3), lookup("cpu")) == 3
    with pytest.raises(PlanError, match="this machine has 2"):
        processes(config(num_processes=4), lookup("a100x2"))


def line_of(name: str, text: str) -> str:
    """The command line in a template, as bash is given it."""
    if name == "slurm":
        return shlex.split(next(line for line in text.splitlines() if line.startswith("srun")))[-1]
    tree = yaml.safe_load(text)
    if name == "skypilot":
        return tree["run"].splitlines()[-1]
    pod = tree["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod["containers"][0]["args"][0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_emits_the_same_command(name: str) -> None:
    run = config(num_processes=4, num_machines=2)
    words = shlex.split(line_of(name, render(name, run, 4, ARGUMENTS)))
    wanted = command(TWO, 4, ARGUMENTS)
    assert words[:2] == ["exec", "python"]
    unknown = {"1", "10.0.0.1:29500"}  # what only a job knows is a variable of the shell, or a name in the cluster
    for ours, theirs in zip(words[2:], wanted[1:], strict=True):
        assert ours == theirs or theirs in unknown
    assert option(words, "--node-rank").startswith("$")
    assert option(words, "--rdzv-endpoint").endswith(":29500")


@pytest.mark.parametrize("name", ["slurm", "skypilot"])
def test_a_shell_reads_a_template_as_it_is_meant(name: str, tmp_path: Path) -> None:
    """Run by bash with the scheduler's words, its command and ours are the same arguments, quotes and all."""
    arguments = ["train", "--config", "my recipes/a 'b' $HOME.yaml", "training.seed=999983"]
    text = render(name, config(num_processes=4, num_machines=2), 4, arguments)
    script = text if name == "slurm" else yaml.safe_load(text)["run"]
    for tool, does in {
        "python": 'printf "%s\\n" "$@"',
        "scontrol": 'printf "10.0.0.1\\n10.0.0.2\\n"',
        "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
    }.items():
        (tmp_path / tool).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / tool).chmod(0o755)
    told = {"SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "x", "SLURM_CPUS_PER_TASK": "16", "SKYPILOT_NODE_RANK": "1"}
    told |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=told, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == command(TWO, 4, arguments)[1:]


def test_the_verb_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    recipe = tmp_path / "with space.yaml"
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    recipe.write_text(
        f"model: {{name_or_path: 'builtin:qwen2-tiny'}}\ndata: {{train: '{data}'}}\n"
        f"training: {{output_dir: '{tmp_path}/run'}}\ndistributed: {{num_processes: 2}}\n"
    )
    with pytest.raises(SystemExit) as left:
        main(["launch", "--config", str(recipe), "--json", "training.seed=1"])
    assert not left.value.code
    words = json.loads(capsys.readouterr().out)
    assert words[-4:] == ["train", "--config", str(recipe), "training.seed=1"]
    with pytest.raises(SystemExit):
        main(["launch", "--config", str(recipe), "--dry-run", "training.seed=1"])
    assert shlex.split(capsys.readouterr().out) == words


def test_the_documented_jobs_are_what_is_emitted() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "how-to" / "schedulers.md").read_text()
    words = ["distributed.num_machines=2", "distributed.num_processes=16"]
    loaded = load_config(root / "configs" / "tiny" / "several_devices.yaml", words)
    arguments = ["train", "--config", "configs/tiny/several_devices.yaml", *words]
    for name in TEMPLATES:
        assert render(name, loaded.run, 16, arguments) in text, name
