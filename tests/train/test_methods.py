"""Every method of the table: how a global batch is split, packed and shared changes nothing, and resuming is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_group import apart, curve, in_processes, train_all

from halftune.config.sections.method import METHOD_SECTIONS
from halftune.methods import METHODS, make_method
from halftune.train.trainer import train

EXAMPLES = 21  # all of them make one global batch
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "conversation": lambda n: {"prompt": f"What is {n} and {n}?", "completion": f"It is {2 * n}" + " yes" * (n % 5)},
    "document": lambda n: {"text": f"Number {n} is followed by {n + 1}" + " and more" * (n % 6) + "."},
    "preference": lambda n: {
        "prompt": f"What is {n} and {n}?",
        "chosen": f"It is {2 * n}" + " yes" * (n % 5),
        "rejected": "No" + " idea" * (n % 7),
    },
    "prompt": lambda n: {"prompt": f"What is {n} and {n}?" + " Say it." * (n % 3), "answer": 2 * n},
    "rated": lambda n: {
        "prompt": f"What is {n} and {n}?",
        "completion": f"It is {2 * n}" + " yes" * (n % 5),
        "label": n % 3 > 0,
    },
}
REWARDS = """
def letters(completions, answer, **_):
    return [len(set(one)) + 0.1 * told for one, told in zip(completions, answer)]
"""
GRPO = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "num_iterations": 2, "epsilon": 0.012}
GRPO |= {"dynamic_sampling": 1}
DISTILL = {"teacher": "builtin:qwen2-tiny", "beta": 0.4, "temperature": 2.0, "sft_weight": 0.3}
KEYS: dict[str, dict[str, Any]] = {"kto": {"group_size": 2}, "grpo": GRPO, "distill": DISTILL}  # fewer rows
# Every method, and distillation of the model's own answers.
CASES: dict[str, dict[str, Any]] = {name: {"type": name, **KEYS.get(name, {})} for name in METHODS}
CASES["distill-own"] = {**CASES["distill"], "on_policy": 0.5, "max_completion_length": 4}
ROWS_A_PASS, PASSES = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
SPLITS: dict[str, dict[str, Any]] = {
    "in passes": {ROWS_A_PASS: 5, PASSES: 7},
    "packed in passes": {"data.packing": "true", ROWS_A_PASS: 2, PASSES: 20},
    "by tokens": {ROWS_A_PASS: "null", "training.tokens_per_batch": 16000},
}


@pytest.fixture(params=CASES)
def of_method(
    request: pytest.FixtureRequest, recipe: Any, small_teacher: Path, tmp_path: Path
) -> Callable[..., tuple[Any, Any]]:
    """``of_method("name", settings)`` → a recipe of each case in turn, that writes to the folder ``name``."""
    settings = dict(CASES[request.param])
    section = METHOD_SECTIONS[settings["type"]]
    if "teacher" in settings:
        settings["teacher"] = str(small_teacher)
    if section.generates:
        (tmp_path / "rewards.py").write_text(REWARDS)
        settings["rewards"] = [{"function": "letters", "file": str(tmp_path / "rewards.py")}]
    path, count = tmp_path / "examples.jsonl", EXAMPLES * section(**settings).rows
    path.write_text("".join(json.dumps(ROWS[section.records[0]](n)) + "\n" for n in range(count)))

    def make(folder: str, other: dict[str, Any] | None = None, world_size: int = 1) -> tuple[Any, Any]:
        keys = {
            "data.train": path,
            "method": json.dumps(settings),
            "training.output_dir": tmp_path / folder,
            "training.max_steps": 2,
            "training.warmup_ratio": 0,
            "training.learning_rate": 1e-2,
            "training.adam_epsilon": 1e-3,  # the usual one amplifies the rounding of gradients near zero
            ROWS_A_PASS: 64,
            **(other or {}),
        }
        return recipe(*(f"{key}={value}" for key, value in keys.items()), world_size=world_size)

    return make


def test_the_table_and_the_sections_name_the_same_methods() -> None:
    assert METHODS.keys() == METHOD_SECTIONS.keys()
    for name, section in METHOD_SECTIONS.items():
        assert set(section.records) <= ROWS.keys()
        more = {"rewards": ["exact_answer"]} if section.generates else {}
        assert isinstance(make_method(section(type=name, **KEYS.get(name, {}), **more)).metrics, tuple)


def same(one: Path, other: Path) -> None:
    """Losses, gradient norms and all metrics of two runs."""
    names = {name for line in (one / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    for name in {
        "loss",
        "grad_norm",
        *(name for name in names if name.startswith(("reward", "kl", "clip", "entropy", "equal", "dropped"))),
    }:
        mine, theirs = curve(one, name), curve(other, name)
        assert len(mine) == len(theirs) == 2
        assert all(abs(a - b) < 1e-5 * max(1.0, abs(b)) for a, b in zip(mine, theirs, strict=True)), (
            name,
            mine,
            theirs,
        )
    # the first loss of grpo is zero but for rounding: advantages have the mean zero
    pairs = [(a, b) for a, b in zip(curve(one), curve(other), strict=True) if abs(b) > 1e-6]
    assert apart(*map(list, zip(*pairs, strict=True))) < 1e-5


def test_a_global_batch_may_be_split_and_packed_in_any_way(of_method: Any) -> None:
    loaded, plan = of_method("whole")
    whole, answers = train(loaded, plan).folder, loaded.run.method.samples_answers
    assert len(set(curve(whole))) == 2
    for name, settings in SPLITS.items():
        if answers and "training.tokens_per_batch" in settings:
            continue
        same(train(*of_method(name.replace(" ", "-"), settings)).folder, whole)


@pytest.mark.slow
def test_two_processes_train_as_one_whole_or_sharded(of_method: Any, tmp_path: Path) -> None:
    # 11 and 10 examples: one process makes a second forward pass, the other keeps it company with a blank one
    keys = {ROWS_A_PASS: 10, PASSES: 2}
    shared = [of_method(one, {**keys, "distributed.strategy": one}, world_size=2) for one in ("ddp", "fsdp2")]
    assert in_processes(2, train_all(shared)) == [0, 0]
    whole = train(*of_method("whole")).folder
    for name in ("ddp", "fsdp2"):
        same(tmp_path / name, whole)


def check_resume(of_method: Any, packing: str) -> None:
    settings = {
        ROWS_A_PASS: 4,
        "training.max_steps": 4,
        "training.save_steps": 2,
        "training.eval_steps": 2,
        "data.eval_split": 5,
        "adapter.dropout": 0.1,
        "data.packing": packing,
    }
    whole = train(*of_method("whole", settings)).folder
    again = train(*of_method("again", {**settings, "training.resume": whole / "checkpoint-2"})).folder
    weights = [(folder / "final" / "adapter_model.safetensors").read_bytes() for folder in (whole, again)]
    assert weights[0] == weights[1]
    assert curve(again) == curve(whole)[2:]
    assert curve(again, "eval_loss") == curve(whole, "eval_loss")[1:]


def test_a_resumed_run_is_the_same_to_the_bit(of_method: Any) -> None:
    check_resume(of_method, "true")


@pytest.mark.parametrize("of_method", ["sft", "kto", "grpo"], indirect=True)
def test_a_resumed_run_of_padded_batches_is_the_same_to_the_bit(of_method: Any) -> None:
    check_resume(of_method, "false")
