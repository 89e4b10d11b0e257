"""``halftune plan``, as a user calls it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from published import QWEN2_5_0_5B

from halftune.cli import main, preflight
from halftune.cli.verbs import train
from halftune.config.load import load_config
from halftune.config.recipe_facts import run_facts
from halftune.config.render import resolved_yaml
from halftune.core.errors import DataError, MissingPackageError, ModelError
from halftune.hardware.catalogue import lookup
from halftune.launch.command import world_size
from halftune.model.files.builtin import materialize

RECIPE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
data: {train: data.jsonl}
training: {output_dir: out}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "data.jsonl").write_text('{"instruction": "a", "output": "b"}\n')
    (tmp_path / "x.yaml").write_text(RECIPE)
    return tmp_path / "x.yaml"


def launched(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """Sets what a launcher gives rank 0."""
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


def halftune(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    return int(left.value.code or 0)


def test_a_model_that_is_trained_first_is_not_missed(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    second = RECIPE.replace("builtin:qwen2-tiny", "out/final").replace("dir: out", "dir: next")
    (recipe.parent / "next.yaml").write_text(f"depends_on: [x.yaml]\n{second}")
    assert halftune("--config", "next.yaml") == 0
    assert capsys.readouterr().err == ""


def test_it_prints_the_plan(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert halftune("--config", str(recipe), "--hardware", "t4x2", "--num-processes", "2") == 0
    said = capsys.readouterr().out
    assert "Plan for builtin:qwen2-tiny (qwen2)" in said
    assert "on 2 × Tesla T4" in said
    assert "2 processes" in said
    assert "devices is used" not in said
    assert "Time: unknown before a first run" in said


def test_it_prints_json(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert halftune("--config", str(recipe), "--hardware", "h200", "--with", "flash-attn=2.8.3", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["precision"]["compute"]["value"] == "bf16"
    assert plan["attention"]["provider"]["value"] == "flash_attn"
    assert plan["num_parameters"]["value"] == 2_952_128


def test_overrides_and_a_launchers_world_size_count(
    recipe: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, 4)
    assert halftune("--config", str(recipe), "--hardware", "a100", "--json", "precision=fp32") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["precision"]["compute"]["value"] == "fp32"
    assert plan["batch"]["world_size"] == 4


def test_without_a_launcher_it_is_planned_as_train_starts_it(
    recipe: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, count in (((), 2), (("distributed.num_processes=1",), 1)):
        assert halftune("--config", str(recipe), "--hardware", "t4x2", "--json", *asked) == 0
        plan = json.loads(capsys.readouterr().out)
        run = load_config(recipe, asked).run
        assert plan["batch"]["world_size"] == world_size(run, lookup("t4x2")) == count
        idle = [warning for warning in plan["warnings"] if "1 of 2 devices is used" in warning]
        assert len(idle) == (count == 1)
    monkeypatch.setenv("WORLD_SIZE", "two")
    for verb in ("plan", "train"):
        with pytest.raises(SystemExit):
            main([verb, "--config", str(recipe)])
        said = capsys.readouterr().err
        assert "WORLD_SIZE" in said
        assert "'two'" in said
    for wrong in ("0", "-1", "two"):
        assert halftune("--config", str(recipe), "--num-processes", wrong) == 2


def test_a_launcher_that_starts_another_number_is_an_error(
    recipe: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch, 2)
    assert halftune("--config", str(recipe), "distributed.num_processes=4") == 2
    assert "the launcher started 2" in capsys.readouterr().err


def test_packed_rows_that_break_compiled_graphs_are_told(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    for asked, told in (("eager", True), ("sdpa", False)):
        assert halftune("--config", str(recipe), "--json", "training.torch_compile=true", f"attention={asked}") == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert any("ends a graph in every layer" in warning for warning in warnings) == told


def test_an_earlier_run_gives_the_time(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    line = {"step": 5, "epoch": 0.5, "loss": 1.0, "tokens": 1000, "seconds": 0.5}
    (recipe.parent / "out").mkdir()
    (recipe.parent / "out/resolved.yaml").write_text(resolved_yaml(load_config(recipe)))
    (recipe.parent / "out/metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert halftune("--config", str(recipe)) == 0
    assert "Time: 15 s for 3 epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hardware", "mi300y"], "did you mean mi300x"),
        (["--hardware", "t4", "precision=bf16"], "has no bf16 units"),
        (["--hardware", "cpu", "precision=fp16"], "fp16 is slow"),
        (["--hardware", "t4", "attention=fa2"], "compute capability ≥ 8.0"),
        (["--with", "flash-attn=2.8.3"], "--with requires --hardware"),
        (["--hardware", "a100", "--with", "flash-attn"], "PACKAGE=VERSION"),
        (["model.name_or_path=builtin:qwen2-smal"], "did you mean builtin:qwen2-small"),
        (["adapter={type: lora, target_modules: [q_prj]}"], "did you mean q_proj"),
    ],
)
def test_mistakes_are_said_without_a_traceback(
    recipe: Path, capsys: pytest.CaptureFixture, arguments: list[str], says: str
) -> None:
    assert halftune("--config", str(recipe), *arguments) in (2, 3)
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


LARGE = ("data.max_length=400000", "training.per_device_train_batch_size=64", "training.gradient_checkpointing=false")
IGNORED = "training.ignore_memory_estimate=true"


def test_a_run_that_does_not_fit_leaves_with_1(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    asked = ("--config", str(recipe), "--hardware", "t4", *LARGE)
    assert halftune(*asked) == 1
    assert "ignore_memory_estimate" in capsys.readouterr().err
    assert halftune(*asked, IGNORED) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_train_stops_where_plan_does(recipe: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    """Before torch, a weight or another process; with the estimate ignored it comes to these."""
    begun: list[str] = []
    monkeypatch.setattr(train, "probe", lambda: lookup("cpu"))
    monkeypatch.setattr(train.os, "execv", lambda *_: begun.append("processes"))
    monkeypatch.setattr(train, "_processes_together", lambda *_: nullcontext(stop()))
    asked = ["train", "--config", str(recipe), *LARGE, f"distributed.num_processes={processes}"]

    def stop() -> None:
        begun.append("training")
        raise DataError("as far as this test goes", code="data.empty")

    def code(*more: str) -> object:
        with pytest.raises(SystemExit) as left:
            main([*asked, *more])
        return left.value.code

    assert code() == 1
    assert not begun
    code(IGNORED)
    assert begun[-1] == ("processes" if processes > 1 else "training")


def test_torch_is_not_imported(recipe: Path) -> None:
    code = (
        "import sys; from halftune.cli import main\n"
        f"try: main(['plan', '--config', {str(recipe)!r}])\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "assert not {'torch', 'transformers', 'peft', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_everything_that_is_impossible_is_said_at_once(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    wrong = ("precision=bf16", "attention=fa2", "adapter.target_modules=[q_prj]")
    assert halftune("--config", str(recipe), "--hardware", "t4", "adapter=lora", *wrong) == 2
    lines = capsys.readouterr().err.splitlines()
    said = ("precision: bf16", "attention: fa2", "adapter.target_modules: no linear")
    assert len(lines) == len(said)
    for line, start in zip(lines, said, strict=True):
        assert line.startswith(start)


def test_a_loss_of_experts_needs_experts(recipe: Path, capsys: pytest.CaptureFixture) -> None:
    assert halftune("--config", str(recipe), "training.router_aux_loss_coef=0.01") == ModelError.exit_code
    assert "[model.no_router_loss]" in capsys.readouterr().err
    assert halftune("--config", str(recipe), "training.router_aux_loss_coef=0") in (0, 1)


def test_a_quantised_checkpoint_needs_its_package_here(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As training does; for another machine nobody knows what is installed there."""
    folder = recipe.parent / "model"
    shutil.copytree(materialize("qwen2-tiny"), folder, ignore=shutil.ignore_patterns("manifest.json"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    recipe.write_text(RECIPE.replace("builtin:qwen2-tiny", "./model"))
    version = preflight.version_of
    monkeypatch.setattr(preflight, "version_of", lambda name: None if name == "bitsandbytes" else version(name))
    assert halftune("--config", str(recipe)) == MissingPackageError.exit_code
    assert "bitsandbytes" in capsys.readouterr().err.partition("pip install")[2]
    assert halftune("--config", str(recipe), "--hardware", "a100") == 0
    monkeypatch.setattr(preflight, "version_of", lambda name: "0.45" if name == "bitsandbytes" else version(name))
    assert halftune("--config", str(recipe)) in (0, 1)


def test_training_in_float8_needs_torchao_here(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = preflight.version_of
    monkeypatch.setattr(preflight, "version_of", lambda name: None if name == "torchao" else version(name))
    asked = ("precision.compute=bf16", "precision.linear=fp8")
    for adapter, missing in (("none", True), ("lora", False)):
        loaded = load_config(recipe, (*asked, f"adapter={adapter}"))
        given = (loaded, run_facts(loaded.run))
        if missing:
            with pytest.raises(MissingPackageError) as caught:
                preflight.check_inputs(*given)
            assert "torchao" in caught.value.remedy
        preflight.check_inputs(*given, here=not missing)


def test_weights_that_are_elsewhere_do_not_matter_to_a_plan_for_another_machine(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    model = (f"model.name_or_path={folder}", "model.tokenizer=builtin:qwen2-tiny", "precision=fp32")
    assert halftune("--config", str(recipe), *model, "--hardware", "t4", "--json") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["num_parameters"]["value"] > 4e8
    assert str(folder) in told.err
    assert halftune("--config", str(recipe), *model) == 3
    assert "model.weights_missing" in capsys.readouterr().err
