"""How the cost grows with length and vocabulary: halftune beside transformers' Trainer with peft, both packed.

  python scripts/bench/growth.py                           every length and vocabulary: JSON lines, then a table
  python scripts/bench/growth.py --plot docs/images/growth.png
  python scripts/bench/growth.py --lengths 512 --vocabularies 4096 --tokens 4096          a small part of it

A 3 M-parameter Qwen2 (its vocabulary enlarged where asked), LoRA on all linear layers, fp32 on a CPU, rows packed from
documents of Python's library (short and very long ones), ``--tokens`` fed a step. Every case is a process of its own,
so that its peak memory is its own. The Trainer is fed position ids and no attention mask, and computes all logits.
A case that would need more than ``--memory`` GiB is ended and noted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

LENGTHS, VOCABULARIES = (512, 2048, 8192), (4_096, 32_000, 152_000)
WARM_UP, STEPS, SECONDS = 1, 4, 150.0  # after SECONDS of stepping, what has been measured counts
LONGEST, CHARACTERS, QUESTION = 24_000, 700_000, 0.6  # of a document, of all; the question's share
OURS, PLAIN = "halftune", "Trainer + peft"


def recipe(length: int, tokens: int, folder: Path) -> dict[str, Any]:
    """What halftune trains."""
    return {
        "model": {"name_or_path": str(folder / "model")},
        "precision": "fp32",
        "adapter": {"type": "lora", "rank": 8, "alpha": 16},
        "data": {"train": str(folder / "documents.jsonl"), "max_length": length, "packing": True},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 1_000_000,
            "per_device_train_batch_size": max(1, tokens // length),
            "gradient_checkpointing": False,
            "save_steps": "end",
        },
        "logging": {"progress": False},
    }


def write_documents(path: Path) -> None:
    """Documents of Python's library, of very different lengths: the first part is the question, the rest the answer."""
    from halftune.data.builtin.sets import builtin_rows

    taken = 0
    with path.open("w", encoding="utf-8") as file:
        for row in builtin_rows("stdlib-text").rows:
            text = row["text"][:LONGEST]
            cut = int(len(text) * QUESTION)
            file.write(json.dumps({"prompt": text[:cut], "completion": text[cut:]}) + "\n")
            taken += len(text)
            if taken > CHARACTERS:
                return


def write_model(vocabulary: int, folder: Path) -> None:
    """The builtin tiny Qwen2 with another number of embeddings; its tokenizer stays."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from halftune.config.builtin_models import BUILTIN_MODELS
    from halftune.model.builtin import materialize

    raw = {**BUILTIN_MODELS["qwen2-tiny"], "vocab_size": vocabulary, "max_position_embeddings": max(LENGTHS)}
    shutil.copytree(materialize("qwen2-tiny"), folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw), dtype=torch.float32).save_pretrained(folder)


def child(framework: str, length: int, vocabulary: int, tokens: int) -> None:
    """One case: trains some steps and prints a JSON object."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(vocabulary, folder / "model")
        write_documents(folder / "documents.jsonl")
        file = folder / "recipe.yaml"
        file.write_text(json.dumps(recipe(length, tokens, folder)))
        found = ours(file) if framework == OURS else plain(file)
    import torch

    from halftune.train.memory import peak_memory_bytes

    print(json.dumps({**found, "peak_bytes": peak_memory_bytes(torch.device("cpu"))}))


def ours(file: Path) -> dict[str, float]:
    """halftune, as ``halftune bench`` measures it."""
    from halftune.bench.measured import measure

    found = measure({"config": str(file), "overrides": [], "warm_up": WARM_UP, "steps": STEPS})
    steps = found["steps"][WARM_UP:]
    return {
        "tokens_per_cpu_second": found["real_per_cpu_second"],
        "tokens": sum(step["real"] for step in steps) / len(steps),
        "steps": len(steps),
    }


def plain(file: Path) -> dict[str, float]:
    """transformers' Trainer on the same rows, made by halftune's packing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    rows, folder, size = packed_rows(file)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.config.use_cache = False
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    clock: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.append((time.process_time(), time.perf_counter()))
            if time.perf_counter() - clock[0][1] > SECONDS and len(clock) > WARM_UP:
                control.should_training_stop = True

    trainer = Trainer(
        model=get_peft_model(model, lora),
        train_dataset=rows,  # pyright: ignore[reportArgumentType]
        data_collator=pad,
        callbacks=[Clock()],
        args=TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=WARM_UP + STEPS,
            per_device_train_batch_size=size,
            learning_rate=2e-4,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_drop_last=True,
        ),
    )
    trainer.train()
    steps = len(clock) - WARM_UP
    real = sum(len(row["input_ids"]) for row in rows) / len(rows) * size
    cpu = clock[-1][0] - clock[WARM_UP - 1][0]
    return {"tokens_per_cpu_second": real * steps / cpu, "tokens": real, "steps": steps}


def packed_rows(file: Path) -> tuple[list[dict[str, list[int]]], Path, int]:
    """Rows of token ids, labels and position ids, as halftune packs them; the folder; rows a step."""
    from halftune.config.load import load_config
    from halftune.data.order import epoch_rows
    from halftune.data.pipeline import prepare
    from halftune.model.tokenizer import load_tokenizer

    run = load_config(file).run
    split = prepare(run, load_tokenizer(run.model)).train
    made = epoch_rows(
        split.lengths, epoch=0, seed=0, packing=True, capacity=run.data.max_length, split=run.data.packing.split
    )
    rows = []
    for spans in made:
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for span in spans:
            part = split.part(span)
            row["input_ids"] += part.input_ids.tolist()
            row["labels"] += [-100, *part.labels.tolist()[1:]]
            row["position_ids"] += range(len(part.input_ids))
        rows.append(row)
    return rows, file.parent, json.loads(file.read_text())["training"]["per_device_train_batch_size"]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """A batch: padded at the end, positions from zero there too."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "position_ids": 0}
    return {
        key: torch.tensor([row[key] + [value] * (longest - len(row[key])) for row in rows])
        for key, value in fill.items()
    }


