"""Rules between keys, and about files: what no type can say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from halftune.config.load import LoadedConfig, load_config
from halftune.config.rules.check import check
from halftune.config.rules.files import DATA_ENDINGS
from halftune.config.rules.rule import RULES, Context
from halftune.core.errors import ConfigError

Load = Callable[..., LoadedConfig]
Problems = Callable[..., list[str]]

RULED = {
    ("attention=fa2",): "argument attention=fa2: attention: fa2 does not support precision: fp32",
    ("attention=fa3",): "fa3 does not support precision: fp32",
    ("precision={compute: fp16, trainable: bf16}",): "loss scaler requires fp32",
    ("training.load_best=true",): "training.load_best: requires evaluation data",
    ("training.early_stopping_patience=2",): "training.early_stopping_patience: requires evaluation data",
    ("training.eval_steps=10",): "training.eval_steps: requires evaluation data",
    ("training.metric_for_best=eval_loss_x",): "training.metric_for_best: requires evaluation data",
    ("data.eval_split=0.1", "training.metric_for_best=eval_loss_x"): "training.metric_for_best: expected eval_loss",
    ("data.eval=[{path: rows.jsonl, name: a}, {path: rows.jsonl, name: a}]",): "data.eval[1].name: a is also",
    ("data.eval_split=1.5",): "expected a share < 1 or an integer ≥ 1, got 1.5",
    ("data.eval_split=0.1", "data.eval=builtin:python-docs"): "data.eval_split: has no effect with data.eval",
    ("training.warmup_steps=10", "training.max_steps=10"): "expected less than max_steps (10), got 10",
    (
        "training.warmup_steps=10",
        "training.lr_scheduler_type=constant",
    ): "training.warmup_steps: has no effect with lr_scheduler_type: constant",
    (
        "training.warmup_ratio=0.5",
        "training.lr_scheduler_type=constant",
    ): "training.warmup_ratio: has no effect with lr_scheduler_type: constant",
    (
        "training.warmup_ratio=0.5",
        "training.lr_decay_ratio=0.8",
        "training.lr_scheduler_type=warmup_stable_decay",
    ): "training.lr_decay_ratio: expected at most 0.5",
    ("model.name_or_path=/dev/zero",): "model.name_or_path: expected a folder, got a pipe or a device",
    ("training.lr_min_ratio=0.1",): "training.lr_min_ratio: has no effect with lr_scheduler_type: cosine",
    (
        "training.warmup_steps=2",
        "training.lr_cycles=2",
        "training.lr_scheduler_type=rex",
    ): "training.lr_cycles: has no effect with lr_scheduler_type: rex",
    ("training.optim=lion_8bit", "training.adam_epsilon=1e-6"): "training.adam_epsilon: has no effect with optim: lion",
    ("training.label_smoothing=0.1", "method=dpo"): "training.label_smoothing: has no effect with method: dpo",
    ("method={type: sft, labels: text, train_line_break: true}",): "method.train_line_break: has no effect with labels",
    ("method={type: sft, eaft_tokens: 5}",): "method.eaft_tokens: has no effect with loss: nll",
    ("method={type: distill, teacher: 'builtin:qwen2-tiny', sft_loss: dft}",): "method.sft_loss: has no effect",
    ("adapter={type: none, spread_layers: true}",): "adapter.spread_layers: has no effect without train_layers",
    ("method={type: sft, label_ends: [x]}",): "method.label_ends: has no effect with labels: turn",
    (
        "method={type: distill, teacher: 'builtin:qwen2-tiny', on_policy: 1, max_completion_length: 60}",
        "data.max_length=64",
    ): "method.max_completion_length: leaves no room",
    ("training.optim=sgd", "training.adam_beta2=0.99"): "training.adam_beta2: has no effect with optim: sgd",
    ("training.eval_steps=50", "training.max_steps=10", "data.eval_split=5"): "there would be no evaluation",
    ("adapter.target_modules=[]",): "empty module name",
    ("adapter.target_modules=q_proj,v_proj",): "use a list: [q_proj, v_proj]",
    ("adapter.target_modules=all",): "did you mean all-linear?",
    ("adapter.target_modules='(q_proj'",): "invalid regular expression",
    ("data.train.format=text",): "use method: pretrain",
    ("method=pretrain", "data.system=Be brief."): "data.system: has no effect with method: pretrain",
    ("data.packing={enabled: false, split: true}",): "data.packing.split: has no effect without packing",
    ("model.name_or_path=a/b", "model.trust_remote_code=true"): "set model.revision",
    (
        "model.name_or_path=a/b",
        "model.trust_remote_code=true",
        "model.revision=main",
    ): "model.revision: main may be a branch or tag",
    ("model.revision=main",): "model.revision: has no effect: the model is not from the hub",
    ("model.name_or_path=builtin:qwen2-tyni",): "unknown model builtin:qwen2-tyni · did you mean builtin:qwen2-tiny?",
    ("model.name_or_path=./nowhere",): "no such folder: ./nowhere",
    ("model.name_or_path=w.gguf",): "got weights only: w.gguf",
    ("model.name_or_path=adapter",): "adapter contains an adapter, not a model",
    ("model.name_or_path=empty",): "no config.json in folder empty",
    ("model.name_or_path='a b'",): "is neither a folder nor a hub id",
    ("model.tokenizer=builtin:nope",): "model.tokenizer: unknown model builtin:nope",
    ("model.chat_template=nope.jinja",): "nope.jinja",
    ('model.chat_template="{% for m in messages %}"',): "got a template",
    ("data.train=builtin:python-doc",): "unknown data set builtin:python-doc · did you mean builtin:python-docs?",
    ("data.train=row.jsonl",): "no such file or folder: row.jsonl · did you mean rows.jsonl?",
    ("data.train=deep/er/x",): "there is no deep in",
    ("data.train=empty",): "no data files in folder empty",
    ("data.train=empty.jsonl",): "empty.jsonl is empty",
    ("data.train=w.gguf",): "unknown file type: w.gguf",
    ("data.train='my data'",): "no such file or folder: my data",
    ("data.train={path: rows.jsonl, split: test}",): "has no effect: only hub data sets have splits",
    ("data.train=~nobody/x",): "no such file or folder",
    ('data.train="a\\0b"',): "invalid path",
    ("training.output_dir=rows.jsonl",): "rows.jsonl is a file, not a folder",
    ("training.output_dir=rows.jsonl/x",): "rows.jsonl is a file, not a folder",
    ("training.output_dir=''",): "invalid path",
    ("training.resume=runs/x/checkpoint-9",): "no such checkpoint: runs/x/checkpoint-9",
    ("training.resume='true'",): "did you mean auto?",
    ("depends_on=nope.yaml",): "depends_on: no such file",
    ("depends_on=[x.yaml]",): "dependency cycle: x.yaml → x.yaml",
}


@pytest.mark.parametrize("arguments", RULED, ids=lambda arguments: " ".join(arguments))
def test_rule(arguments: tuple[str, ...], load: Load, problems: Problems, recipe_text: str) -> None:
    load()
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("empty.jsonl").write_text("")
    Path("w.gguf").write_text("x")
    Path("empty").mkdir()
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    (line,) = problems(recipe_text, *arguments)
    assert RULED[arguments] in line
    assert " · " in line, "says what to do"


def test_flash_in_fp32_names_both_keys_and_the_ways_out(problems: Problems, recipe_text: str) -> None:
    (line,) = problems(recipe_text + "attention: fa2\n")
    assert line.startswith("x.yaml:9: attention: ")
    for part in ("attention: fa2", "precision: fp32", "precision: bf16", "attention: sdpa", "auto"):
        assert part in line


def test_valid_neighbours_of_the_rules(load: Load, recipe_text: str) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("rows.jsonl.gz").write_bytes(b"\x1f\x8b")
    Path("chat.jinja").write_text("x")
    for arguments in (
        ("attention=fa2", "precision=bf16"),
        ("attention=sdpa",),
        ("training.load_best=true", "data.eval_split=0.1", "training.eval_steps=10"),
        ("data.eval_split=64",),
        ("training.warmup_steps=9", "training.max_steps=10"),
        ("training.warmup_steps=0", "training.lr_scheduler_type=constant"),
        ("training.warmup_ratio=0", "training.lr_scheduler_type=constant"),
        ("training.warmup_ratio=0.03", "training.lr_scheduler_type=constant"),  # as every resolved.yaml writes it
        ("training.warmup_ratio=0.5", "training.lr_scheduler_type=constant_with_warmup"),
        ("adapter.target_modules=.*(q|v)_proj",),
        ("adapter.target_modules=[q_proj, v_proj]",),
        ("data.train=[rows.jsonl, rows.jsonl.gz, 'org/set', 'org/set:main', gsm8k]",),
        ("data.train={path: org/set, split: test}",),
        ("method=pretrain", "data.train.format=text"),
        (
            "model.name_or_path=Qwen/Qwen2.5-0.5B-Instruct",
            f"model.revision={'0c' * 20}",
            "model.trust_remote_code=true",
        ),
        ("model.chat_template=chat.jinja",),
        ("training.resume=never",),
        ("training.output_dir=some/where/new",),
    ):
        load(recipe_text, *arguments)


def test_a_model_that_a_dependency_will_make(load: Load, problems: Problems, recipe_text: str) -> None:
    load()
    Path("first.yaml").write_text(recipe_text.replace("runs/x", "runs/first"))
    run = load(recipe_text, "depends_on=first.yaml", "model.name_or_path=runs/first/final").run
    assert run.depends_on == (str(Path("first.yaml").absolute()),)
    (line,) = problems(recipe_text, "depends_on=first.yaml", "model.name_or_path=runs/other/final")
    assert "no such folder: runs/other/final" in line


def test_circle_of_two(load: Load, problems: Problems, recipe_text: str) -> None:
    load()
    Path("b.yaml").write_text("depends_on: x.yaml\n" + recipe_text)
    (line,) = problems("depends_on: [b.yaml]\n" + recipe_text)
    assert "x.yaml:1: depends_on[0]: dependency cycle: x.yaml → b.yaml → x.yaml" in line


def test_output_must_not_be_the_model(load: Load, problems: Problems, recipe_text: str) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    (line,) = problems(recipe_text, "model.name_or_path=base", "training.output_dir=base")
    assert "which training would overwrite" in line
    Path("link").symlink_to("base", target_is_directory=True)
    (line,) = problems(recipe_text, "model.name_or_path=base", "training.output_dir=link")
    assert "which training would overwrite" in line


def test_looking_at_a_run_that_is_over_needs_no_data(load: Load, recipe_text: str) -> None:
    load()
    arguments = ["data.train=gone.jsonl", "model.name_or_path=./gone", "model.chat_template=gone.jinja"]
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", arguments)
    assert len(caught.value.problems) == 3
    assert load_config("x.yaml", arguments, look_at_files=False).run.data.train[0].path == "gone.jsonl"


def test_rules_about_a_wrong_key_stay_silent(problems: Problems, recipe_text: str) -> None:
    lines = problems(recipe_text, "training.load_best=true", "data.evall=rows.jsonl")
    assert len(lines) == 1, "data.evall may have been the evaluation data"
    lines = problems(recipe_text, "precision=fp23", "attention=fa2")
    assert len(lines) == 1
    lines = problems(recipe_text, "training.router_aux_loss_coef=modle", "model.name_or_path=./gone")
    assert len(lines) == 2, "the word model is not the section"


def test_every_rule_reads_keys_that_exist(load: Load) -> None:
    from halftune.config.shape import shape_at

    run = load().run
    for rule in RULES:
        assert rule.check.__doc__
        for read in rule.reads:
            assert shape_at(read, {"adapter": {"type": "lora"}}) is not None, read
    assert check(run, Context(Path("x.yaml")), set()) == []


def test_data_endings_are_those_that_are_read() -> None:
    from halftune.data.readers.files import READERS

    assert set(DATA_ENDINGS) == set(READERS)


@pytest.mark.parametrize("part", ["final", "checkpoint-2/again", "set-aside/x/y"])
def test_a_run_is_not_put_into_a_part_of_another(load: Load, problems: Problems, recipe_text: str, part: str) -> None:
    """The other one compares its result with a list of its files, and removes old checkpoints."""
    inside, beside = (recipe_text.replace("runs/x", place) for place in (f"outer/{part}", "outer/beside"))
    Path("outer").mkdir()
    load(inside)
    Path("outer/resolved.yaml").touch()
    assert "part of another run" in "".join(problems(inside))
    load(beside)
    Path("link").symlink_to("outer", target_is_directory=True)
    assert "part of another run" in "".join(problems(recipe_text.replace("runs/x", f"link/{part}")))


def test_a_run_is_not_put_into_its_data_folder(problems: Problems, load: Load, recipe_text: str) -> None:
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text("{}\n")
    Path("link").symlink_to("rows", target_is_directory=True)
    for place in ("rows", "rows/run", "link/run"):
        (line,) = problems(recipe_text, "data.train=rows", f"training.output_dir={place}")
        assert "training.output_dir" in line
    load(recipe_text, "data.train=rows", "training.output_dir=rows-run")


def test_a_start_that_a_dependency_trains_has_the_settings_of_its_recipe(load: Load) -> None:
    own = "model: {name_or_path: builtin:qwen2-tiny}\ndata: {train: builtin:python-docs}\n"
    Path("first.yaml").write_text(own + "training: {output_dir: runs/a}\nadapter: {type: lora, rank: 3, alpha: 5}\n")
    second = own + "training: {output_dir: runs/b}\ndepends_on: first.yaml\n"
    adapter = load(second + "adapter: {type: lora, name_or_path: runs/a/final}\n").run.adapter
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (3, 5, "all-linear")
    for keys, code in (
        ("name_or_path: runs/a/final, rank: 4", "config.keys_conflict"),
        ("name_or_path: ./gone", "model.adapter_missing"),
    ):
        with pytest.raises(ConfigError) as refused:
            load(second + f"adapter: {{type: lora, {keys}}}\n")
        assert [problem.code for problem in refused.value.problems] == [code]
