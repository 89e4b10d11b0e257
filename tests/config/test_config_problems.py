"""Every problem at once, each with its line, its key, what is wrong and what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BAD = """\
learning_rate: 1e-4
model: {name_or_path: "builtin:qwen2-tiny"}
precision:
  tf32: no
attention: fa5
adapter: {type: lora, rank: 3.0, lora_alpha: 3, target_modules: "q_proj,v_proj"}
data:
  train: [{path: nope.jsonl, spilt: x}]
  packing: yes
  max_length: 4
  eval_split: 1.5
training:
  lerning_rate: 3
  output_dir: runs/x
  num_train_epochs: "abc"
  warmup_steps: 10
  max_steps: 10
  eval_steps: never
  max_steps: 20
  seed:
"""
# ruff: noqa: E501
EXPECTED = """\
x.yaml:1: learning_rate: unknown key · did you mean training.learning_rate?
x.yaml:4: precision.tf32: should be true or false, or auto, not 'no' · write false
x.yaml:5: attention: should be one of auto, fa2, fa3, fa4, sdpa, flex, eager, not 'fa5' · did you mean fa4?
x.yaml:6: adapter.lora_alpha: unknown key · did you mean adapter.alpha?
x.yaml:6: adapter.rank: should be a whole number, at least 1, not 3.0 · write 3
x.yaml:6: adapter.target_modules: is one text with commas, which matches no module · write a list: [q_proj, v_proj]
x.yaml:8: data.train[0].path: no such file or folder: nope.jsonl · relative paths start in the working directory, or beside the YAML
x.yaml:8: data.train[0].spilt: unknown key · did you mean data.train[0].split?
x.yaml:9: data.packing: should be true or false, or auto, not 'yes' · write true
x.yaml:10: data.max_length: should be a whole number, at least 8, not 4
x.yaml:11: data.eval_split: 1.5 is neither a share (below 1) nor a number of samples · write 2, or a share below 1
x.yaml:13: training.lerning_rate: unknown key · did you mean training.learning_rate?
x.yaml:15: training.num_train_epochs: should be a number, above 0 and at most 100000, not 'abc'
x.yaml:16: training.warmup_steps: 10 is not below max_steps (10): warm-up would never end · lower it, or use warmup_ratio
x.yaml:18: training.eval_steps: should be a whole number, at least 1, or epoch, not 'never'
x.yaml:19: training.max_steps: is written twice, here and in line 17 · keep one of them
x.yaml:20: training.seed: has no value · write a whole number, at least 0 and at most 4294967295, or remove the line"""


def test_every_problem_at_once(problems: Callable[..., list[str]]) -> None:
    lines = problems(BAD)
    assert sorted(lines) == sorted(EXPECTED.split("\n"))
    numbers = [int(line.split(":")[1]) for line in lines]
    assert numbers == sorted(numbers), "in the order of the file"


WRONG = {
    "training.learning_rate=abc": "should be a number, above 0, not 'abc'",
    "training.learning_rate=-1": "should be a number, above 0, not -1",
    "training.learning_rate=.inf": "should be a number, above 0, not '.inf'",
    "training.learning_rate=.nan": "should be a number, above 0, not '.nan'",
    "training.learning_rate=true": "should be a number, above 0, not true",
    "training.max_steps=1e3": "should be a whole number, at least 1, not 1000.0 · write 1000",
    "training.max_steps='100'": "not '100' · write the number without quotes",
    "training.load_best=1": "should be true or false, not 1",
    "training.load_best='true'": "not 'true' · write true without quotes",
    "training.torch_compile=off": "should be true or false, not 'off' · write false",
    "training.output_dir=3": "should be text, not 3 · put it in quotes",
    "training.output_dir=": "has no value · write text, or remove the line",
    "training.optim=adamw_torch": "not 'adamw_torch' · did you mean adamw?",
    "training.lr_scheduler_type=Cosine": "did you mean cosine?",
    "precision=float16": "did you mean fp16?",
    "precision=bfloat16": "did you mean bf16?",
    "precision=torch.bfloat16": "did you mean bf16?",
    "precision.compute=float32": "did you mean fp32?",
    "precision.trainable=half": "not 'half'",
    "model=gpt2": "should be a section of keys, not 'gpt2' · write {name_or_path: gpt2}",
    "training=5": "should be a section of keys, not 5",
    "adapter=qlora": "not 'qlora' · quantising a base on load is not supported yet",
    "method=dpo": "not 'dpo' · preference methods and reinforcement learning are not supported yet",
    "training.optim=adamw_torch_fused": "did you mean adamw?",
    "training.optim=muon": "not 'muon' · it is not supported yet",
    "logging.report_to=none": "write [] for none",
    "model.load_in_4bit=true": "unknown key · quantising a base on load is not supported yet",
    "adapter={type: none, rank: 8}": "adapter.rank: unknown key · rank is a key of adapter.type lora",
    "adapter=[lora]": "should be none or lora, or a section of keys, not a list",
    "method={type: dpo}": "method.type: should be one of sft, pretrain, not 'dpo'",
    "data.train=[]": "data.train: is empty · give at least one entry",
    "data.train=[1]": "data.train[0]: should be text, not 1 · put it in quotes",
    "data.train=[[a]]": "data.train[0]: should be text, or a section of keys, not a list",
    "logging.report_to=tensorbord": "logging.report_to: should be one of tensorboard, wandb, not 'tensorbord'",
    "data.train={path: builtin:python-docs, format: openai}": "did you mean messages?",
    "data.train=[a*.json]": "a * stands for nothing here: name the folder",
    "data.train[0].columns={prompt: 3}": "columns.prompt: should be text, not 3 · put it in quotes",
    "model.revisoin=main": "did you mean model.revision?",
    "training.eval_split=0.1": "did you mean data.eval_split?",
    "lora_r=8": "did you mean adapter.rank?",
    "training.per_device_batch_size=3": "did you mean training.per_device_train_batch_size?",
    "cutoff_len=8": "did you mean data.max_length?",
    "loging.progress=true": "did you mean logging?",
    "training.Seed=1": "did you mean training.seed?",
    "model.name=gpt2": "did you mean model.name_or_path?",
    "generation.max_length=9": "did you mean generation.max_new_tokens?",
    "training.deepspeed=z3.json": "did you mean distributed.strategy?",
    "generation.top_p=1.5": "should be a number, above 0 and at most 1, not 1.5",
    "training.seed=99999999999999999999": "should be a whole number",
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_value(argument: str, problems: Callable[..., list[str]], recipe_text: str) -> None:
    (line,) = problems(recipe_text, argument)
    assert line.startswith(f"argument {argument}: ")
    assert WRONG[argument] in line
    assert "pydantic" not in line
    assert "Input should" not in line


def test_a_wrong_type_does_not_hide_the_rest_of_its_section(problems: Callable[..., list[str]]) -> None:
    text = """model: {name_or_path: "builtin:qwen2-tiny"}
