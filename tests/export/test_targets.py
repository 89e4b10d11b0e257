"""Targets besides a plain folder: quantised folders, adapters for vLLM, and the model card of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from patience import LIMIT
from tiny_model import checkpoint, finished_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.cli import main
from halftune.core.errors import ConfigError, ModelError
from halftune.core.manifest import MANIFEST, damage
from halftune.core.packaged import read_yaml
from halftune.export import quantised
from halftune.export.card import write_card
from halftune.export.options import Options, Quantised
from halftune.export.output import reserved
from halftune.export.targets import TARGETS, export_target
from halftune.export.vllm import obstacles
from halftune.model.result.completed_run import open_run

IDS = torch.arange(40).reshape(2, 20)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 4096}
    return checkpoint(tmp_path_factory.mktemp("base") / "model", torch.bfloat16, "llama-tiny", **sizes)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    folder = finished_run(tmp_path_factory.mktemp("runs") / "lora", base)
    lines = [{"step": 1, "loss": 2.0, "tokens_trained": 1500}, {"step": 2, "loss": 1.25, "eval_loss": 1.5}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 3, "lo')
    return folder


def test_each_name_of_a_format_has_a_target() -> None:
    assert {*get_args(Quantised), "gguf", "adapter"} == TARGETS.keys()
    assert {*get_args(Quantised)} == quantised.FORMATS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_the_command_quantises_and_verify_loads_the_result(tmp_path: Path, run_folder: Path, kind: str) -> None:
    """In a process of its own: where the packages were hidden while transformers was imported, it knows none."""
    for words in (
        ["export", str(run_folder), "--output", str(tmp_path / "out"), "--quantize", kind],
        ["verify", "--reference", str(run_folder / "final"), "--against", str(tmp_path / "out")],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "halftune", *words], capture_output=True, text=True, timeout=LIMIT
        )
        assert ended.returncode == 0, ended.stderr
        assert "Failed to load" not in ended.stderr


@pytest.mark.parametrize("kind", get_args(Quantised))
def test_a_quantised_folder_answers_in_plain_transformers(tmp_path: Path, run_folder: Path, kind: str) -> None:
    pytest.importorskip("bitsandbytes" if kind in ("nf4", "int8") else "torchao")
    run = open_run(str(run_folder))
    export_target(run, Options(tmp_path / "plain"))
    lines = export_target(run, Options(tmp_path / "out", kind))
    assert damage(tmp_path / "out", thorough=True, marker=MANIFEST, closed=True) == ""
    plain, small = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("plain", "out"))
    with torch.inference_mode():
        expected, actual = plain(IDS).logits.double(), small(IDS).logits.double()
    error = float((actual - expected).norm() / expected.norm())
    assert 1e-3 < error < {"nf4": 0.3, "int8": 0.05, "fp8": 0.1, "int8-wo": 0.05}[kind]
    assert small.config.quantization_config.quant_method in ("bitsandbytes", "torchao")
    assert any("error" in line for line in lines)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "out")]
    assert sizes[1] < sizes[0] - 200_000  # most of so small a model is its embedding
    answer = small.generate(IDS[:1], max_new_tokens=3, do_sample=False)
    assert answer.shape[1] > IDS.shape[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_an_adapter_is_copied_with_the_command_that_serves_it(tmp_path: Path, run_folder: Path, base: Path) -> None:
    out = tmp_path / "mine"
    lines = export_target(open_run(str(run_folder)), Options(out, "adapter"))
    assert f"vllm serve {base} --enable-lora --max-lora-rank 8 --lora-modules mine={out}" in lines[-1]
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (run_folder / "final" / name).read_bytes()
    assert damage(out, thorough=True, marker=MANIFEST, closed=True) == ""


LORA: dict[str, Any] = {"peft_type": "LORA", "r": 16, "bias": "none", "modules_to_save": None, "rank_pattern": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"rank_pattern": {"q_proj": 4}},
        {"trainable_token_indices": {"embed_tokens": [1]}},
        {"lora_bias": True},
        {"bias": "all"},
        {"r": 1024},
        {"peft_type": "VERA"},
    ],
)
def test_what_vllm_does_not_serve_is_refused(changes: dict[str, Any]) -> None:
    assert obstacles(LORA) == []
    assert len(obstacles(LORA | changes)) == 1


def test_every_fact_about_vllm_has_a_source_and_a_date() -> None:
    for row in read_yaml("halftune.export", "vllm.yaml")["facts"]:
        assert row["what"] in ("refused", "ignored")
        assert row["source"]
        assert str(row["read"]).startswith("2026")


@pytest.mark.parametrize("changes", [{"use_dora": True}, None])
def test_an_adapter_that_vllm_would_not_serve_is_not_written(tmp_path: Path, base: Path, changes: Any) -> None:
    asked = "none" if changes is None else {"type": "lora", "rank": 4, **changes}
    run = open_run(str(finished_run(tmp_path / "run", base, adapter=asked)))
    with pytest.raises(ModelError) as caught:
        export_target(run, Options(tmp_path / "out", "adapter"))
    assert caught.value.code == "export.adapter_unsupported"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["folder", "adapter"])
def test_the_card_has_the_runs_facts_and_no_path(tmp_path: Path, run_folder: Path, target: str, base: Path) -> None:
    export_target(open_run(str(run_folder)), Options(tmp_path / "mine", target))
    text = (tmp_path / "mine" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["library_name"] == {"folder": "transformers", "adapter": "peft"}[target]
    assert facts["tags"] == ["halftune", "sft", "lora"]
    assert "base_model" not in facts
    rows = dict(line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| "))
    assert (rows["steps"], rows["trained tokens"], rows["last training loss"]) == ("2", "1,500", "1.2500")
    assert rows["last evaluation loss"] == "1.5000"
    assert rows["adapter"].startswith("lora, rank 4")
    assert str(base) not in text
    assert str(run_folder) not in text


@pytest.mark.parametrize(("best", "step", "expected"), [(False, 1, 1), (True, None, 2), (True, 3, 3), (False, None, 3)])
def test_the_card_states_the_step_of_its_weights(
    tmp_path: Path, run_folder: Path, best: bool, step: int | None, expected: int
) -> None:
    run = open_run(str(run_folder))
    training = run.loaded.run.training.model_copy(update={"load_best": best})
    loaded = replace(run.loaded, run=run.loaded.run.model_copy(update={"training": training}))
    losses = {1: (2.0, 1.75), 2: (1.25, 1.5), 3: (1.0, 1.625)}
    lines = [{"step": at, "loss": one, "eval_loss": two, "tokens_trained": 10} for at, (one, two) in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_card(replace(run, loaded=loaded, folder=tmp_path, step=step), tmp_path, Options(tmp_path), "bf16")
    body = (tmp_path / "README.md").read_text().split("---\n", 2)[2]
    rows = dict(line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| "))
    assert (rows["steps"], rows["trained tokens"]) == (str(expected), str(10 * expected))
    shown = float(rows["last training loss"]), float(rows["last evaluation loss"])
    assert shown == losses[expected]


@pytest.mark.parametrize(
    "options", [["--quantize", "nf4", "--dtype", "bf16"], ["--format", "adapter", "--quantize", "nf4"]]
)
def test_options_that_exclude_each_other(tmp_path: Path, run_folder: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run_folder), "--output", str(tmp_path / "out"), *options])
    assert left.value.code == 2
    assert not (tmp_path / "out").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from halftune.cli import main
from halftune.export import targets
from halftune.export.options import Options
from halftune.model.result.completed_run import open_run

run, output, points = open_run(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]

def export(target, replaced=None, number=signal.SIGKILL):
    if replaced is not None:
        module, name = replaced.rsplit(".", 1)
        def deadly(*_, **__):
            os.kill(os.getpid(), number)
        setattr(__import__(module, fromlist=[name]), name, deadly)
    targets.export_target(run, Options(output, target), force=True)

for point in points:
    target, number, replaced = point.split(":")
    child = os.fork()
    if child == 0:
        try:
            export(target, replaced, signal.Signals[number])
        except SystemExit as left:
            os._exit(left.code)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = sorted(path.name for path in output.parent.iterdir())
    print(point, ended, *left)
    if ended == -signal.SIGKILL:
        export(target)
        print("again", 0, *sorted(path.name for path in output.parent.iterdir()))
"""
POINTS = {
    "gguf": ("export.merged.write_model", "export.gguf.target.write_gguf", "export.gguf.target.compare"),
    "adapter": ("export.targets.write_card", "export.targets.seal"),
    "int8-wo": ("export.quantised.save_tokenizer",),
}


