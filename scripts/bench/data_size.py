"""Data preparation by number of rows: CPU-seconds and peak memory of each phase, beside batched ``datasets.map``.

    python scripts/bench/data_size.py 20000 [rows …] [--kinds chat,text] [--endings jsonl,parquet] [--rounds 1]

Each phase runs in a process of its own, with one worker and one thread. The sides take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

MODEL = "builtin:qwen2-tiny"
MAX_LENGTH = 512
WORDS = [
    "the",
    "model",
    "reads",
    "a",
    "short",
    "text",
    "and",
    "answers",
    "with",
    "one",
    "number",
    "or",
    "two",
    "words",
    "about",
    "red",
    "green",
    "large",
    "small",
]


def write_rows(path: Path, count: int, kind: str) -> None:
    """Writes short conversations (``chat``) or documents (``text``), as JSON Lines or Parquet."""
    made = _rows(count, kind)
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made)
        return
    import pyarrow
    import pyarrow.parquet

    writer = None
    while rows := [row for row, _ in zip(made, range(20_000), strict=False)]:
        table = pyarrow.Table.from_pylist(rows)
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _rows(count: int, kind: str) -> Iterator[dict[str, Any]]:
    source = random.Random(0)
    for number in range(count):
        question = f"{number}: {' '.join(source.choices(WORDS, k=source.randint(4, 20)))}?"
        answer = " ".join(source.choices(WORDS, k=source.randint(2, 16)))
        if kind == "text":
            yield {"text": f"{question} {answer}."}
        else:
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": messages}


def _config(path: str, kind: str) -> Any:
    from halftune.config.run import RunConfig

    method = {"type": "pretrain"} if kind == "text" else {"type": "sft"}
    data = {"train": [{"path": path}], "max_length": MAX_LENGTH, "packing": {"enabled": True}, "num_workers": 1}
    model, training = {"name_or_path": MODEL}, {"output_dir": "run"}
    return RunConfig.model_validate({"model": model, "method": method, "data": data, "training": training})


def _tokenizer() -> Any:
    from halftune.config.sections.model import ModelSection
    from halftune.model.tokenizer.tokenizer import load_tokenizer

    return load_tokenizer(ModelSection(name_or_path=MODEL))


def make_model(path: str, kind: str) -> int:
    """Writes the builtin model whose tokenizer all phases load: its memory is not that of the data."""
    _tokenizer()
    return _report(harness.clock(), 0)


def prepare_rows(path: str, kind: str) -> int:
    """Reads, tokenises, counts and packs the rows; from the cache where it holds them. Makes the first batch."""
    from halftune.data.batch import collate
    from halftune.data.order.epoch import epoch_rows, packed_batches
    from halftune.data.pipeline import prepare

    config, tokenizer = _config(path, kind), _tokenizer()
    began = harness.clock()
    split = prepare(config, tokenizer).train
    seed = config.training.seed
    rows = epoch_rows(split.lengths, epoch=0, seed=seed, packing=True, capacity=MAX_LENGTH)
    first = packed_batches(rows, 8)[0]
    collate([split.part(span) for row in first for span in row], 0, packed=True)
    return _report(began, len(split))


def read_rows(path: str, kind: str) -> int:
    """Reads the rows, once."""
    from halftune.config.sections.data import SourceSection
    from halftune.data.sources.source import open_source

    began = harness.clock()
    rows = open_source(SourceSection(path=path)).read()
    return _report(began, len(rows))


def map_rows(path: str, kind: str) -> int:
    """Batched ``datasets.map`` with the same template, tokenizer and labels; no report, no check, no packing."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = _tokenizer()

    def documents(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer([text + tokenizer.eos_token for text in batch["text"]], add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    def conversations(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        whole = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        asked = [messages[:-1] for messages in batch["messages"]]
        prompts = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        made = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        labels = [
            [token if start >= len(prompt) else -100 for token, (start, _) in zip(ids, places, strict=True)]
            for ids, places, prompt in zip(made["input_ids"], made["offset_mapping"], prompts, strict=True)
        ]
        return {"input_ids": made["input_ids"], "labels": labels}

    began = harness.clock()
    loader = "json" if path.endswith(".jsonl") else "parquet"
    rows = datasets.load_dataset(loader, data_files=path, split="train", cache_dir=f"{path}.datasets")
    made = rows.map(documents if kind == "text" else conversations, batched=True, remove_columns=rows.column_names)
    return _report(began, len(made))


PHASES = {"model": make_model, "read": read_rows, "first": prepare_rows, "second": prepare_rows, "map": map_rows}


def _report(began: float, rows: int) -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu": harness.clock() - began, "peak_mib": peak / 1024, "rows": rows}))
    return 0


def _measure(count: int, kind: str, ending: str, phases: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"rows.{ending}")
        write_rows(path, count, kind)
        os.environ["HALFTUNE_CACHE"] = folder
        size = path.stat().st_size / 2**20
        harness.fresh("model", path, kind)
        for phase in phases:
            found = harness.fresh(phase, path, kind)
            cells = [found.get("note", "")]
            if "cpu" in found:
                cells = [f"{found['cpu']:.2f}", f"{count / found['cpu']:,.0f}", f"{found['peak_mib']:,.0f}"]
            print(harness.row(f"{count:,} {kind} {ending} ({size:,.0f} MiB)", phase, *cells), flush=True)


def main() -> int:
    if words := harness.case():
        return PHASES[words[0]](*words[1:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--kinds", default="chat,text")
    parser.add_argument("--endings", default="jsonl,parquet")
    parser.add_argument("--phases", default="read,first,second,map")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    print(harness.machine())
    print(harness.head("rows", "phase", "CPU-s", "rows per CPU-s", "peak MiB"))
    for _ in range(args.rounds):
        for count in args.rows:
            for kind in args.kinds.split(","):
                for ending in args.endings.split(","):
                    _measure(count, kind, ending, args.phases.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