adapter: {type: lorra, r: 8, bias: none, alpha: -1}
data: {train: "builtin:python-docs"}
training: {output_dir: runs/x}
"""
    known = "keys of adapter are type, rank, alpha, dropout, target_modules, modules_to_save, use_rslora, use_dora"
    assert problems(text) == [
        "x.yaml:2: adapter.type: should be one of none, lora, not 'lorra' · did you mean lora?",
        "x.yaml:2: adapter.alpha: should be a number, above 0, not -1",
        "x.yaml:2: adapter.r: unknown key · did you mean adapter.rank?",
        f"x.yaml:2: adapter.bias: unknown key · {known}",
    ]


def test_missing_sections_and_keys(problems: Callable[..., list[str]]) -> None:
    assert problems("precision: auto\n") == [
        "x.yaml:1: model: this section is missing · write model: with name_or_path below it",
        "x.yaml:1: data: this section is missing · write data: with train below it",
        "x.yaml:1: training: this section is missing · write training: with output_dir below it",
    ]
    lines = problems("modle: {name_or_path: x}\ndata: {trian: a.json}\ntraining:\n  output: runs/x\n")
    assert lines == [
        "x.yaml:1: modle: unknown key · did you mean model?",
        "x.yaml:2: data.trian: unknown key · did you mean data.train?",
        "x.yaml:4: training.output: unknown key · did you mean training.output_dir?",
    ], "a misspelt key is not also a missing one"


def test_dotted_key_in_the_file(problems: Callable[..., list[str]], recipe_text: str) -> None:
    (line,) = problems(recipe_text + "training.seed: 1\n")
    assert "write it as a section: training: {seed: …}" in line


def test_reported_without_the_imports_that_take_seconds(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(BAD)
    code = (
        "import sys\n"
        "from halftune.config.load import load_config\n"
        "from halftune.core.errors import ConfigError\n"
        "try:\n    load_config(sys.argv[1])\nexcept ConfigError as error:\n    count = len(error.problems)\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)\n"
        "print(count, sorted(heavy))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.split()
    assert int(count) == EXPECTED.count("\n") + 1
    assert heavy == "[]"


def test_no_more_problems_than_a_screen_holds(problems: Callable[..., list[str]], recipe_text: str) -> None:
    lines = problems(recipe_text + "".join(f"key{number}: 1\n" for number in range(300)))
    assert len(lines) == 61
    assert "240 more problems" in lines[-1]