def measured(case: dict[str, Any], limit: float) -> dict[str, Any]:
    """Runs a case; it is ended when its memory passes ``limit`` bytes."""
    words = [str(case[key]) for key in ("framework", "length", "vocabulary", "tokens_asked")]
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    over = threading.Event()

    def watch() -> None:
        import psutil

        while process.poll() is None:
            try:
                if psutil.Process(process.pid).memory_info().rss > limit:
                    over.set()
                    process.kill()
            except psutil.NoSuchProcess:
                return
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    out, errors = process.communicate()
    if over.is_set():
        return {**case, "note": f"ended at {limit / 2**30:.0f} GiB"}
    if process.returncode:
        return {**case, "note": (errors.strip().splitlines() or ["failed"])[-1]}
    return {**case, **json.loads(out.strip().splitlines()[-1])}


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every case, the frameworks in turn."""
    for vocabulary in args.vocabularies:
        for length in args.lengths:
            for framework in (OURS, PLAIN):
                case = {"framework": framework, "length": length, "vocabulary": vocabulary}
                yield measured({**case, "tokens_asked": args.tokens}, args.memory * 2**30)


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table: a row per length and vocabulary."""
    lines = [
        f"| vocabulary | max_length | tokens / CPU-s, {OURS} | {PLAIN} | ratio | peak GiB, {OURS} | {PLAIN} |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for vocabulary, length in dict.fromkeys((r["vocabulary"], r["length"]) for r in results):
        pair = {r["framework"]: r for r in results if (r["vocabulary"], r["length"]) == (vocabulary, length)}
        speed = [pair.get(name, {}).get("tokens_per_cpu_second") for name in (OURS, PLAIN)]
        memory = [pair.get(name, {}).get("peak_bytes") for name in (OURS, PLAIN)]
        notes = [pair.get(name, {}).get("note", "–") for name in (OURS, PLAIN)]
        cells = [f"{vocabulary:,}", f"{length:,}"]
        cells += [f"{value:,.0f}" if value else note for value, note in zip(speed, notes, strict=True)]
        cells.append(f"{speed[0] / speed[1]:.2f}" if speed[0] and speed[1] else "–")
        cells += [f"{value / 2**30:.2f}" if value else "–" for value in memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Speed and memory over length, a line per vocabulary; the Trainer's are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = dict(
        zip(dict.fromkeys(r["vocabulary"] for r in results), ("#1f5f8b", "#b4512a", "#2f6b46"), strict=False)
    )
    sides = (("tokens_per_cpu_second", 1.0, "tokens per CPU-second"), ("peak_bytes", 2.0**30, "peak memory, GiB"))
    for axis, (key, unit, title) in zip(axes, sides, strict=True):
        for vocabulary, colour in colours.items():
            for framework, style in ((OURS, "-o"), (PLAIN, "--s")):
                chosen = [
                    r for r in results if r["vocabulary"] == vocabulary and r["framework"] == framework and key in r
                ]
                points = [(r["length"], r[key] / unit) for r in chosen]
                label = f"{framework}, vocabulary {vocabulary:,}"
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=colour, label=label, markersize=5)
        axis.set_yscale("log", base=2)
        axis.set(xscale="log", xlabel="max_length, tokens", title=title)
        lengths = sorted({r["length"] for r in results})
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measures, or is one case."""
    if sys.argv[1:2] == ["--child"]:
        framework, *numbers = sys.argv[2:]
        child(framework, *map(int, numbers))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--tokens", type=int, default=8192, help="fed a step: rows × max_length (default 8,192)")
    parser.add_argument("--memory", type=float, default=20.0, help="GiB that a case may take")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the results, too")
    parser.add_argument("--results", type=Path, metavar="JSONL", help="draw these results instead of measuring")
    args = parser.parse_args()
    results = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results else []
    for result in () if args.results else run(args):
        print(json.dumps(result), file=sys.stderr, flush=True)
        results.append(result)
    print(table(results))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
