"""``final/probes.json``: which prompts, what the trained and the base model say of the answers, and who has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.core.errors import ModelError
from halftune.infer.session import open_session
from halftune.model.result.completed_run import open_run
from halftune.train.trainer import train
from halftune.verify.probes import MOST, PROBES, Probes, read_probes

Recipe = Callable[..., tuple[Any, Any]]
PAIRS = [{"prompt": f"Say {one}.", "chosen": f"{one} it is", "rejected": "no"} for one in range(24)]


def trained(recipe: Recipe, *overrides: str, count: int = 8) -> Probes | None:
    loaded, plan = recipe(f"logging.probes={count}", "training.max_steps=2", *overrides)
    return read_probes(train(loaded, plan).folder / "final")


def expected(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities ``[T]`` of an answer alone, in fp64."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


def test_probes_are_what_the_result_and_its_base_say(recipe: Recipe, small_model: Path, tmp_path: Path) -> None:
    found = trained(recipe, "training.learning_rate=0.05")
    assert found is not None
    assert len(found.probes) == 8
    assert len({tuple(one.prompt) for one in found.probes}) == 8
    session = open_session(open_run(str(tmp_path / "run")))
    session.model.eval()
    base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    for one in found.probes:
        torch.testing.assert_close(
            torch.tensor(one.logprobs).double(), expected(session.model, one.prompt, one.answer), atol=1e-4, rtol=0
        )
        assert one.base is not None
        torch.testing.assert_close(
            torch.tensor(one.base).double(), expected(base, one.prompt, one.answer), atol=1e-4, rtol=0
        )
        # greedy: every token is the likeliest one
        assert [place[0][0] for place in one.top] == one.answer
        assert one.ended == (one.answer[-1] in found.stops)
        assert not set(one.answer[:-1]) & set(found.stops)
    assert any(abs(one.base[0] - one.logprobs[0]) > 1e-3 for one in found.probes if one.base)


def test_the_prompt_is_the_one_that_chat_renders(recipe: Recipe, small_model: Path) -> None:
    found = trained(recipe, "data.system=Be brief.")
    assert found is not None
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    for one in found.probes:
        assert one.messages is not None
        assert [message["role"] for message in one.messages] == ["system", "user"]
        text = tokenizer.apply_chat_template(one.messages, tokenize=False, add_generation_prompt=True)
        assert (one.text, one.prompt) == (text, tokenizer(text, add_special_tokens=False)["input_ids"])


def test_probes_are_the_same_twice(recipe: Recipe, tmp_path: Path) -> None:
    first = trained(recipe)
    second = trained(recipe, f"training.output_dir={tmp_path / 'again'}")
    other = trained(recipe, f"training.output_dir={tmp_path / 'other'}", "training.seed=7")
    assert first == second
    assert first is not None
    assert other is not None
    assert [one.prompt for one in other.probes] != [one.prompt for one in first.probes]


def test_rows_of_evaluation_come_first(recipe: Recipe, tmp_path: Path) -> None:
    rows = tmp_path / "held.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Held {one}?", "completion": "yes"}) + "\n" for one in range(20)))
    found = trained(recipe, f"data.eval={rows}")
    assert found is not None
    assert found.rows == "data.eval"
    assert all("Held" in one.text for one in found.probes)
    split = trained(recipe, "data.eval_split=12", f"training.output_dir={tmp_path / 'split'}")
    assert split is not None
    assert split.rows == "data.train, held out"


@pytest.mark.parametrize(("overrides", "messages"), [
    (["method={type: dpo}", "data.train={pairs}"], True),
    (["method={type: pretrain}", "data.train=[{path: {texts}, format: text}]"], False),
    (["adapter=none"], True),
])  # fmt: skip
def test_other_methods(recipe: Recipe, tmp_path: Path, overrides: list[str], messages: bool) -> None:
    pairs, texts = tmp_path / "pairs.jsonl", tmp_path / "texts.jsonl"
    pairs.write_text("".join(json.dumps(one) + "\n" for one in PAIRS))
    texts.write_text("".join(json.dumps({"text": f"Document {one} is long enough to be cut."}) + "\n" for one in PAIRS))
    overrides = [one.replace("{pairs}", str(pairs)).replace("{texts}", str(texts)) for one in overrides]
    found = trained(recipe, *overrides)
    assert found is not None
    assert all((one.messages is not None) == messages for one in found.probes)
    assert all((one.base is None) == ("adapter=none" in overrides) for one in found.probes)


def test_a_prompt_ends_between_characters(recipe: Recipe, small_model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "汉字🙂" * one}) + "\n" for one in range(3, 20)))
    found = trained(recipe, "method={type: pretrain}", f"data.train=[{{path: {texts}, format: text}}]")
    assert found is not None
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    assert all(tokenizer(one.text, add_special_tokens=False)["input_ids"] == one.prompt for one in found.probes)


@pytest.mark.parametrize(("count", "method"), [(0, "dpo"), (8, "reward")])
def test_runs_without_probes(recipe: Recipe, tmp_path: Path, count: int, method: str) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(one) + "\n" for one in PAIRS))
    assert trained(recipe, f"method={{type: {method}}}", f"data.train={pairs}", count=count) is None


@pytest.mark.parametrize("change", [
    lambda text: text[: len(text) // 2],
    lambda text: text.replace('"format":1', '"format":2'),
    lambda text: text.replace('"prompt":[', '"prompt":["x",', 1),
    lambda text: text.replace('"logprobs":[', '"logprobs":[0.0,', 1),
    lambda text: text + " " * MOST,
    lambda text: "[" * 100_000,
])  # fmt: skip
def test_a_damaged_file_is_refused(change: Callable[[str], str], tmp_path: Path) -> None:
    probe = {"text": "a", "prompt": [1], "answer": [2], "ended": True, "logprobs": [-1.0], "top": [[[2, -1.0]]]}
    facts = {"rows": "data.eval", "model": "m", "adapter": True, "compute": "fp32", "bos": None, "stops": [2]}
    text = Probes.model_validate({**facts, "vocabulary": 4, "probes": [probe]}).as_json()
    (tmp_path / PROBES).write_text(text)
    assert read_probes(tmp_path) is not None
    (tmp_path / PROBES).write_text(change(text))
    with pytest.raises(ModelError) as caught:
        read_probes(tmp_path)
    assert caught.value.code == "verify.bad_probes"
