"""GRPO: loss and gradients equal TRL's on the same answers; rollouts and rewards."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, get_peft_model
from process_group import curve, in_processes, train_all
from tiny_model import TOKENS, a_model
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.rewards import RewardFunctionSection
from halftune.core.choice import Choice
from halftune.core.errors import ConfigError, HalftuneError, TrainingError
from halftune.data.batch import WEIGHT, Batch, collate
from halftune.data.pipeline import prepare
from halftune.data.store import Example, Segment
from halftune.hardware.catalogue import lookup
from halftune.methods import AdapterOff
from halftune.methods.grpo import ADVANTAGES, SAMPLED, SERVED, Grpo, advantages, reward_metrics, spread
from halftune.model.generate import until_end
from halftune.model.policy.policy import PolicyModel
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.plan import resolve
from halftune.train.checkpoint.run_inputs import _rewards
from halftune.train.rewards import Rewards
from halftune.train.rewards.exact_answer import exact_answer, last_number
from halftune.train.rollouts.sampling import Answer, Sampler, Sampling
from halftune.train.trainer import train

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS, GROUP, LONGEST, BETA = 3, 4, 9, 0.2


class Accelerator:
    """What TRL's loss asks of accelerate in one process."""

    num_processes, is_main_process = 1, False
    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)
    reduce = staticmethod(lambda tensor, reduction: tensor)
    autocast = staticmethod(torch.enable_grad)


def section(**more: Any) -> GrpoMethod:
    return GrpoMethod(**{"type": "grpo", "rewards": ("exact_answer",), "num_generations": GROUP, **more})  # type: ignore[arg-type]