@pytest.mark.slow
def test_what_a_killed_export_leaves_is_removed_by_the_next(tmp_path: Path, run_folder: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("torchao")
    points = [
        f"{target}:{number}:halftune.{name}"
        for target, names in POINTS.items()
        for name in names
        for number in ("SIGTERM", "SIGHUP", "SIGKILL")
    ]
    place = tmp_path / "place"
    command = [sys.executable, "-c", KILLED, str(run_folder), str(place / "out"), *points]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith(("again", *POINTS))]
    assert len(lines) == len(points) + len(points) // 3
    for point, code, *left in lines:
        if "SIGKILL" in point:
            assert code == "-9"
            assert any(name.startswith(".out.") for name in left)
        else:  # before the first whole export there is no folder
            assert int(code) == (0 if point == "again" else 143 if "SIGTERM" in point else 129), point
            assert left in ([], ["out"]), point


def test_an_export_waits_for_no_other_one(tmp_path: Path, run_folder: Path) -> None:
    run, out = open_run(str(run_folder)), tmp_path / "out"
    for target in ("folder", "adapter"):
        with reserved(out) as scratch:
            (scratch / "in use").write_text("")
            with pytest.raises(ModelError) as caught:
                export_target(run, Options(out, target))
            assert caught.value.code == "export.output_unusable"
            assert (scratch / "in use").exists()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "key", ["model.chat_template=chatml", "model.tokenizer=builtin:llama-tiny", "adapter.alpha=64"]
)
def test_a_key_that_a_result_has_settled_is_refused(run_folder: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_run(str(run_folder), [key])
    assert (caught.value.code, caught.value.where) == ("cli.option_conflict", key.partition("=")[0])


@pytest.mark.parametrize(
    "key", ["model.chat_template_kwargs={enable_thinking: false}", "training.allow_changes=[model]"]
)
def test_a_key_that_a_result_is_used_with_is_taken(run_folder: Path, key: str) -> None:
    assert open_run(str(run_folder), [key]).is_adapter


ODD_FILES: list[tuple[str, str]] = [
    ("metrics.jsonl", '{"loss": 1.0}'),
    ("metrics.jsonl", '{"step": 2, "loss": "x"}'),
    ("metrics.jsonl", '{"step": 2, "loss": 1.0, "tokens_trained": "5"}'),
    ("metrics.jsonl", '{"step": "a", "loss": 1.0}'),
    ("metrics.jsonl", '{"step": 2.5, "loss": [1]}'),
    ("metrics.jsonl", '{"step": -4, "loss": 1.0, "tokens_trained": 5}'),
    ("metrics.jsonl", '{"step": 4, "loss": NaN}'),
    *(("metrics.jsonl", one) for one in ("[1]", "5", "[" * 100_000, "\0" * 5000, "")),
    *(
        ("environment.json", one)
        for one in (
            '{"hardware": {"devices": [1]}}',
            '{"hardware": {"devices": {"a": 1}}}',
            '{"hardware": {"devices": [{"name": "A | B"}]}}',
            '{"hardware": "x"}',
            '{"packages": [1]}',
            '{"halftune": {"a": 1}}',
        )
    ),
    *(("data_report.json", one) for one in ('{"train": "x"}', '{"train": [{"name": 5}]}')),
    *(("plan.json", one) for one in ('{"precision": 5}', '{"precision": {"storage": 5}}', "{}")),
    *(
        (name, one)
        for name in ("environment.json", "data_report.json", "plan.json")
        for one in ("[1]", "5", "{", "[" * 100_000)
    ),
]
SIDE_FILES = {
    "metrics.jsonl": {"steps", "trained tokens", "last training loss", "last evaluation loss"},
    "environment.json": {"versions", "hardware"},
    "data_report.json": {"training data"},
    "plan.json": {"storage dtype", "compute dtype"},
}
USUAL = {
    "metrics.jsonl": '{"step": 2, "loss": 1.0, "eval_loss": 2.0, "tokens_trained": 5}',
    "environment.json": '{"halftune": "1", "packages": {"torch": "2"}, "hardware": {"devices": [{"name": "A"}]}}',
    "data_report.json": '{"train": [{"name": "x", "samples": 1, "tokens": 2, "trained_tokens": 1}]}',
    "plan.json": '{"precision": {"storage": {"value": "bf16"}, "compute": {"value": "fp32"}}}',
}


def card_rows(folder: Path) -> dict[str, str]:
    body = (folder / "README.md").read_text().split("---\n", 2)[2]
    return dict(line.strip("| ").split(" | ", 1) for line in body.splitlines() if line.startswith("| "))


def test_an_odd_side_file_leaves_its_facts_out_of_the_card(
    tmp_path: Path, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what is no file at all: a pipe, a device, a link out of the folder, a very large file."""
    place, out = tmp_path / "run", tmp_path / "out"
    out.mkdir()
    run = replace(open_run(str(run_folder)), folder=place)

    def written() -> dict[str, str]:
        (out / "README.md").unlink(missing_ok=True)
        caplog.clear()
        write_card(run, out, Options(out), "bf16")
        return card_rows(out)

    def fresh(odd: str) -> Path:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, text in USUAL.items():
            (place / name).write_text(text)
        (place / odd).unlink()
        return place / odd

    fresh("plan.json").write_text(USUAL["plan.json"])
    usual = written()
    assert set().union(*SIDE_FILES.values()) <= usual.keys()
    assert not caplog.records

    def left_out(odd: str) -> None:
        assert written() == {key: value for key, value in usual.items() if key not in SIDE_FILES[odd]}
        assert odd in caplog.text

    for odd, text in ODD_FILES:
        fresh(odd).write_text(text)
        left_out(odd)
    (tmp_path / "elsewhere").write_text("{}")
    for odd in SIDE_FILES:
        os.mkfifo(fresh(odd))
        left_out(odd)
        for target in ("/dev/zero", tmp_path / "elsewhere"):
            fresh(odd).symlink_to(target)
            left_out(odd)
        with fresh(odd).open("wb") as file:
            file.truncate(3 << 30)
        left_out(odd)


@pytest.mark.parametrize("card", ["---\na: [\n---\n", "---\n- a\n---\n", "---\nmodel-index: 5\n---\n", "\udcff"])
def test_an_odd_card_of_the_base_model_is_left_out(tmp_path: Path, base: Path, card: str) -> None:
    own = shutil.copytree(base, tmp_path / "base")
    run = open_run(str(finished_run(tmp_path / "run", own)))
    (own / "README.md").write_text(card, errors="surrogateescape")
    (tmp_path / "out").mkdir()
    write_card(run, tmp_path / "out", Options(tmp_path / "out"), "bf16")
    assert card_rows(tmp_path / "out")["saved dtype"] == "bf16"


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ([], "bf16"),
        (["--dtype", "fp32"], "fp32"),
        (["--format", "adapter"], "fp32"),
        (["--format", "gguf", "--gguf-type", "q8_0"], "q8_0"),
    ],
)
def test_the_card_states_the_format_of_what_was_exported(
    tmp_path: Path, run_folder: Path, options: list[str], stored: str
) -> None:
    if "gguf" in options:
        pytest.importorskip("gguf")
    with pytest.raises(SystemExit) as left:
        main(["export", str(run_folder), "--output", str(tmp_path / "out"), *options])
    assert left.value.code == 0
    assert card_rows(tmp_path / "out")["saved dtype"] == stored
