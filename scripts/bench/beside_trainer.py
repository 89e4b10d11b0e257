"""halftune beside transformers' Trainer with peft, on the same packed rows: how the cost grows.

  python scripts/bench/beside_trainer.py                  3 M parameters, CPU: every length and vocabulary
  python scripts/bench/beside_trainer.py --lengths 512 --vocabularies 4096 --tokens 4096          a small part of it

LoRA on all linear layers, random weights, rows packed from documents of Python's library (short and very long ones).
Every case is a process of its own, so that its peak memory is its own. The Trainer is fed position ids and no attention
mask, and computes all logits. A case that would need more than ``--memory`` GiB is ended and noted. ``gpu_step.py`` has
the sizes of published models on a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import case, clock, fresh, head, row, tiny_model, write_lines

LENGTHS, VOCABULARIES = (512, 2048, 8192), (4_096, 32_000, 152_000)
SECONDS = 150.0  # after so long, what has been measured counts
LONGEST, CHARACTERS, QUESTION = 24_000, 700_000, 0.6  # of a document, of all; the question's share
OURS, PLAIN = "halftune", "Trainer + peft"


def documents() -> list[dict[str, str]]:
    """Documents of very different lengths: the first part is the question, the rest the answer."""
    from halftune.data.sources.builtin import builtin_rows

    rows, taken = [], 0
    for one in builtin_rows("stdlib-text").rows:
        text = one["text"][:LONGEST]
        cut = int(len(text) * QUESTION)
        rows.append({"prompt": text[:cut], "completion": text[cut:]})
        taken += len(text)
        if taken > CHARACTERS:
            break
    return rows


def recipe(folder: Path, rows: int, length: int, rank: int, **sections: Any) -> dict[str, Any]:
    """Of a run on ``folder/model``; writes the documents."""
    write_lines(folder / "documents.jsonl", documents())
    training = {"output_dir": str(folder / "run"), "max_steps": 1_000_000, "per_device_train_batch_size": rows}
    training |= {"gradient_checkpointing": False, "save_steps": "end", **sections.pop("training", {})}
    return {
        "model": {"name_or_path": str(folder / "model")},
        "adapter": {"type": "lora", "rank": rank, "alpha": 2 * rank},
        "data": {"train": str(folder / "documents.jsonl"), "max_length": length, "packing": True},
        "training": training,
        "logging": {"progress": False},
        **sections,
    }


def measured(framework: str, rows: int, length: int, vocabulary: int, gib: float) -> dict:
    """One case, in this process."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), Path(name, "recipe.yaml")
        tiny_model(folder / "model", vocab_size=vocabulary, max_position_embeddings=max(LENGTHS))
        file.write_text(json.dumps(recipe(folder, rows, length, 8, precision="fp32")))
        return (ours if framework == OURS else plain)(file, 4)


def ours(file: Path, steps: int) -> dict[str, Any]:
    """halftune, as ``halftune bench`` measures it, the median of its steps, and the memory that its plan expects."""
    from harness import planned

    from halftune.bench.measured import measure

    _, plan = planned(json.loads(file.read_text()), file)
    found = measure({"config": str(file), "overrides": [], "warm_up": 1, "steps": steps})
    rates = [one["real"] / one["seconds"] for one in found["steps"][1:]]
    return {
        "cpu": found["real_per_cpu_second"],
        "wall": found["real_per_second"],
        "median": statistics.median(rates),
        "peak": found.get("peak_device_bytes", found["peak_rss_bytes"]),
        "expected": plan.memory.total,
        "mfu": found["mfu"],
    }


