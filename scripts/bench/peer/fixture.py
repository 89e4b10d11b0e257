"""The models and data that all frameworks share: two small Qwen2, pre-trained a little, and Alpaca data.

Run in halftune's environment: ``python fixture.py FOLDER DATA``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

MODELS = {"3M": ("qwen2-tiny", 160, 2e-3), "25M": ("qwen2-small", 40, 1e-3)}  # builtin model, steps, learning rate
COPIES = 900  # of the one conversation that all frameworks are compared on
SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."  # what Qwen2's own template adds
TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\n" + SYSTEM + "<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def make_fixture(folder: Path, data: Path) -> None:
    """Writes ``folder/3M`` and ``folder/25M`` where they are missing, the data, and torchtune's tokenizer files.

    Args:
        folder: where to.
        data: folder with ``alpaca_en_demo.json`` and ``identity.json``.
    """
    rows = conversations(data)
    write_data(folder / "data", rows)
    write_data(folder / "same", one_of(rows))
    for name, (builtin, steps, rate) in MODELS.items():
        if not (folder / name / "config.json").exists():
            pretrain(builtin, steps, rate, folder / name)
            make_portable(folder / name)
    write_tune_files(folder / "3M", folder / "tune")


def conversations(source: Path) -> list[dict[str, str]]:
    """Alpaca's demo and the identity set, shuffled, as instruction, input, output."""
    alpaca = json.loads((source / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    identity = (source / "identity.json").read_text(encoding="utf-8")
    rows = alpaca + json.loads(identity.replace("{{name}}", "Wren").replace("{{author}}", "us"))
    random.Random(0).shuffle(rows)
    return rows


def one_of(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """One conversation of average length, with an input, many times.

    Whatever the order and however rows are made, every step then has the same loss: frameworks that mask or template
    otherwise differ, and so do packed rows whose samples see each other.
    """
    full = sorted((row for row in rows if row.get("input")), key=lambda row: len(row["output"]))
    return [full[len(full) // 2]] * COPIES


def write_data(folder: Path, rows: list[dict[str, str]]) -> None:
    """The same conversations in the form that each framework reads."""
    (folder / "trl").mkdir(parents=True, exist_ok=True)
    pairs = []
    for row in rows:
        question = row["instruction"] + (f"\n{row['input']}" if row.get("input") else "")
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        pairs.append((chat, [{"role": "assistant", "content": row["output"]}]))
    _write_lines(folder / "messages.jsonl", [{"messages": [*chat, *answer]} for chat, answer in pairs])
    _write_lines(folder / "trl" / "train.jsonl", [{"prompt": chat, "completion": answer} for chat, answer in pairs])
    (folder / "alpaca.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"alpaca": {"file_name": "alpaca.json"}}))


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def pretrain(builtin: str, steps: int, rate: float, target: Path) -> None:
    """A short pre-training on Python's library text, so that losses say something about masks and templates."""
    run = target.with_name(f"{target.name}-run")
    recipe = {
        "model": {"name_or_path": f"builtin:{builtin}"},
        "precision": "fp32",
        "adapter": "none",
        "method": "pretrain",
        "data": {"train": "builtin:stdlib-text", "max_length": 256, "packing": False},
        "training": {
            "output_dir": str(run),
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "learning_rate": rate,
            "warmup_ratio": 0.1,
            "save_steps": "end",
        },
    }
    file = target.with_name(f"{target.name}.yaml")
    file.write_text(json.dumps(recipe))
    subprocess.run([sys.executable, "-m", "halftune", "train", "--config", str(file)], check=True)
    (run / "final").rename(target)


def make_portable(model: Path) -> None:
    """Files that older releases of transformers and other readers understand as well."""
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for key in ("backend", "extra_special_tokens", "unk_token"):
        config.pop(key, None)
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    file.write_text(json.dumps(config, indent=1))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    file = model / "config.json"
    config = json.loads(file.read_text())
    config |= {"rope_theta": 10000.0, "torch_dtype": "float32"}
    file.write_text(json.dumps(config, indent=1))


def write_tune_files(model: Path, folder: Path) -> None:
    """torchtune's Qwen2 tokenizer reads vocabulary, merges and special tokens from files of their own."""
    folder.mkdir(exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"])
    special = [{"id": token["id"], "content": token["content"]} for token in tokenizer["added_tokens"]]
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"], ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (folder / "special.json").write_text(json.dumps({"added_tokens": special}))


if __name__ == "__main__":
    make_fixture(Path(sys.argv[1]), Path(sys.argv[2]))
