"""The report: complete, self-contained, escaped, and without holes where something is missing."""

from __future__ import annotations

import json
import math
import random
import re
import time
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from halftune.core.quantities import clock, count, duration, rate, short_count, significant, size
from halftune.train.callbacks.loss_plot import draw
from halftune.train.report.page import Status, write_report
from halftune.train.report.series import POINTS, Curves, Series, script_source, smoothed

HOSTILE = '<script>alert("1")</script><img src=x onerror=1> & \'"'


def choice(value: Any, reason: str) -> dict[str, Any]:
    return {"value": value, "reason": reason}


def a_plan() -> dict[str, Any]:
    return {
        "device": choice("cpu", "no accelerator was found"),
        "precision": {
            "storage": choice("fp32", "frozen weights are kept in the compute dtype"),
            "trainable": choice("fp32", "adapter weights are master weights"),
            "compute": choice("fp32", "AVX512-BF16 without AMX: bf16 measures 1.9 times slower than fp32 here"),
            "autocast": choice(False, "weights are in the compute dtype already"),
            "grad_scaler": choice(False, "only fp16 gradients underflow"),
            "reduce": choice("fp32", "one process"),
            "optimizer_state": choice("fp32", "follows the trained weights"),
            "saved": choice("fp32", "the dtype of the trained weights"),
            "keep_fp32": choice([], "no such weights in qwen2"),
            "tf32": choice(False, "no TF32 on a CPU"),
            "warnings": [],
        },
        "attention": {
            "softmax": choice("sdpa", "torch's own, on every device"),
            "provider": choice("torch", "scaled_dot_product_attention"),
            "varlen": choice("segments", "SDPA per sample: no kernel for packed rows on a CPU"),
            "linear": choice("none", "softmax layers only"),
            "rejected": [
                ["fa2", "needs a CUDA device of capability 8.0 or more"],
                ["fa3", "needs a Hopper GPU"],
                ["fa4", "needs a Hopper or Blackwell GPU"],
                ["flex", "has no backward on a CPU"],
                ["eager", "slower than sdpa and no more exact"],
            ],
            "guard": "cast",
        },
        "batch": {
            "micro_batch": 4,
            "accumulation": 4,
            "world_size": 1,
            "tokens_per_step": 16384,
            "packing": choice(True, "qwen2 keeps packed samples apart by position_ids and cu_seq_lens"),
            "gradient_checkpointing": choice(False, "activations fit"),
        },
        "memory": {
            "weights": 94_600_000,
            "gradients": 8_900_000,
            "optimizer": 17_800_000,
            "activations": 1_120_000_000,
            "logits": 201_000_000,
            "overhead": 390_000_000,
            "available": 16_400_000_000,
            "checkpoint_disk": 27_100_000,
            "verdict": choice("fits", "1.83 GB of 16.4 GB"),
        },
        "distribution": choice("single", "one process"),
        "num_parameters": choice(23_646_336, "counted from the sizes in config.json"),
        "num_trainable": choice(2_228_224, "rank 16 on 56 linear layers"),
        "warnings": ["The validation share is small: 24 samples."],
    }


def a_source(name: str, lengths: list[list[int]]) -> dict[str, Any]:
    return {
        "name": name,
        "format": "alpaca",
        "columns": {"instruction": "instruction", "output": "output"},
        "absent": [],
        "unused": ["id"],
        "gaps": {"input": 611},
        "rows": 1000,
        "taken": 1000,
        "kept": 997,
        "samples": 997,
        "dropped": {"no answer to train on": {"count": 3, "rows": ["17", "203", "871"]}},
        "truncated": {"the answer was cut": {"count": 12, "rows": [str(n) for n in range(40, 52)]}},
        "notes": {"a control token was neutralised": {"count": 1, "rows": ["5"]}},
        "tokens": 163_224,
        "trained_tokens": 112_870,
        "lengths": lengths,
    }


