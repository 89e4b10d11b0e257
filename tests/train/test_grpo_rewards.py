"""GRPO with several reward functions, and with answers that they do not judge: advantages and metrics by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from process_group import curve, in_processes, train_all
from safetensors.torch import load_file

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.hardware.catalogue import lookup
from halftune.methods import Loss
from halftune.methods.grpo import ADVANTAGES, Grpo, reward_metrics
from halftune.plan import resolve
from halftune.train.rewards import Rewards
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent
# Four answers to each prompt, which is a number a. The sums, with weights 1 and 3, are
#   a = 0:  0 0 0 0        a = 1:  – 4 5 6        a = 2:  0 5 7 3        a = 3:  – – – –
CODE = """
def size(answer, **_):
    return [None if a == 3 or (a, i % 4) in ((1, 0), (2, 3)) else a * (i % 4) for i, a in enumerate(answer)]
def late(answer, **_):
    return [None if a in (0, 3) or i % 4 == 0 else 1 for i, a in enumerate(answer)]
"""
BY_HAND = {
    "reward": (0 + 5 + 3.75) / 3,
    "reward_std": (0 + 1 + math.sqrt(26.75 / 3)) / 3,
    "reward_size": (0 + 2 + 2) / 3,  # None left out: of 0 0 0 0, 1 2 3 and 0 2 4
    "reward_late": 1.0,
}
ADVANTAGE = {0: [0.0] * 4, 1: [0.0, -1.0, 0.0, 1.0], 2: [-3.75, 1.25, 3.25, -0.75], 3: [0.0] * 4}


def recipe(
    folder: Path, code: str, functions: list[dict[str, Any]], *words: str, steps: int = 1, processes: int = 1
) -> Any:
    """A run on the prompts 0, 1, 2 and 3, which are its evaluation set too."""
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(code)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{a}?", "answer": a}) + "\n" for a in range(4)))
    rewards = json.dumps([{"file": str(folder / "mine.py"), **one} for one in functions])
    keys = [f"data.train={folder / 'rows.jsonl'}", f"method.rewards={rewards}", f"training.output_dir={folder / 'run'}"]
    keys += ["method.num_generations=4", "method.max_completion_length=4", "method.scale_rewards=false"]
    keys += [f"training.max_steps={steps}", "training.logging_steps=1", "logging.progress=false"]
    given = {word.partition("=")[0] for word in words}
    keys = [key for key in keys if key.partition("=")[0] not in given]
    loaded = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [*keys, *words])
    return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model), world_size=processes)


BOTH = [{"function": "size"}, {"function": "late", "weight": 3}]


@pytest.mark.parametrize("rows", [4, 2, 1])
@pytest.mark.parametrize("sampling", [0, 2])
def test_two_functions_give_the_advantages_and_metrics_by_hand(
    rows: int, sampling: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, list[float]] = {}
    loss = Grpo.loss

    def watched(self: Grpo, policy: Any, batch: Any, reference: Any) -> Loss:
        found.update(zip(batch.examples, batch.columns[ADVANTAGES].view(-1, 4).tolist(), strict=True))
        return loss(self, policy, batch, reference)

    monkeypatch.setattr(Grpo, "loss", watched)
    words = [f"training.per_device_train_batch_size={rows}", f"training.gradient_accumulation_steps={4 // rows}"]
    words += [f"data.eval={tmp_path / 'rows.jsonl'}", f"training.per_device_eval_batch_size={rows}"]
    folder = train(*recipe(tmp_path, CODE, BOTH, *words, f"method.dynamic_sampling={sampling}")).folder
    assert {a: pytest.approx(one) for a, one in ADVANTAGE.items() if a in found} == found
    assert {1, 2} <= set(found)
    for name, value in BY_HAND.items():
        assert curve(folder, name) == [pytest.approx(value)], name
        assert curve(folder, f"eval_{name}") == [pytest.approx(value)], name
    assert curve(folder, "equal_rewards") == [2 / 4]
    assert curve(folder, "eval_equal_rewards") == [pytest.approx(1 / 3)]  # of the prompts with a judged answer
    assert curve(folder, "eval_loss") == [pytest.approx(-BY_HAND["reward"])]


ROUNDED = """
def tenth(answer, **_):
    return [0.1 for _ in answer]
def large(answer, **_):
    return [1000.7 for _ in answer]
def sums(answer, **_):
    return [0.1 + 0.2 if i % 2 else 0.3 for i, _ in enumerate(answer)]
