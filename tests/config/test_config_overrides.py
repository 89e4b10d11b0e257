"""The command line, origins, short forms, and the usual spellings of precision."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from halftune.cli import main
from halftune.cli.overrides import add_config_arguments, load_from
from halftune.config.load import LoadedConfig, load_config, load_run
from halftune.config.render import resolved_yaml
from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.core.errors import ConfigError

Load = Callable[..., LoadedConfig]
Problems = Callable[..., list[str]]


def test_values_are_read_as_yaml(load: Load, recipe_text: str) -> None:
    Path("a.json").write_text("[]")
    Path("b.json").write_text("[]")
    loaded = load(
        recipe_text,
        "training.learning_rate=1e-4",
        "precision=auto",
        "data.train=[a.json,b.json]",
        "data.train[1].samples=5",
        "data.train.0.weight=2",
        "adapter={type: lora, rank: 4}",
        "adapter.alpha=8",
        "training.eval_steps = 10",
        "data.eval_split=0.1",
        "model.chat_template_kwargs.enable_thinking=false",
    )
    run = loaded.run
    assert run.training.learning_rate == 1e-4
    assert run.precision.compute == "auto"
    assert [(source.path, source.samples, source.weight) for source in run.data.train] == [
        ("a.json", None, 2.0),
        ("b.json", 5, 1.0),
    ]
    assert isinstance(run.adapter, LoraAdapter)
    assert (run.adapter.rank, run.adapter.alpha) == (4, 8)
    assert dict(run.model.chat_template_kwargs) == {"enable_thinking": False}
    assert loaded.origins["adapter.rank"] == "command line"
    assert loaded.origins["data.train[1].samples"] == "command line"
    assert loaded.origins["model.name_or_path"] == "x.yaml:2"
    assert loaded.origins["training.seed"] == "default"


def test_an_override_reaches_into_short_forms(load: Load, recipe_text: str) -> None:
    run = load(recipe_text, "precision.trainable=fp32", "data.train.samples=3", "data.packing.split=true").run
    assert (run.precision.compute, run.precision.trainable) == ("fp32", "fp32")
    assert isinstance(load(recipe_text, "adapter=none").run.adapter, NoAdapter)
    assert run.data.train[0].samples == 3
    assert run.data.packing.split is True


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("y.yaml", "use --config y.yaml"),
        ("training", "expected section.key=value"),
        ("--sed=1", "unknown option"),
        ("a b=1", "expected section.key=value"),
        ("training.seed=[1", "training.seed: unclosed bracket or brace"),
        ("training.seed.x=1", "expected an integer"),
        ("data.train[7].path=x", "data.train has 1 entries, counted from 0"),
        ("training[0]=1", "training is not a list"),
        ("adapter.rank.x.y=1", "adapter.rank is 8, not a section"),
        ("training.seed=a: b: c", "a second colon in one line"),
    ],
)
def test_a_wrong_argument_is_named(argument: str, said: str, problems: Problems, recipe_text: str) -> None:
    (line,) = problems(recipe_text, argument)
    assert line.startswith(f"argument {argument}: ")
    assert said in line


def test_the_same_key_twice(problems: Problems, recipe_text: str) -> None:
    (line,) = problems(recipe_text, "training.seed=1", "training.seed=2")
    assert "training.seed: duplicate override, also training.seed=1" in line


def parsed(*arguments: str, rerun: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    if rerun:
        parser.add_argument("--rerun")
    return parser.parse_args(arguments)


def test_arguments_of_a_verb(load: Load) -> None:
    load()
    loaded = load_from(parsed("--config", "x.yaml", "training.seed=7", "--set", "training.max_steps=9"))
    assert (loaded.run.training.seed, loaded.run.training.max_steps) == (7, 9)
    for arguments, said in ((("x.yaml",), "--config x.yaml"), ((), "configs/quickstart.yaml")):
        with pytest.raises(ConfigError, match="no recipe") as caught:
            load_from(parsed(*arguments))
        assert said in caught.value.remedy


def test_rerun(load: Load, tmp_path: Path) -> None:
    loaded = load()
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="no such run folder"):
        load_run(folder)
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"no resolved\.yaml"):
        load_run(folder)
    (folder / "resolved.yaml").write_text(resolved_yaml(loaded))
    (folder / "config.yaml").write_text(loaded.text)
    again = load_from(parsed("--rerun", str(folder), "training.seed=1", rerun=True))
    assert again.run.training.seed == 1
    assert again.text == loaded.text, "what the user wrote stays what the user wrote"
    with pytest.raises(ConfigError, match="--rerun"):
        load_from(parsed("--rerun", "a", "--config", "b", rerun=True))


BARE = """\
model: {name_or_path: "builtin:qwen2-tiny"}
data: {train: "builtin:python-docs"}
training: {output_dir: runs/x}
"""


@pytest.mark.parametrize(
    ("written", "compute", "trainable"),
    [
        ("bf16: true", "bf16", "auto"),
        ("fp16: true", "fp16", "auto"),
        ("pure_bf16: true", "bf16", "bf16"),
        ("bf16: true\npure_bf16: true", "bf16", "bf16"),
        ("bf16: auto", "auto", "auto"),
        ("bf16: auto\nfp16: false", "auto", "auto"),
        ("bf16: true\nfp16: false", "bf16", "auto"),
        ("bf16: false", "fp32", "auto"),
        ("bf16: false\nfp16: false", "fp32", "auto"),
        ("fp16:\nbf16: true", "bf16", "auto"),
        ("bf16: true\nprecision: bf16", "bf16", "auto"),
        ("bf16: true\nprecision: {trainable: fp32}", "bf16", "fp32"),
        ("bf16: false\nprecision: fp16", "fp16", "auto"),
    ],
)
def test_usual_spellings(written: str, compute: str, trainable: str, load: Load) -> None:
    loaded = load(f"{BARE}{written}\n")
    assert loaded.run.precision.compute == compute
    assert loaded.run.precision.trainable == trainable


def test_spelling_under_training_and_its_origin(load: Load) -> None:
    loaded = load(BARE.replace("{output_dir: runs/x}", "\n  output_dir: runs/x\n  bf16: true"))
    assert loaded.run.precision.compute == "bf16"
    assert loaded.origins["precision.compute"] == "x.yaml:5 (training.bf16: true)"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("bf16: true\nfp16: true", "x.yaml:5: fp16: true conflicts with bf16: true (x.yaml:4)"),
        ("fp16: true\npure_bf16: true", "conflicts with"),
        ("bf16: auto\nfp16: true", "conflicts with"),
        ("precision: fp32\nbf16: true", "x.yaml:5: bf16: true contradicts precision: fp32 (x.yaml:4)"),
        ("precision: auto\nbf16: false", "bf16: false contradicts precision: auto"),
        ("precision: bf16\nbf16: false", "contradicts"),
        ("bf16: yes", "bf16: expected true, false or auto, got 'yes'"),
        ("pure_bf16: true\nprecision: {trainable: fp32}", "contradicts precision.trainable: fp32"),
    ],
)
def test_contradicting_spellings(written: str, said: str, problems: Problems) -> None:
    (line,) = problems(f"{BARE}{written}\n")
    assert said in line


def test_command_line_wins_in_either_spelling(load: Load) -> None:
    def compute(written: str, *overrides: str) -> str:
        return load(f"{BARE}{written}\n", *overrides).run.precision.compute

    assert compute("precision: fp32", "bf16=true") == "bf16"
    assert compute("bf16: true", "precision=fp16") == "fp16"
    assert compute("bf16: true", "fp16=true") == "fp16"
    assert compute("bf16: true", "bf16=false") == "fp32"
    assert compute("bf16: true", "training.bf16=auto") == "auto"


def test_paths_beside_the_recipe(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    found = load_config(tmp_path / "x.yaml", ["data.train=rows.jsonl"]).run.data.train[0].path
    assert found == str(tmp_path / "rows.jsonl")
    (elsewhere / "rows.jsonl").write_text('{"text": "y"}\n')
    assert load_config(tmp_path / "x.yaml", ["data.train=rows.jsonl"]).run.data.train[0].path == "rows.jsonl"


def test_home_is_written_out_once_in_every_path(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("checkpoint", "model", "tokenizer"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    run = load(
        "model: {name_or_path: ~/model, tokenizer: ~/tokenizer, chat_template: ~/template.jinja}\n"
        "data: {train: ~/train.jsonl, eval: [{path: ~/eval.jsonl}]}\n"
        "training: {output_dir: ~/runs/x}\n",
        "training.resume=~/checkpoint",
    ).run
    model, training = run.model, run.training
    written = (model.name_or_path, model.tokenizer, model.chat_template, run.data.train[0].path, run.data.eval[0].path)
    names = ("model", "tokenizer", "template.jinja", "train.jsonl", "eval.jsonl", "runs/x", "checkpoint")
    assert (*written, training.output_dir, training.resume) == tuple(str(tmp_path / name) for name in names)


def test_home_in_the_recipe_that_a_dependency_leaves(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shared = "data: {train: builtin:python-docs}\n"
    (tmp_path / "first.yaml").write_text(
        f"model: {{name_or_path: builtin:qwen2-tiny}}\ntraining: {{output_dir: ~/first}}\n{shared}"
    )
    run = load(
        f"depends_on: first.yaml\nmodel: {{name_or_path: ~/first/final}}\ntraining: {{output_dir: y}}\n{shared}"
    ).run
    assert run.model.name_or_path == str(tmp_path / "home/first/final")


def test_a_union_without_its_type_is_its_default_one(load: Load, recipe_text: str) -> None:
    run = load(recipe_text.replace("type: lora, ", ""), "method.train_on=last").run
    assert (run.adapter.type, run.method.type, run.method.train_on) == ("lora", "sft", "last")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["--learning_rate", "1e-4"], "training.learning_rate=1e-4"),
        (["--learning-rate=1e-4"], "training.learning_rate=1e-4"),
        (["--training.learning_rate=1e-4"], "training.learning_rate=1e-4"),
        (["--lora_r", "8"], "adapter.rank=8"),
        (["--max_steps"], "training.max_steps="),
    ],
)
def test_options_of_other_frameworks_are_translated(
    written: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--config", "x.yaml", *written])
    assert left.value.code == 2
    assert meant in capsys.readouterr().err


def test_an_option_that_means_nothing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", "--config", "x.yaml", "--nonsense"])
    assert left.value.code == 2
    assert "--nonsense" in capsys.readouterr().err
