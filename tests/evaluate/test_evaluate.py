"""`halftune evaluate` on a small trained run: losses, answers, files, exit codes."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_model import checkpoint, finished_run

from halftune import cli
from halftune.core.errors import ConfigError, DataError
from halftune.evaluate import measure, output
from halftune.evaluate.harness import Harness, TaskScore, scores
from halftune.evaluate.rows import choose_rows, tokenize
from halftune.evaluate.targets import open_targets
from halftune.model.tokenizer.tokenizer import load_tokenizer

Evaluate = Callable[..., dict[str, Any]]
LABELLED = -100


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("base") / "model", vocab_size=4096, initializer_range=0.2)


def rows(path: Path, first: int, count: int) -> Path:
    made = [
        {"prompt": f"Add {number} and {number % 7}.", "completion": f"It is {number + number % 7}" + "!" * (number % 5)}
        for number in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def train(folder: Path, base: Path, **data: Any) -> Path:
    recipe = {
        "model": {"name_or_path": str(base), "tokenizer": "builtin:qwen2-tiny"},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 4},
        "data": {"train": str(rows(folder / "train.jsonl", 0, 30)), "max_length": 64, **data},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 4,
            "eval_steps": 4,
            "save_steps": 2,
            "learning_rate": 0.02,
        },
        "generation": {"max_new_tokens": 6},
        "logging": {"progress": False},
    }
    (folder / "x.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    assert cli.run_verb("train", ["--config", str(folder / "x.yaml")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run with an evaluation set of 12 rows."""
    folder = tmp_path_factory.mktemp("trained")
    return train(folder, base, eval=str(rows(folder / "eval.jsonl", 100, 12)))


@pytest.fixture
def drawn() -> None:
    """The plot is drawn."""