"""


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (1, ("method.loss=grpo", "method.scale_rewards=true", "method.num_iterations=2")),
        (1, ("method.loss=dr_grpo",)),
        (1, ("method.loss=dapo", "method.leave_one_out=true", "method.importance_sampling=sequence")),
        (1, ("method.loss=dapo", "method.dynamic_sampling=1", "method.mask_truncated=true")),
        (2, ("method.scale_rewards=true", "distributed.strategy=ddp")),
    ],
)
def test_rewards_that_are_equal_but_for_rounding_leave_the_weights(
    processes: int, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Adam makes steps of the full learning rate of any gradient that is not 0."""
    functions = [{"function": "tenth"}, {"function": "large"}, {"function": "sums", "weight": 0.7}]
    words = (*words, "training.save_steps=end", "training.learning_rate=1e-3", "method.num_generations=8")
    words += ("adapter={type: lora, rank: 4, alpha: 8}", "training.per_device_train_batch_size=1")
    made, folder = recipe(tmp_path, ROUNDED, functions, *words, steps=3, processes=processes), tmp_path / "run"
    if processes == 1:
        train(*made)
    else:
        assert in_processes(2, train_all([made])) == [0, 0]
    assert curve(folder, "grad_norm") == [0.0] * 3
    assert curve(folder, "equal_rewards") == [1.0] * 3
    assert curve(folder, "reward_std") == [0.0] * 3
    weights = load_file(folder / "final" / "adapter_model.safetensors")
    added = {name: weight for name, weight in weights.items() if "lora_B" in name}
    assert added
    assert not any(weight.any() for weight in added.values())


def test_two_processes_log_the_metrics_of_one(tmp_path: Path) -> None:
    words = ["training.per_device_train_batch_size=2", "distributed.strategy=ddp", "training.save_steps=end"]
    words += [f"data.eval={tmp_path / 'rows.jsonl'}", "training.per_device_eval_batch_size=2"]
    assert in_processes(2, train_all([recipe(tmp_path, CODE, BOTH, *words, processes=2)])) == [0, 0]
    for name, value in (BY_HAND | {"equal_rewards": 1 / 2}).items():
        assert curve(tmp_path / "run", name) == [pytest.approx(value)], name
    for name, value in (BY_HAND | {"equal_rewards": 1 / 3, "loss": -BY_HAND["reward"]}).items():
        assert curve(tmp_path / "run", f"eval_{name}") == [pytest.approx(value)], name


def test_an_evaluation_without_a_judged_answer_is_not_the_best(tmp_path: Path) -> None:
    code = (
        "evaluations = []\n"
        "def mine(prompts, **_):\n"
        "    if len(prompts) > 4:\n"
        "        return [i % 2 for i, _ in enumerate(prompts)]\n"
        "    evaluations.append(1)\n"
        "    number = (len(evaluations) + 3) // 4\n"
        "    return [None if number == 2 else -1 / number for _ in prompts]\n"
    )
    words = ["training.eval_steps=1", "training.load_best=true", "training.save_total_limit=1"]
    words += [f"data.eval={tmp_path / 'rows.jsonl'}", "training.per_device_eval_batch_size=1"]
    folder = train(*recipe(tmp_path, code, [{"function": "mine"}], *words, steps=3)).folder
    assert curve(folder, "eval_loss") == [1.0, None, pytest.approx(1 / 3)]
    assert curve(folder, "eval_reward") == [-1.0, None, pytest.approx(-1 / 3)]
    assert "checkpoint-2" not in {path.name for path in folder.iterdir()}
    assert (folder / "checkpoint-3").is_dir()


def test_the_loss_of_an_evaluation_set_without_a_judged_answer_is_unknown(tmp_path: Path) -> None:
    code = "def mine(answer, **_):\n    return [None if a == 3 else 1 for a in answer]\n"
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "3?", "answer": 3}) + "\n")
    sets = [
        {"path": str(tmp_path / "rows.jsonl"), "name": "all"},
        {"path": str(tmp_path / "other.jsonl"), "name": "no"},
    ]
    folder = train(*recipe(tmp_path, code, [{"function": "mine"}], f"data.eval={json.dumps(sets)}")).folder
    assert curve(folder, "eval_loss_all") == [-1.0]
    assert curve(folder, "eval_loss") == [-1.0]
    assert curve(folder, "eval_loss_no") == [None]


def test_a_function_without_weight_judges_no_answer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def a(**_):\n    return [None, 2]\ndef b(**_):\n    return [5, 5]\n")
    sections = [{"function": "a"}, {"function": "b", "weight": 0}]
    rewards = Rewards(
        GrpoMethod.model_validate(
            {"type": "grpo", "rewards": [{"file": str(tmp_path / "mine.py"), **one} for one in sections]}
        )
    )
    each = rewards(["p"] * 2, ["a"] * 2, [[1]] * 2, [{}] * 2, "rows")
    assert each[1].tolist() == [5, 5]
    total = rewards.total(each)
    assert total[0].isnan()
    assert total[1] == 2


@pytest.mark.parametrize(
    ("functions", "metrics"),
    [
        (["a"], []),
        (["a", "b", "a"], ["reward_a", "reward_b", "reward_a_2"]),
        (["a", "std"], ["reward_a", "reward_std_2"]),
        (["a", "a_2", "a"], ["reward_a", "reward_a_2", "reward_a_3"]),
    ],
)
def test_each_function_has_a_metric_of_its_own(functions: list[str], metrics: list[str]) -> None:
    rewards = tuple(RewardFunctionSection(function=one, file="x.py") for one in functions)
    method = GrpoMethod(type="grpo", rewards=rewards)
    assert reward_metrics(method) == metrics
    measured = Grpo(method).metrics
    assert set(metrics) <= set(measured)
    assert len(set(measured)) == len(measured)
