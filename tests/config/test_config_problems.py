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
x.yaml:4: precision.tf32: expected true or false, or auto, got 'no' · write false
x.yaml:5: attention: expected one of auto, fa2, fa3, fa4, sdpa, flex, eager, got 'fa5' · did you mean fa4?
x.yaml:6: adapter.lora_alpha: unknown key · did you mean adapter.alpha?
x.yaml:6: adapter.rank: expected an integer ≥ 1, got 3.0 · write 3
x.yaml:6: adapter.target_modules: a string with commas matches no module · use a list: [q_proj, v_proj]
x.yaml:8: data.train[0].path: no such file or folder: nope.jsonl · paths are relative to the working directory or the recipe's folder
x.yaml:8: data.train[0].spilt: unknown key · did you mean data.train[0].split?
x.yaml:9: data.packing: expected true or false, or auto, got 'yes' · write true
x.yaml:10: data.max_length: expected an integer ≥ 8, got 4
x.yaml:11: data.eval_split: expected a share < 1 or an integer ≥ 1, got 1.5 · write 2, or a share below 1
x.yaml:13: training.lerning_rate: unknown key · did you mean training.learning_rate?
x.yaml:15: training.num_train_epochs: expected a number ≥ 1e-06 and ≤ 100000, got 'abc'
x.yaml:16: training.warmup_steps: expected less than max_steps (10), got 10: warm-up would never end · lower it, or use warmup_ratio
x.yaml:18: training.eval_steps: expected an integer ≥ 1, or a number ≥ 1e-06 and < 1, or epoch, or a rate such as 4/epoch, got 'never'
x.yaml:19: training.max_steps: duplicate key, first in x.yaml:17 · keep one of them
x.yaml:20: training.seed: has no value · write an integer ≥ 0 and ≤ 4294967295, or remove the line"""


def test_every_problem_at_once(problems: Callable[..., list[str]]) -> None:
    lines = problems(BAD)
    assert sorted(lines) == sorted(EXPECTED.split("\n"))
    numbers = [int(line.split(":")[1]) for line in lines]
    assert numbers == sorted(numbers), "in the order of the file"


WRONG = {
    "training.learning_rate=abc": "expected a number > 0, got 'abc'",
    "training.learning_rate=-1": "expected a number > 0, got -1",
    "training.learning_rate=.inf": "expected a number > 0, got '.inf'",
    "training.learning_rate=.nan": "expected a number > 0, got '.nan'",
    "training.learning_rate=true": "expected a number > 0, got true",
    "training.max_steps=1e3": "expected an integer ≥ 1, got 1000.0 · write 1000",
    "training.max_steps='100'": "got '100' · write the number without quotes",
    "data.eval=[{path: builtin:python-docs, name: a/b}]": "data.eval[0].name: expected 1 to 40 letters, digits, - and _",
    "training.load_best=1": "expected true or false, got 1",
    "training.load_best='true'": "got 'true' · write true without quotes",
    "training.torch_compile=off": "expected true or false, got 'off' · write false",
    "training.output_dir=3": "expected a string, got 3 · put it in quotes",
    "training.output_dir=": "has no value · write a string, or remove the line",
    "training.optim=adamw_torch": "got 'adamw_torch' · did you mean adamw?",
    "training.lr_scheduler_type=Cosine": "did you mean cosine?",
    "precision=float16": "did you mean fp16?",
    "precision=bfloat16": "did you mean bf16?",
    "precision=torch.bfloat16": "did you mean bf16?",
    "precision.compute=float32": "did you mean fp32?",
    "precision.trainable=half": "got 'half'",
    "model=gpt2": "expected a section of keys, got 'gpt2' · write {name_or_path: gpt2}",
    "training=5": "expected a section of keys, got 5",
    "adapter=qlora": "got 'qlora' · write adapter.type: lora and model.quantization: nf4",
    "method=grpo": "method.rewards: this key is missing",
    "method=ppo": "got 'ppo' · reinforcement learning by this method is not supported yet",
    "training.optim=adamw_torch_fused": "did you mean adamw?",
    "training.optim=galore_adamw": "got 'galore_adamw' · it is not supported yet",
    "training.optim=paged_adamw_32bit": "did you mean paged_adamw?",
    "training.muon_ns_steps=6": "has no effect with optim: adamw · remove it, or set optim: muon",
    "logging.report_to=none": "write [] for none",
    "logging.report_to={a: b}": "report_to: expected one of tensorboard, wandb, mlflow, swanlab, trackio, got a section of keys",
    "data.train={pth: x.jsonl}": "unknown key · did you mean data.train[0].path?",
    "model.load_in_4bit=true": "unknown key · write model.quantization: nf4 (4 bit) or int8",
    "adapter={type: none, rank: 8}": "adapter.rank: unknown key · rank is a key of adapter.type lora",
    "adapter=[lora]": "or lokr, or a section of keys, got a list",
    "method={type: ppo}": "method.type: expected one of sft, pretrain, dpo, reward, kto, simpo, orpo, cpo, grpo, distill, got 'ppo'",
    "data.train=[]": "data.train: is empty · add at least one entry",
    "data.train=[1]": "data.train[0]: expected a string, got 1 · put it in quotes",
    "data.train=[[a]]": "data.train[0]: expected a string, or a section of keys, got a list",
    "logging.report_to=tensorbord": "logging.report_to: expected one of tensorboard, wandb, mlflow, swanlab, trackio, got 'tensorbord'",
    "data.train={path: builtin:python-docs, format: openai}": "did you mean messages?",
    "data.train=[a*.json]": "wildcards are not supported",
    "data.train[0].columns={prompt: 3}": "columns.prompt: expected a string, got 3 · put it in quotes",
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
    "generation.top_p=1.5": "expected a number > 0 and ≤ 1, got 1.5",
    "training.seed=99999999999999999999": "expected an integer",
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
    keys = (
        "name_or_path, rank, alpha, dropout, target_modules, target_parameters, modules_to_save, use_rslora, use_dora"
    )
    keys += ", init, lora_plus_ratio"
    known = f"keys of adapter are type, {keys}"
    assert problems(text) == [
        "x.yaml:2: adapter.type: expected one of none, lora, oft, vera, ia3, loha, lokr, got 'lorra' · did you mean lora?",
        "x.yaml:2: adapter.alpha: expected a number > 0, got -1",
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
        "from halftune.cli import main\n"
        "try:\n    main(['train', '--config', sys.argv[1]])\nexcept SystemExit as left:\n    print(left.code)\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["2", "[]", ""]
    assert len(done.stderr.splitlines()) == EXPECTED.count("\n") + 1


def test_no_more_problems_than_a_screen_holds(problems: Callable[..., list[str]], recipe_text: str) -> None:
    lines = problems(recipe_text + "".join(f"key{number}: 1\n" for number in range(300)))
    assert len(lines) == 61
    assert "240 more problems" in lines[-1]