@pytest.fixture
def evaluate(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Evaluate:
    """``evaluate("run", "--base", code=0)`` → what ``--json`` prints."""
    if "drawn" not in request.fixturenames:  # it takes longer than the rest
        monkeypatch.setattr(output, "draw", lambda path, _: path.touch())

    def run(*arguments: Any, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        given = [*map(str, arguments), "--json"]
        given += [] if "--output" in given else ["--output", str(tmp_path / "out")]
        assert cli.run_verb("evaluate", given) == code
        return json.loads(capsys.readouterr().out)

    return run


def eval_loss(run: Path) -> float:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


def loss_by_hand(model: torch.nn.Module, run: Path) -> float:
    """Of the run's evaluation set, row by row in fp64."""
    (target,) = open_targets([str(run)], [], run, base=None)
    made = tokenize(choose_rows(None, [target], None), target, load_tokenizer(target.run.result))
    total = count = 0.0
    for index in range(made.count):
        (segment,) = made.split.example(index).segments
        ids, labels = torch.from_numpy(segment.input_ids).long(), torch.from_numpy(segment.labels).long()
        logits = model(ids[None]).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").item()
        count += (labels[1:] != LABELLED).sum().item()
    return total / count


@torch.no_grad()
def test_the_loss_is_that_of_training(trained: Path, base: Path, evaluate: Evaluate) -> None:
    from transformers import AutoModelForCausalLM

    found = evaluate(trained)
    untrained, tuned = found["models"]
    loss = tuned["metrics"]["loss"]
    assert loss["value"] == pytest.approx(eval_loss(trained), rel=1e-6)
    assert tuned["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(loss["value"]))
    assert (untrained["base"], tuned["base"], tuned["rows"], tuned["prompts"]) == (True, False, 12, 0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    by_hand = loss_by_hand(model, trained)
    assert untrained["metrics"]["loss"]["value"] == pytest.approx(by_hand, rel=1e-6)
    assert loss["difference"] == pytest.approx(loss["value"] - by_hand, abs=1e-5)
    assert 0 < loss["difference_error"] < abs(loss["difference"])
    padded = evaluate(trained, "data.packing=false", "--no-base")
    assert padded["models"][0]["metrics"]["loss"]["value"] == pytest.approx(loss["value"], rel=1e-6)


def test_an_adapter_and_its_base_are_one_model(
    trained: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [], measure.load_weights
    monkeypatch.setattr(measure, "load_weights", lambda run, *, base: loads.append(base) or load(run, base=base))
    found = evaluate(trained, trained / "checkpoint-2")
    assert loads == [False, False]  # the base of both is measured once
    untrained, last, earlier = [one["metrics"]["loss"]["value"] for one in found["models"]]
    assert len({untrained, last, earlier}) == 3
    assert [one["name"] for one in found["models"][1:]] == ["run", "checkpoint-2"]


def test_other_forms_of_the_same_model(trained: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    """The last checkpoint, the merged folder and the adapter's folder alone have the run's loss."""
    merged, adapter, data = tmp_path / "merged", tmp_path / "adapter", trained.parent / "eval.jsonl"
    assert cli.run_verb("export", [str(trained), "--output", str(merged)]) == 0
    shutil.copytree(trained / "final", adapter)
    given = [trained / "checkpoint-4", merged, adapter, trained.parent / "x.yaml", trained / "final"]
    found = evaluate(*given, "--data", data, "--no-base", "precision=fp32")
    losses = [one["metrics"]["loss"]["value"] for one in found["models"]]
    assert losses == pytest.approx([eval_loss(trained)] * 5, rel=1e-5)
    assert found["notes"] == []


def test_answers_are_scored_and_written(trained: Path, tmp_path: Path, evaluate: Evaluate, drawn: None) -> None:
    found = evaluate(trained, "--metrics", "exact,f1", "--limit", 5)
    tuned = found["models"][1]
    assert (tuned["rows"], tuned["prompts"]) == (5, 5)
    lines = [json.loads(line) for line in (tmp_path / "out/answers-run.jsonl").read_text().splitlines()]
    given = [json.loads(line) for line in (trained.parent / "eval.jsonl").read_text().splitlines()[:5]]
    assert [line["reference"] for line in lines] == [row["completion"] for row in given]
    assert [line["prompt"][-1]["content"] for line in lines] == [row["prompt"] for row in given]
    for name in ("exact", "f1"):
        mean = sum(line[name] for line in lines) / 5
        assert tuned["metrics"][name]["value"] == pytest.approx(mean)
    assert json.loads((tmp_path / "out/scores.json").read_text())["models"] == found["models"]
    assert (tmp_path / "out/scores.png").read_bytes().startswith(b"\x89PNG")


def test_limits_decide_the_exit_code(trained: Path, evaluate: Evaluate) -> None:
    loss = eval_loss(trained)
    assert not evaluate(trained, "--fail-above", f"loss={loss + 0.1}")["thresholds"][0]["failed"]
    # the base is worse, and does not count
    (verdict,) = evaluate(trained, "--fail-above", f"loss={loss - 0.1}", code=4)["thresholds"]
    assert (verdict["metric"], verdict["model"], verdict["failed"]) == ("loss", "run", True)
    evaluate(trained, "--no-base", "--metrics", "f1", "--limit", 2, "--fail-below", "f1=1.01", code=4)


def test_without_an_evaluation_set(base: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    """The rows that training held out; without any, the training set."""
    run = train(tmp_path, base, eval_split=4)
    found = evaluate(run, "--no-base", "--metrics", "exact", "--output", run / "evaluation")
    (only,) = found["models"]
    assert (only["rows"], only["prompts"]) == (4, 4)
    assert only["metrics"]["loss"]["value"] == pytest.approx(eval_loss(run), rel=1e-6)
    other = finished_run(tmp_path / "other", base)
    assert evaluate(other, "--no-base", f"data.train={tmp_path / 'train.jsonl'}")["models"][0]["rows"] == 30


def test_a_full_model_and_its_base(base: Path, trained: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    full = finished_run(tmp_path / "full", base, adapter="none")
    given = [full, "--base", "--data", trained.parent / "eval.jsonl"]
    untrained, tuned = evaluate(*given)["models"]
    same = evaluate(trained)["models"][0]["metrics"]["loss"]["value"]
    assert untrained["metrics"]["loss"]["value"] == pytest.approx(same, rel=1e-6)
    assert untrained["metrics"]["loss"]["value"] != tuned["metrics"]["loss"]["value"]
    assert len(evaluate(*given[:1], *given[2:])["models"]) == 1
    beside = evaluate(full, trained, *given[2:])["models"]  # the base is the adapter's alone
    assert [(one["name"], one["base"]) for one in beside] == [(str(base), True), ("full", False), ("run", False)]


def test_rows_that_tell_nothing(base: Path, trained: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    def refused(*arguments: Any, code: int) -> str:
        return evaluate(*arguments, code=code)["error"]["code"]

    text = tmp_path / "a.txt"
    text.write_text("Plain text.\n")
    plain = finished_run(tmp_path / "text", base, method="pretrain")
    assert refused(plain, "--data", text, "--metrics", "f1", code=2) == "evaluate.no_references"
    assert refused(trained, "--data", text, code=2) == "data.text_without_answers"
    assert refused(base, "model.tokenizer=builtin:qwen2-tiny", "--base", "--data", text, code=2) == "evaluate.no_base"
    assert refused(trained, "--fail-below", "loss", code=2) == "cli.bad_option_value"
    assert refused(trained, "--max-new-tokens", 4, code=2) == "cli.option_conflict"
    pairs = finished_run(tmp_path / "pairs", base, method="dpo")
    assert refused(pairs, code=2) == "evaluate.no_data"
    scoring = finished_run(tmp_path / "scoring", base, method="reward")
    assert refused(scoring, "--data", trained.parent / "eval.jsonl", code=3) == "infer.reward_model"


def test_tokens_that_differ_are_noted(trained: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    resolved = other / "resolved.yaml"
    text = resolved.read_text()
    assert "max_length: 64" in text
    resolved.write_text(text.replace("max_length: 64", "max_length: 24").replace(str(trained), str(other)))
    found = evaluate(trained, other, "--no-base")
    assert len(found["notes"]) == 1


def test_without_the_harness(trained: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(trained, "--tasks", "arc_easy", code=6)["error"]["code"] == "core.package_missing"


def test_scores_of_the_harness() -> None:
    numbers = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 1, "em_stderr,strict": "N/A"}
    found = scores({"a": numbers}, {"a": {"acc": True, "em": False}})
    assert found == {"a/acc": TaskScore(0.5, 0.1, True), "a/em/strict": TaskScore(1.0, None, False)}


class HarnessModel:
    """What lm-evaluation-harness 0.4.13 does to a model: ties its weights, and opens an autocast of its own."""

    def __init__(self, pretrained: Any, tokenizer: Any, batch_size: int, **dtypes: torch.dtype | None) -> None:
        pretrained.tie_weights()
        self.model, self.dtypes = pretrained, dtypes

    @torch.no_grad()
    def logprob(self) -> float:
        dtype, ids = self.dtypes.get("mixed_precision_dtype"), torch.arange(20)[None]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            logits = self.model(ids).logits
        logprobs = torch.nn.functional.log_softmax(logits, -1, dtype=self.dtypes.get("softmax_dtype"))
        return logprobs[0, :-1].gather(1, ids[0, 1:, None]).sum().item()


def test_tasks_are_computed_under_the_plan(
    base: Path, tmp_path: Path, evaluate: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an fp32 adapter with added tokens on a bf16 base."""

    def simple_evaluate(model: HarnessModel, **_: Any) -> dict[str, Any]:
        return {"results": {"sum": {"logprob,none": model.logprob()}}, "higher_is_better": {}}

    manager = SimpleNamespace(match_tasks=list, load=list)
    modules: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HarnessModel},
        "lm_eval.tasks": {"TaskManager": lambda **_: manager},
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))
    model = {"name_or_path": str(base), "tokenizer": "builtin:qwen2-tiny", "tokens": {"add": ["<a>"]}}
    run = finished_run(tmp_path / "run", base, precision="bf16", model=model)
    _, tuned = evaluate(run, "--tasks", "sum")["models"]
    (target,) = open_targets([str(run)], [], tmp_path, base=None)
    causal = measure.load_weights(target.run, base=False).get_base_model()
    monkeypatch.setattr(causal, "tie_weights", lambda: None)
    by_hand = HarnessModel(causal, None, 1, mixed_precision_dtype=torch.bfloat16, softmax_dtype=torch.float32)
    assert (tuned["compute"], tuned["metrics"]["sum/logprob"]["value"]) == ("bf16", by_hand.logprob())


def test_a_task_of_the_harness(trained: Path, tmp_path: Path, evaluate: Evaluate) -> None:
    """Beside the harness's own class on the merged folder."""
    lm_eval = pytest.importorskip("lm_eval")
    hflm = pytest.importorskip("lm_eval.models.huggingface").HFLM
    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    merged, tasks = tmp_path / "merged", tmp_path / "tasks"
    assert cli.run_verb("export", [str(trained), "--output", str(merged)]) == 0
    tasks.mkdir()
    rows = [{"q": f"Add {n} and 1.", "choices": [f"It is {n}", f"It is {n + 1}"], "gold": 1} for n in range(12)]
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {tasks / 'rows.jsonl'}}}}}\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    rest = ["--tasks", "sums", "--include-path", tasks, "precision=fp32"]
    plain = evaluate(merged, *rest)["models"][0]["metrics"]["sums/acc"]
    theirs = hflm(pretrained=str(merged), dtype="float32", device="cpu")
    found = lm_eval.simple_evaluate(model=theirs, tasks=["sums"], task_manager=manager(include_path=str(tasks)))
    known = found["results"]["sums"]
    assert (plain["value"], plain["error"]) == (known["acc,none"], known["acc_stderr,none"])
    untrained, tuned = evaluate(trained, *rest)["models"]
    assert tuned["metrics"]["sums/acc"]["value"] == plain["value"]
    assert untrained["base"]
    with pytest.raises(ConfigError) as unknown:
        Harness(["sums_2"], tasks)
    assert unknown.value.code == "evaluate.unknown_task"
    (tasks / "rows.jsonl").unlink()
    with pytest.raises(DataError) as gone:
        Harness(["sums"], tasks)
    assert gone.value.code == "evaluate.task_data"