def metrics_lines(steps: int = 240, every: int = 40) -> list[dict[str, Any]]:
    noise, lines, start = random.Random(3), [], time.time()
    for step in range(1, steps + 1):
        warm = min(1.0, step / 8) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = 1.9 + 2.6 * math.exp(-step / 45) + noise.gauss(0, 0.12)
        lines.append(
            {
                "step": step,
                "epoch": step / 80,
                "loss": loss,
                "learning_rate": 2e-4 * warm,
                "grad_norm": 0.5 + 2.2 * math.exp(-step / 20) + abs(noise.gauss(0, 0.2)),
                "tokens": 16384,
                "tokens_real": 16100 - noise.randint(0, 400),
                "tokens_trained": 11000 + noise.randint(-500, 500),
                "seconds": 5.1 + noise.random() * 0.5,
                "memory_bytes": 1_700_000_000 + step * 100_000,
                "time": start + step * 5.4,
            }
        )
        if step % every == 0:
            loss = 2.05 + 2.4 * math.exp(-step / 45)
            lines.append({"step": step, "epoch": step / 80, "eval_loss": loss, "eval_seconds": 3.2, "time": start})
    return lines


RESOLVED = """\
model:
  name_or_path: builtin:qwen2-small  # recipe.yaml:3
adapter:
  type: lora  # recipe.yaml:8
  rank: 16  # default
method:
  type: sft  # default
training:
  output_dir: runs/alpaca-lora  # recipe.yaml:20
  learning_rate: 0.0002  # command line
logging:
  run_name: null  # default
"""