def plain(file: Path, steps: int) -> dict[str, Any]:
    """transformers' Trainer on the same rows: SDPA, the weights in their own dtype, autocast where they are bf16."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    tree, cuda = json.loads(file.read_text()), torch.cuda.is_available()
    rows, size = packed_rows(file), tree["training"]["per_device_train_batch_size"]
    model = AutoModelForCausalLM.from_pretrained(tree["model"]["name_or_path"], dtype="auto")
    model.to("cuda" if cuda else "cpu").config.use_cache = False
    times: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            times.append((clock(), time.perf_counter()))
            control.should_training_stop = len(times) > 1 and times[-1][1] - times[0][1] > SECONDS

    adapter = {"r": tree["adapter"]["rank"], "lora_alpha": tree["adapter"]["alpha"], "task_type": "CAUSAL_LM"}
    arguments = TrainingArguments(
        output_dir=str(file.parent / "plain"),
        max_steps=1 + steps,
        per_device_train_batch_size=size,
        learning_rate=2e-4,
        use_cpu=not cuda,
        bf16=cuda,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
    )
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", **adapter))
    Trainer(model=adapted, args=arguments, train_dataset=rows, data_collator=pad, callbacks=[Clock()]).train()  # pyright: ignore[reportArgumentType]
    real = sum(len(one["input_ids"]) for one in rows) / len(rows) * size * (len(times) - 1)
    first, last = times[0], times[-1]
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    took = statistics.median(after[1] - before[1] for before, after in itertools.pairwise(times))
    made = {"cpu": real / (last[0] - first[0]), "wall": real / (last[1] - first[1]), "peak": peak}
    return made | {"median": real / (len(times) - 1) / took}


def packed_rows(file: Path) -> list[dict[str, list[int]]]:
    """Rows of token ids, labels and position ids, as halftune packs them."""
    from halftune.config.load import load_config
    from halftune.data.order.epoch import epoch_rows
    from halftune.data.pipeline import prepare
    from halftune.model.tokenizer.tokenizer import load_tokenizer

    run = load_config(file).run
    split = prepare(run, load_tokenizer(run.model)).train
    rows = []
    for spans in epoch_rows(split.lengths, epoch=0, seed=0, packing=True, capacity=run.data.max_length):
        made: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for span in spans:
            part = split.part(span).segments[0]
            made["input_ids"] += part.input_ids.tolist()
            made["labels"] += [-100, *part.labels.tolist()[1:]]
            made["position_ids"] += range(len(part.input_ids))
        rows.append(made)
    if max(one["position_ids"].count(0) for one in rows) == 1:
        for one in rows:  # one sample each: without positions the Trainer needs no mask
            del one["position_ids"]
    return rows


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """A batch: padded at the end, positions from zero there too."""
    import torch

    longest = max(len(one["input_ids"]) for one in rows)
    fill = {"input_ids": 0, "labels": -100, "position_ids": 0}
    return {key: torch.tensor([one[key] + [fill[key]] * (longest - len(one[key])) for one in rows]) for key in rows[0]}


def growth(asked: argparse.Namespace) -> None:
    """A row per vocabulary and length."""
    columns = ("max_length", f"tokens / CPU-s, {OURS}", PLAIN, "ratio", f"peak GiB, {OURS}", PLAIN)
    print(head("vocabulary", *columns))
    for vocabulary in asked.vocabularies:
        for length in asked.lengths:
            words = (max(1, asked.tokens // length), length, vocabulary, asked.memory)
            found = [fresh(name, *words) for name in (OURS, PLAIN)]
            for one in found:
                if "allocate" in one.get("note", ""):
                    one["note"] = f"ended at {asked.memory:.0f} GiB"
            print(growth_row(vocabulary, length, *found), flush=True)


def growth_row(vocabulary: int, length: int, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Speeds, or why there are none, their ratio, and memory."""
    both = "cpu" in mine and "cpu" in theirs
    speeds = [f"{one['cpu']:,.0f}" if "cpu" in one else one["note"] for one in (mine, theirs)]
    memory = [f"{one['peak'] / 2**30:.2f}" if "peak" in one else "–" for one in (mine, theirs)]
    ratio = f"{mine['cpu'] / theirs['cpu']:.2f}" if both else "–"
    return row(f"{vocabulary:,}", f"{length:,}", *speeds, ratio, *memory)


def main() -> int:
    """Measures, or is one case."""
    if (words := case()) is not None:
        rows, length, vocabulary = map(int, words[1:4])
        print(json.dumps(measured(words[0], rows, length, vocabulary, float(words[4]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--tokens", type=int, default=8192, help="fed a step: rows × max_length (default 8,192)")
    parser.add_argument("--memory", type=float, default=14.0, help="GiB that a case may take")
    growth(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