def answers() -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Prompts, completions of different lengths, and advantages."""
    prompts = [torch.randint(3, TOKENS, (length,)).tolist() for length in torch.randint(2, 7, (PROMPTS,)).tolist()]
    lengths = torch.randint(1, LONGEST + 1, (PROMPTS * GROUP,)).tolist()
    completions = [torch.randint(3, TOKENS, (length,)).tolist() for length in lengths]
    return [one for one in prompts for _ in range(GROUP)], completions, torch.randn(PROMPTS * GROUP)


def batch_of(method: Grpo, prompts: Any, completions: Any, advantage: torch.Tensor, *, packed: bool) -> Batch:
    segments = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor(prompt + completion, dtype=torch.int32).numpy()
        segments.append(Segment(ids, torch.arange(len(ids)).numpy() >= len(prompt)))
    groups = [Example(tuple(segments[i : i + GROUP])) for i in range(0, len(segments), GROUP)]
    batch = collate(groups, 0, packed=packed)
    weights = [method.group_weight(sum(int(one.loss_mask.sum()) for one in group.segments)) for group in groups]
    columns = {WEIGHT: torch.tensor(weights), ADVANTAGES: advantage}
    return Batch(batch.tokens, batch.extras, columns, batch.segment_of_example, sum(weights), examples=(0, 1, 2))


def by_trl(
    model: Any, prompts: Any, completions: Any, advantage: torch.Tensor, loss: str, beta: float,
    before: torch.Tensor | None = None, level: str = "token", high: float = 0.2, weights: torch.Tensor | None = None,
    metrics: Any = None,
) -> torch.Tensor:  # fmt: skip
    def padded(rows: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, rows))
        fill = [[0] * (longest - len(row)) for row in rows]
        ids = [pad + row if left else row + pad for row, pad in zip(rows, fill, strict=True)]
        mask = [[0] * len(pad) + [1] * len(row) if left else [1] * len(row) + [0] * len(pad)
                for row, pad in zip(rows, fill, strict=True)]  # fmt: skip
        return torch.tensor(ids), torch.tensor(mask)

    trainer: Any = GRPOTrainer.__new__(GRPOTrainer)
    vars(trainer).update(
        model=model, accelerator=Accelerator(), beta=beta, loss_type=loss, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, importance_sampling_level=level, epsilon_low=0.2, epsilon_high=high,
        use_vllm=weights is not None, vllm_importance_sampling_correction=True,
        max_completion_length=LONGEST, current_gradient_accumulation_steps=1, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)) if metrics is None else metrics,
        args=type("Args", (), {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}),
    )  # fmt: skip
    (prompt_ids, prompt_mask), (ids, mask) = padded(prompts, left=True), padded(completions, left=False)
    inputs = {
        "prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask,
        "advantages": advantage, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if before is not None:
        inputs["old_per_token_logps"] = torch.zeros(ids.shape)
        inputs["old_per_token_logps"][mask.bool()] = before
    if weights is not None:
        inputs["importance_sampling_ratio"] = torch.ones(ids.shape)
        inputs["importance_sampling_ratio"][mask.bool()] = weights
    if beta:
        with torch.no_grad(), model.disable_adapter():
            whole, masks = torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1)
            inputs["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                model, whole, masks, ids.shape[1]
            )[0]
    return trainer._compute_loss(model, inputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo"])
def test_loss_and_gradients_are_those_of_trl(loss: Any, beta: float, packed: bool) -> None:
    method = Grpo(section(loss=loss, beta=beta, max_completion_length=LONGEST))
    model: Any = get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    made, policy = answers(), PolicyModel(model)
    batch = batch_of(method, *made, packed=packed)
    mine = method.loss(policy, batch, AdapterOff(policy))
    weights = [one for one in model.parameters() if one.requires_grad]
    ours = torch.autograd.grad(mine.total / batch.weight, weights)
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
    measured: Any = defaultdict(lambda: defaultdict(list))
    wanted = by_trl(model, *made, loss, beta, metrics=measured)
    theirs = torch.autograd.grad(wanted, weights)
    total, count = mine.metrics["entropy"]
    (entropy,) = measured["train" if model.training else "eval"]["entropy"]
    assert float(total / count) == pytest.approx(entropy, rel=1e-5)
    torch.testing.assert_close(mine.total / batch.weight, wanted, rtol=1e-5, atol=1e-6, check_dtype=False)
    norm = torch.stack([one.norm() for one in theirs]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    assert float(apart / norm) < 1e-5
    if beta:
        total, count = mine.metrics["kl"]
        assert float(total / count) > 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_second_update_on_a_batch_of_answers_is_that_of_trl(loss: Any, level: Any, packed: bool) -> None:
    keys = {"importance_sampling": level, "epsilon_high": 0.25, "num_iterations": 2}
    method = Grpo(section(loss=loss, max_completion_length=LONGEST, **keys))
    model: Any = get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    made, policy = answers(), PolicyModel(model)
    batch = batch_of(method, *made, packed=packed)
    reference, weights = AdapterOff(policy), [one for one in model.parameters() if one.requires_grad]
    first = method.loss(policy, batch, reference)
    assert float(first.metrics["clip_fraction"][0]) == 0
    with torch.no_grad():
        for one in weights:
            one += 0.1 * one.std() * torch.randn(one.shape)
    batch = replace(batch, columns={**batch.columns, **first.columns})
    mine = method.loss(policy, batch, reference)
    clipped, tokens = mine.metrics["clip_fraction"]
    assert 0 < float(clipped) < float(tokens)
    ours = torch.autograd.grad(mine.total / batch.weight, weights)
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
    wanted = by_trl(model, *made, loss, 0.0, first.columns[SAMPLED], level, 0.25)
    theirs = torch.autograd.grad(wanted, weights)
    torch.testing.assert_close(mine.total / batch.weight, wanted, rtol=1e-5, atol=1e-6, check_dtype=False)
    norm = torch.stack([one.norm() for one in theirs]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    assert float(apart / norm) < 1e-5


def test_the_evaluation_loss_is_the_negative_reward() -> None:
    """A batch that only keeps processes in step has no answers, and counts nothing."""
    nothing: Any = None
    columns = {WEIGHT: torch.tensor([1.0, 0.0, 1.0]), "reward": torch.tensor([0.5, float("nan"), 2.0])}
    found = Grpo(section()).evaluate(nothing, Batch({}, columns=columns), nothing)
    assert float(found.total) == -2.5
    assert [float(one) for one in found.metrics["reward"]] == [2.5, 2]
    assert float(Grpo(section()).evaluate(nothing, Batch({}, columns={WEIGHT: torch.zeros(1)}), nothing).total) == 0


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    plain = advantages(rewards, scale=False, leave_one_out=False)
    assert plain.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4]
    scaled = advantages(rewards, scale=True, leave_one_out=False)
    torch.testing.assert_close(scaled, plain / (rewards.std(dim=1, keepdim=True) + 1e-4))
    others = advantages(rewards, scale=False, leave_one_out=True)
    assert others[0].tolist() == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 1,234.", "1234"),
        ("a 3 #### -4.5", "-4.5"),
        ("none", None),
        ("#### 7 apples of 9", "9"),
        ("x = .5", "0.5"),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("It is 1000.", "#### 1,000", 1),
        (" blue ", "blue", 1),
        ("6", "5", 0),
        ("none", "5", 0),
        (r"\boxed{\$9{,}500}", "9500", 1),
        (r"so $12\,000$", "12000", 1),
        ("It is \u22125", "-5", 1),
        ("about 1e3", "1000", 1),
        ("pages 3-7", "7", 1),
        ("10-3 = 7", 7, 1),
        ("3 - 5", -5, 0),
        ("the primes are 2,3,5", "5", 1),
        ("12km", "12", 1),
        ("H2O", "CO2", 0),
        ("room B12", "A12", 0),
        ("The answer is 3/2", "1/2", 0),
        ("The answer is 3/2", 2, 0),
        ("3/2", "3/2", 1),
        (r"It is $\frac{1}{2}$", "2", 0),
        (r"It is $\frac12$", "2", 0),
        (r"It is $\frac{1}{\sqrt{2}}$", "2", 0),
        (r"\frac{10}{5} = 2", "2", 1),
        ("12 m^2", "12", 1),
        (r"12 \text{cm}^{2}", "12", 1),
        ("10^2", "2", 0),
        (r"$2 \times 10^{3}$", "2000", 1),
        ("None", None, None),
        ("0", "", None),
        ("9007199254740993", 9007199254740992, 0),
        ("0.30", 0.3, 1),
        ("nan", math.nan, None),
        ("16 of them. The final answer is 3/4", "16", 0),
        ("First 7. So the answer is 10^6", "7", 0),
        ("First 7. So the answer is x/5", "7", 0),
        ("3 + 4", "4", 0),
        ("x + 2", "2", 0),
        ("2 x 3", "3", 0),
        ("7*6 = 42", "42", 1),
        ("3 -5", "-5", 0),
        ("x = 3\n-5", "-5", 1),
        ("-$5", "-5", 1),
        (r"42^{\circ}", "42", 1),
        (r"42^\circ", "42", 1),
        ("1.5×10³", "1500", 1),
        ("1.5 x 10^3", "1500", 1),
        (r"2 \times 10⁻³", "0.002", 1),
        ("12 m²", "12", 1),
        ("5²", "5", 0),
        ("1\u2009234", "1234", 1),
        ("1_000", "1000", 1),
        ("1 234", "1234", 0),
        ("1.234.567", "1.234", 0),
        ("12:30", "30", 0),
        ("8√2", "8", 0),
        (r"8 \sqrt{2}", "8", 0),
        (r"8\pi", "8", 0),
        ("7½", "7", 0),
        (r"7\frac{1}{2}", "7", 0),
        (r"4. $\frac{x^{2}}{\sqrt{\frac{1}{3}}}$", "4", 0),
        (r"4. $\frac{3}{4", "4", 0),
        ("x_{1}", "1", 0),
        ("5 km/day", "5", 1),
        ("5/day", "5", 1),
        ("**42**.", "42", 1),
        ("It is 42", r"\boxed{42}", 1),
        ("It is 42", r"$\boxed{42}$", 1),
        (r"\boxed{3/4}", r"\boxed{3/4}", 1),
        ("8\n####", "8", 1),
        ("#### 8\n####", "8", 1),
        ("####", "#### ", 1),
    ],
)
def test_exact_answers(completion: str, answer: Any, reward: float | None) -> None:
    assert exact_answer([completion], [answer]) == [reward]


def test_an_unjudged_answer_leaves_its_groups_statistics() -> None:
    """As of the judged answers alone; a group with fewer than two of them gives no gradient."""
    none = math.nan
    rewards = torch.tensor([[1.0, none, 1.0, none], [1.0, 0.0, none, 4.0], [none, 2.0, none, none], [none] * 4])
    number, mean, deviation = spread(rewards)
    assert number.tolist() == [2, 3, 1, 0]
    assert mean[:3].tolist() == pytest.approx([1.0, 5 / 3, 2.0])
    assert deviation[:2].tolist() == pytest.approx([0.0, float(torch.tensor([1.0, 0.0, 4.0]).std())])
    for scale, leave_one_out in itertools.product((False, True), repeat=2):
        found = advantages(rewards, scale=scale, leave_one_out=leave_one_out)
        assert found[[0, 2, 3]].abs().max() == 0
        alone = advantages(torch.tensor([[1.0, 0.0, 4.0]]), scale=scale, leave_one_out=leave_one_out)
        assert torch.allclose(found[1, [0, 1, 3]], alone[0])
        assert found[1, 2] == 0


BAD = {
    "raises": "def half(**_):\n    raise KeyError('x')\n",
    "too few": "def half(**_):\n    return [1.0]\n",
    "not finite": "def half(completions, **_):\n    return [float('inf')] * len(completions)\n",
    "not finite in fp32": "def half(completions, **_):\n    return [1e39] * len(completions)\n",
    "text": "def half(completions, **_):\n    return ['good'] * len(completions)\n",
}


def rewards_of(folder: Path, code: str, *more: dict[str, Any]) -> Rewards:
    (folder / "mine.py").write_text(code)
    sections = [{"function": "half", "file": str(folder / "mine.py")}, *more]
    return Rewards(section(rewards=[RewardFunctionSection.model_validate(one) for one in sections]))


def test_a_reward_function_does_not_switch_gradients_off(tmp_path: Path) -> None:
    code = "import torch\ndef half(**_):\n    torch.set_grad_enabled(False)\n    return [0.0]\n"
    rewards_of(tmp_path, code)(["p"], ["a"], [[1]], [{}], "rows")
    assert torch.is_grad_enabled()


def test_a_reward_function_may_be_a_generator(tmp_path: Path) -> None:
    rewards = rewards_of(tmp_path, "def half(completions, **_):\n    yield from map(len, completions)\n")
    assert rewards(["p", "p"], ["a", "aa"], [[1], [2]], [{}, {}], "rows").tolist() == [[1.0, 2.0]]


def test_rewards_get_the_columns_and_may_be_missing(tmp_path: Path) -> None:
    code = "def half(answer, prompts, **_):\n    return [a and len(p) for a, p in zip(answer, prompts)]\n"
    rewards = rewards_of(tmp_path, code, {"function": "matches", "pattern": "a+", "weight": 2})
    found = rewards(["p", "pp"], ["aa", "ab"], [[1], [2]], [{"answer": "x"}, {}], "rows")
    assert found[0, 0] == 1
    assert found[0, 1].isnan()
    assert found[1].tolist() == [1.0, 0.0]
    assert rewards.weights.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", BAD)
def test_a_reward_function_that_fails_is_named_with_the_rows(kind: str, tmp_path: Path) -> None:
    rewards = rewards_of(tmp_path, BAD[kind])
    with pytest.raises(TrainingError) as error:
        rewards(["p", "q"], ["a", "b"], [[1], [2]], [{"answer": "a"}] * 2, "rows.jsonl line 3")
    assert error.value.code == "train.reward_failed"
    assert error.value.where == "rows.jsonl line 3"


@pytest.mark.parametrize(
    "asked",
    [
        {"function": "exact_anwser"},
        {"function": "matches", "pattern": "("},
        {"function": "half", "file": "gone.py"},
        {"function": "half", "file": "/dev/zero"},
        {"function": "half", "file": "pipe"},
        {"function": "half", "file": "."},
        {"function": "none", "file": "mine.py"},
    ],
)
def test_a_reward_that_is_not_there_is_refused(asked: dict[str, str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(BAD["raises"])
    os.mkfifo("pipe")
    with pytest.raises(ConfigError) as error:
        Rewards(
            load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [f"method.rewards={json.dumps([asked])}"]).run.method
        )
    found = error.value.problems or (error.value,)
    assert [one.code for one in found] == ["config.bad_reward"]
    file = asked.get("file", "gone.py")
    assert not Path(file).exists() or file not in (found[0].remedy or ""), "a name that is there is no remedy"


def test_noise_samples_from_the_probabilities() -> None:
    logits, number = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0]), 4000
    sampling = Sampling(section(temperature=0.7), range(number), torch.device("cpu"))
    ids = torch.zeros(number, 1, dtype=torch.long)
    drawn = sampling(ids, logits.expand(number, -1)).argmax(1)
    again = Sampling(section(temperature=0.7), range(number), torch.device("cpu"))(ids, logits.expand(number, -1))
    assert torch.equal(again.argmax(1), drawn)
    expected = (logits / 0.7).softmax(0)
    found = torch.bincount(drawn, minlength=5) / number
    assert float((found - expected).abs().max()) < 4 * (0.25 / number) ** 0.5  # four standard deviations
    few = Sampling(section(top_k=2), range(number), torch.device("cpu"))(ids, logits.expand(number, -1)).argmax(1)
    assert set(few.tolist()) == {0, 1}
    likely = Sampling(section(top_p=0.5), range(number), torch.device("cpu"))(ids, logits.expand(number, -1)).argmax(1)
    assert set(likely.tolist()) == {0}


@pytest.fixture
def own_recipe(tmp_path: Path) -> Any:
    """The shipped recipe, with other keys, as (config, plan)."""

    def make(**training: Any) -> Any:
        words = [f"training.{key}={value}" for key, value in training.items()]
        loaded = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [*words, "logging.progress=false"])
        return loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))

    return make


def test_an_answer_keeps_the_token_that_ends_it() -> None:
    """It is learned; an answer without one was cut off."""
    sampler = Sampler.__new__(Sampler)
    sampler.ends = [2, 5]
    cut = [until_end(np.array(one), sampler.ends) for one in ([7, 5, 2, 0], [2, 0, 0, 0], [7, 8, 9, 7])]
    assert [one.tolist() for one in cut] == [[7, 5], [2], [7, 8, 9, 7]]
    assert sampler.truncated([Answer(one) for one in cut]).tolist() == [False, False, True]


def test_reward_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rewards.py").write_text(f"def {folder}(**_): ...\n")
    sections = [{"function": one, "file": str(tmp_path / one / "rewards.py")} for one in "aba"]
    words = [f"method.rewards={json.dumps(sections)}"]
    method: Any = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", words).run.method
    before = _rewards(method)
    assert len(before) == 2
    (tmp_path / "a" / "rewards.py").write_text("def a(**_): return [1]\n")
    assert _rewards(method) != before
    assert reward_metrics(method) == ["reward_a", "reward_b", "reward_a_2"]


def test_a_reward_file_may_define_classes(tmp_path: Path) -> None:
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass One:\n    x: int\n"
    rewards = rewards_of(tmp_path, code + "def half(completions, **_):\n    return [One(3).x for _ in completions]\n")
    assert rewards(["p"], ["a"], [[1]], [{}], "rows").tolist() == [[3.0]]


@pytest.mark.parametrize("inside", ["", "def half(**_):\n    ", "async def half(**_):\n    "])
def test_a_reward_that_exits_does_not_end_the_run_as_if_it_were_complete(inside: str, tmp_path: Path) -> None:
    with pytest.raises(HalftuneError) as error:
        rewards_of(tmp_path, f"import sys\n{inside}sys.exit(0)\n")(["p"], ["a"], [[1]], [{}], "rows")
    assert error.value.code == ("train.reward_failed" if inside else "config.bad_reward")


@pytest.mark.parametrize(
    ("code", "good"),
    [
        ("def half(**_): ...", True),
        ("from mine import *", True),
        ("from mine import other as half", True),
        ("half = print", True),
        ("def other(**_): ...", False),
        ("def half(:", False),
        ("(" * 5000, False),
        ("\0", False),
    ],
)
def test_a_recipe_whose_reward_cannot_be_there_is_refused_unrun(code: str, good: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code + "\nraise RuntimeError\n" * good)
    rewards = json.dumps([{"function": "half", "file": str(tmp_path / "mine.py")}])
    if good:
        load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [f"method.rewards={rewards}"])
        return
    with pytest.raises(ConfigError) as error:
        load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [f"method.rewards={rewards}"])
    assert [one.code for one in error.value.problems or (error.value,)] == ["config.bad_reward"]


def test_another_reward_function_is_not_resumed_with_unless_it_is_allowed(tmp_path: Path) -> None:
    def run(*words: str) -> Any:
        (tmp_path / "rewards.py").write_text(code)
        rewards = json.dumps([{"function": "half", "file": str(tmp_path / "rewards.py")}])
        short = ["method.max_completion_length=4", "method.num_generations=2", "training.save_steps=1"]
        words = (f"method.rewards={rewards}", f"training.output_dir={tmp_path / 'run'}", *short, *words)
        loaded = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", words)
        return train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))

    code = "def half(completions, **_):\n    return [len(one) / 2 for one in completions]\n"
    run("training.max_steps=1", "training.logging_steps=1")
    (group,) = json.loads((tmp_path / "run" / "rollouts.json").read_text())["rollouts"]
    assert [one["reward"] for one in group["answers"]] == [len(one["text"]) / 2 for one in group["answers"]]
    assert group["step"] == 1
    assert 'id="rollouts"' in (tmp_path / "run" / "report.html").read_text()
    code = code.replace("2", "3")
    with pytest.raises(ConfigError) as error:
        run("training.max_steps=2")
    assert error.value.code == "train.run_changed"
    assert run("training.max_steps=2", "training.allow_changes=[rewards]").step == 2


@pytest.mark.slow
def test_sharded_weights_gathered_once_or_for_each_token_give_the_same_answers(tmp_path: Path) -> None:
    def asked(once: bool) -> Any:
        words = [
            "training.max_steps=2",
            "method.max_completion_length=6",
            f"training.output_dir={tmp_path / str(once)}",
        ]
        words += ["distributed.strategy=fsdp2", "logging.progress=false", "training.save_steps=end"]
        loaded = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", words)
        plan = resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model), world_size=2)
        assert plan.parallel is not None
        assert plan.parallel.gather_once is not None
        assert plan.parallel.gather_once.value  # there is room
        return loaded, replace(plan, parallel=replace(plan.parallel, gather_once=Choice(once, "")))

    assert in_processes(2, train_all([asked(True), asked(False)])) == [0, 0]
    for name in ("loss", "reward", "completion_length"):
        assert curve(tmp_path / "True", name) == curve(tmp_path / "False", name)


@pytest.mark.parametrize("times", [0, 2, 20])
def test_equal_groups_give_way_to_other_prompts(times: int, tmp_path: Path) -> None:
    # of 16 prompts, four have answers of different rewards
    code = "def size(completions, answer, **_):\n    return [(a < 4) * len(o) for a, o in zip(answer, completions)]\n"
    (tmp_path / "rewards.py").write_text(code)
    rows = [{"prompt": f"What is {n}?", "answer": n} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = json.dumps([{"function": "size", "file": str(tmp_path / "rewards.py")}])
    keys = [f"data.train={tmp_path / 'rows.jsonl'}", f"method.rewards={rewards}", f"method.dynamic_sampling={times}"]
    keys += [f"training.output_dir={tmp_path / 'run'}", "training.max_steps=2", "training.logging_steps=1"]
    keys += ["training.per_device_train_batch_size=8", "method.num_generations=3", "method.max_completion_length=4"]
    loaded = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [*keys, "logging.progress=false"])
    folder = train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))).folder
    assert sum(curve(folder, "equal_rewards")) == pytest.approx(12 / 8)  # of the prompts that came first
    dropped, tokens = curve(folder, "dropped"), curve(folder, "tokens_trained")
    assert len(dropped) == (2 if times else 0)
    if times == 0:
        assert min(tokens) >= 8 * 3
    elif times == 2:
        assert 0 < sum(dropped) < 12 / 8
        assert all(count <= (1 - out) * 8 * 3 * 4 for count, out in zip(tokens, dropped, strict=True))
    else:
        assert dropped == [0, 0]
        assert min(curve(folder, "grad_norm")) > 0


@pytest.mark.slow
def test_the_reward_rises(own_recipe: Any, tmp_path: Path) -> None:
    folder = train(*own_recipe(output_dir=tmp_path / "run", max_steps=15, learning_rate=1e-2)).folder
    rewards = curve(folder, "reward")  # means over five steps
    assert rewards[-1] > rewards[0] + 0.1
    assert (folder / "final").is_dir()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["method.beta=0.1"], "plan.no_reference_model"),
        (["method.max_completion_length=250"], "config.keys_conflict"),
        (["training.tokens_per_batch=4096", "training.per_device_train_batch_size=null"], "config.keys_conflict"),
        (["method.num_generations=1"], "config.invalid_value"),
    ],
)
def test_what_it_does_not_go_with_is_refused(words: list[str], code: str) -> None:
    def planned() -> None:
        loaded = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", words)
        resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model))

    with pytest.raises(HalftuneError) as error:
        planned()
    found = getattr(error.value, "problems", ()) or (error.value,)
    assert [one.code for one in found] == [code]


def test_prompts_are_read_from_conversations_and_from_prompts(tmp_path: Path) -> None:
    rows = {
        "talk.jsonl": {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]},
        "ask.jsonl": {"prompt": "Hi?", "solution": 4},
        "list.jsonl": {"prompt": [{"role": "user", "content": "Hi?"}], "answer": "mine"},
    }
    tokenizer = load_tokenizer(load_config(ROOT / "configs" / "tiny" / "grpo.yaml").run.model)
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        config = load_config(ROOT / "configs" / "tiny" / "grpo.yaml", [f"data.train={tmp_path / name}"]).run
        example = prepare(config, tokenizer).train.example(0)
        (segment,) = example.segments
        assert tokenizer.decode(segment.input_ids).endswith("Hi?<|im_end|>\n<|im_start|>assistant\n")
        assert not segment.loss_mask.any()
        assert example.row == (row | {"answer": "Ho."} if name == "talk.jsonl" else row)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_weights_of_a_servers_answers_are_those_of_trl(updates: int, packed: bool) -> None:
    server = {"url": "http://localhost:1", "max_weight": 1.5}
    method = Grpo(section(max_completion_length=LONGEST, num_iterations=updates, server=server))
    model: Any = get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    made, policy = answers(), PolicyModel(model)
    batch = batch_of(method, *made, packed=packed)
    reference, weights = AdapterOff(policy), [one for one in model.parameters() if one.requires_grad]
    with torch.no_grad():
        before = policy.token_logprobs(batch)
    served = before + 0.5 * torch.randn(before.shape)
    served[3] = float("nan")
    batch = replace(batch, columns={**batch.columns, SERVED: served})
    mine = method.loss(policy, batch, reference)
    if updates == 2:
        with torch.no_grad():
            for one in weights:
                one += 0.1 * one.std() * torch.randn(one.shape)
        mine = method.loss(policy, replace(batch, columns={**batch.columns, **mine.columns}), reference)
    ours = torch.autograd.grad(mine.total / batch.weight, weights)
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
    given = torch.nan_to_num(before - served).exp().clamp(max=1.5)
    wanted = by_trl(model, *made, "dapo", 0.0, before, weights=given)
    theirs = torch.autograd.grad(wanted, weights)
    torch.testing.assert_close(mine.total / batch.weight, wanted, rtol=1e-5, atol=1e-6, check_dtype=False)
    norm = torch.stack([one.norm() for one in theirs]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    assert float(apart / norm) < 1e-5
    total, count = mine.metrics["server_weight"]
    assert float(total / count) == pytest.approx(float(given.mean()), rel=1e-5)