def fabricate(
    folder: Path,
    *,
    leave_out: tuple[str, ...] = (),
    evaluate: bool = True,
    metrics: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> Path:
    """A run folder as a real run leaves it. ``changes``: file name without ending → its content instead."""
    folder.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "plan": a_plan(),
        "environment": {
            "halftune": "0.1.0",
            "python": "3.11.2",
            "platform": "Linux-6.1-x86_64",
            "command": ["train", "--config", "recipe.yaml", "training.learning_rate=2e-4"],
            "packages": {"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2"},
            "hardware": {
                "name": "this machine",
                "devices": [
                    {"kind": "cpu", "name": "Intel Xeon @ 2.60GHz", "memory_bytes": 16_400_000_000, "features": []}
                ],
                "host_memory_bytes": 16_400_000_000,
                "cpu_cores": 2,
                "packages": [],
                "notes": [],
            },
            "git": {"commit": "8ed48b7c0a1d", "changed": True},
            "data": {"alpaca_en_demo.json": "5f1c" * 16},
        },
        "data_report": {
            "train": [a_source("alpaca_en_demo.json", [[50 * i, 400 // i] for i in range(1, 12)])],
            "eval": [],
            "train_samples": 973,
            "eval_samples": 24,
            "max_length": 1024,
            "efficiency": {"batch": 4, "padded": 0.57, "packed": 0.985, "packed_rows": 166},
        },
        "dtypes": {
            "rows": [
                row("model.embed_tokens.weight", "frozen", 1, 1_572_864),
                row("model.layers.*.self_attn.q_proj.base_layer.weight", "frozen", 8, 1_179_648),
                row("model.layers.*.self_attn.q_proj.lora_A.default.weight", "trained", 8, 49_152),
                row("model.rotary_emb.inv_freq", "rotary", 1, 32),
            ]
        },
        "guard": {"mode": "cast", "compute": "fp32", "casts": 0, "sites": []},
        "samples": {
            "samples": [
                {
                    "prompt": "Name three primary colours.",
                    "before": "of the self. def _",
                    "after": "Red, yellow and blue.",
                },
                {
                    "prompt": "Write a haiku\nabout autumn.",
                    "before": "",
                    "after": "Leaves let go at last\nthe wind signs",
                },
            ]
        },
    }
    for name, value in (content | changes).items():
        if name not in leave_out:
            (folder / f"{name}.json").write_text(json.dumps(value))
    if "metrics" not in leave_out:
        lines = metrics or metrics_lines()
        lines = lines if evaluate else [line for line in lines if "loss" in line]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if "resolved" not in leave_out:
        (folder / "resolved.yaml").write_text(RESOLVED)
    return folder


def row(name: str, role: str, tensors: int, elements: int, dtype: str = "float32") -> dict[str, Any]:
    planned = "float32"
    shown = {"name": name, "role": role, "dtype": dtype, "planned": planned, "tensors": tensors, "elements": elements}
    return {**shown, "as_planned": dtype == planned}


class _Page(HTMLParser):
    """What a browser would load, run and show."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.text += data


def parse(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert not page.open, f"not closed: {page.open}"
    return page


def charts(page: _Page) -> list[dict[str, Any]]:
    """What the page's script draws."""
    return json.loads(json.loads(page.scripts[0])["value"])["charts"]


def test_whole_run_has_every_section(tmp_path: Path) -> None:
    page = parse(write_report(fabricate(tmp_path / "run"), Status("finished")))
    assert [value for tag, name, value in page.attributes if tag == "section" and name == "id"] == [
        "curves",
        "samples",
        "data",
        "plan",
        "dtypes",
        "environment",
    ]
    for words in (
        "Supervised fine-tuning of builtin:qwen2-small with a LoRA adapter of rank 16, computed in fp32",
        "final loss",
        "best eval loss2.062at step 240",
        "3,932,160",
        "needs a CUDA device of capability 8.0 or more",  # why not fa2
        "AVX512-BF16 without AMX",  # why fp32
        "measured 1.61 GiB",
        "no answer to train on",
        "rows 17, 203, 871",
        "All 18 tensors of the loaded model are as planned",
        "no casts",
        "Red, yellow and blue.",
        "torch 2.13.0",
        "output_dir: runs/alpaca-lora  # recipe.yaml:20",
    ):
        assert words in page.text, words
    assert "left out" not in page.text
    assert [chart["name"] for chart in charts(page)] == ["loss", "learning_rate", "grad_norm", "tokens_per_second"]


def test_page_asks_nobody_for_anything(tmp_path: Path) -> None:
    path = write_report(fabricate(tmp_path / "run"), Status("finished"))
    page, text = parse(path), path.read_text()
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert [
        value for _, name, value in page.attributes if name in ("src", "href") and not str(value).startswith("#")
    ] == []
    for script in page.scripts:
        text = text.replace(script, "")
        assert not re.search(r"fetch|XMLHttp|import\(|https?://(?!www\.w3\.org/2000/svg)", script)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """The same page with harmless and with hostile text has the same elements and attributes."""

    def page_of(name: str, text: str) -> _Page:
        plan, source = a_plan(), a_source(text, [[50, 3], [100, 4]])
        plan["precision"]["compute"]["reason"] = plan["warnings"][0] = text
        plan["attention"]["rejected"] = [[text, text]]
        source["dropped"] = {text: {"count": 1, "rows": [text]}}
        folder = fabricate(
            tmp_path / name,
            plan=plan,
            data_report={"train": [source], "efficiency": {}},
            samples={"samples": [{"prompt": text, "before": text, "after": text}]},
            dtypes={"rows": [row(text, text, 1, 1, "bfloat16")]},
            guard={
                "mode": text,
                "compute": text,
                "sites": [{"site": text, "casts": 1, "arrived": text, "cast_to": text}],
            },
            environment={"packages": {text: text}, "data": {text: text}, "git": {"commit": text}},
        )
        quoted = json.dumps(text)
        (folder / "resolved.yaml").write_text(f"model: {{name_or_path: {quoted}}}\nlogging: {{run_name: {quoted}}}\n")
        return parse(write_report(folder, Status("stopped", text)))

    harmless, hostile = page_of("a", "harmless"), page_of("b", HOSTILE)
    assert hostile.tags == harmless.tags
    assert [(tag, name) for tag, name, _ in hostile.attributes] == [(tag, name) for tag, name, _ in harmless.attributes]
    seen, expected = (page.text.split("The whole configuration")[0] for page in (hostile, harmless))
    assert seen.count(HOSTILE) == expected.count("harmless") > 20


@pytest.mark.parametrize(
    ("left_out", "gone"),
    [
        ("samples", "samples"),
        ("data_report", "data"),
        ("plan", "plan"),
        ("metrics", "curves"),
    ],
)
def test_missing_file_leaves_no_hole(tmp_path: Path, left_out: str, gone: str) -> None:
    page = parse(write_report(fabricate(tmp_path / "run", leave_out=(left_out,)), Status("finished")))
    anchors = [value for tag, name, value in page.attributes if tag == "section" and name == "id"]
    assert gone not in anchors
    assert len(anchors) == 5
    assert ("a", "href", f"#{gone}") not in page.attributes


def test_run_without_evaluation_has_no_word_of_it(tmp_path: Path) -> None:
    data = {"train": [a_source("a.json", [[50, 3]])], "eval": [], "train_samples": 997, "eval_samples": 0}
    folder = fabricate(tmp_path / "run", evaluate=False, data_report=data, plan={})
    page = parse(write_report(folder, Status("finished")))
    assert "final loss" in page.text
    assert "eval" not in page.text.split("The whole configuration")[0]


def test_folder_of_a_run_that_failed_at_once(tmp_path: Path) -> None:
    names = ("plan", "environment", "data_report", "dtypes", "guard", "samples", "metrics", "resolved")
    page = parse(write_report(fabricate(tmp_path / "run", leave_out=names), Status("stopped", "the disk is full")))
    assert "the disk is full" in page.text
    assert "section" not in page.tags
    assert "nav" not in page.tags


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "run", data_report={"train": ["not a source"]})
    (folder / "plan.json").write_text('{"precision": ')
    page = parse(write_report(folder, Status("finished")))
    assert "cannot be read: plan.json" in page.text
    assert "not of the form expected" in page.text  # the data
    assert "Red, yellow and blue." in page.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", b'{"step": 1, "loss": 2.0, "tokens": "many"}\n'),
        ("metrics.jsonl", b'{"step": Infinity, "loss": 2.0}\n'),
        ("resolved.yaml", b"model: !!bool x"),  # KeyError in PyYAML
        ("guard.json", b'{"mode": "\\ud800"}'),  # half a surrogate pair
    ],
)
def test_values_of_another_kind_are_left_out(tmp_path: Path, file: str, content: bytes) -> None:
    folder = fabricate(tmp_path / "run")
    (folder / file).write_bytes(content)
    assert "Red, yellow and blue." in parse(write_report(folder, Status("finished"))).text


def test_metrics_cut_off_in_the_middle_of_a_line(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 241, "lo')
    assert "steps240" in parse(write_report(folder)).text


def test_wrong_dtype_and_casts_are_shown_as_such(tmp_path: Path) -> None:
    site = {"site": "model.layers.3.self_attn", "casts": 2400, "arrived": "query fp32, key bf16", "cast_to": "bf16"}
    folder = fabricate(
        tmp_path / "run",
        dtypes={"rows": [row("lm_head.weight", "frozen", 1, 5, "bfloat16")]},
        guard={"mode": "cast", "compute": "bf16", "casts": 2400, "sites": [site]},
    )
    text = parse(write_report(folder, Status("finished"))).text
    assert "Not as planned: lm_head.weight." in text
    assert "model.layers.3.self_attn2,400query fp32, key bf16bf16" in text


def test_many_kinds_of_tensors_are_summed_up_first(tmp_path: Path) -> None:
    rows = [row(f"layer.{i}.weight", "frozen", 2, 3) for i in range(11)] + [row("odd", "trained", 1, 4, "float16")]
    text = parse(write_report(fabricate(tmp_path / "run", dtypes={"rows": rows}), Status("finished"))).text
    assert "frozenfloat32float322233" in text
    assert "trainedfloat16float3214" in text
    assert "All 12 kinds of tensors, by name" in text


def test_status_comes_from_the_folder_when_nobody_says_it(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "run")
    assert "<b>unfinished</b>" in write_report(folder).read_text()
    (folder / "finished.json").write_text("{}")
    assert "<b>finished</b>" in write_report(folder).read_text()


def test_curves_hold_every_line_and_every_spike(tmp_path: Path) -> None:
    lines = metrics_lines(4000, every=500)
    lines[1234]["loss"] = 77.0
    for line in lines:
        line |= {"rewards/<b>": 0.5} if "loss" in line else {"eval_rewards/<b>": 0.25}
    page = parse(write_report(fabricate(tmp_path / "run", metrics=lines)))
    drawn = {chart["name"]: {line["run"]: line for line in chart["lines"]} for chart in charts(page)}
    assert {name: list(of) for name, of in drawn.items()} == {
        "loss": ["training", "evaluation"],
        "learning_rate": ["training"],
        "grad_norm": ["training"],
        "tokens_per_second": ["training", "not padding", "trained"],
        "rewards/<b>": ["training", "evaluation"],
    }
    training = drawn["loss"]["training"]
    assert max(value for _, value in training["points"]) == 77.0
    assert 0 < len(training["smooth"]) <= POINTS >= len(training["points"])
    assert [step for step, _ in drawn["loss"]["evaluation"]["points"]] == [*range(500, 4001, 500)]


def test_every_report_has_the_script_that_the_web_ui_lets_run(tmp_path: Path) -> None:
    scripts = [parse(write_report(fabricate(tmp_path / name))).scripts[1] for name in ("a", "b")]
    wanted = {f"'sha256-{b64encode(sha256(one.encode()).digest()).decode()}'" for one in scripts}
    assert wanted == {script_source()}


def series(values: list[float]) -> Series:
    found = Series()
    for step, value in enumerate(values, 1):
        found.add(step, value)
    return found


def test_smoothing_has_no_lag_and_no_bias() -> None:
    line = [5 - 0.01 * step for step in range(1, 501)]
    assert [value for _, value in smoothed(series(line))] == pytest.approx(line, abs=1e-5)  # a straight line stays
    noise = random.Random(1)
    rough = smoothed(series([value + noise.gauss(0, 0.3) for value in line]))
    off = [abs(one[1] - value) for one, value in zip(rough, line, strict=True) if one[1] is not None]
    assert sum(off) / len(off) < 0.08
    long = smoothed(series([float(step) for step in range(1, 50_001)]))
    assert len(long) <= POINTS
    assert [value for _, value in long] == pytest.approx([step for step, _ in long], abs=0.6)


def test_quantities() -> None:
    assert [significant(x) for x in (1.2, 0.012345, 12.3456, 1234.56, 0, 1.5e-7, 123456, 9.99996)] == [
        "1.200",
        "0.01235",
        "12.35",
        "1,235",
        "0",
        "1.500e-7",
        "123,456",
        "10.00",
    ]
    assert significant(None) == "non-finite"
    assert significant(math.inf) == "inf"
    assert [rate(x) for x in (2e-4, 1.234e-10, 0)] == ["2.00e-4", "1.23e-10", "0"]
    assert count(1234567.8) == "1,234,568"
    assert [short_count(x) for x in (999, 23_646_336, 7_615_616_512)] == ["999", "23.6 M", "7.62 B"]
    assert [size(x) for x in (0, 512, 1.5 * 2**30, 2**20 - 1)] == ["0 B", "512 B", "1.50 GiB", "1.00 MiB"]
    assert [duration(x) for x in (0.34, 8.2, 59.97, 200, 3599.7, 7500, 86_400, 273_600)] == [
        "340 ms",
        "8.2 s",
        "1 min",
        "3 min 20 s",
        "1 h",
        "2 h 5 min",
        "1 d",
        "3 d 4 h",
    ]
    assert [clock(x) for x in (42, 200, 7500)] == ["0:42", "3:20", "2:05:00"]


def test_loss_plot_is_drawn_for_any_name(tmp_path: Path) -> None:
    curves = Curves()
    for line in metrics_lines():
        curves.take(line)
    path = tmp_path / "loss.png"
    draw(path, r"a $\frac{name$ <&>", curves["loss"], {"evaluation": curves["eval_loss"]})
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")
    draw(path, "b", series([1.5, math.nan]), {"evaluation": Series(), "evaluation code": series([2.0, 1.0])})
    assert path.read_bytes() != first
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss.png"]
