"""A training step at the sizes of published models on this GPU: ways of halftune, and transformers' Trainer with peft.

  python scripts/bench/gpu_step.py                                every model and way, about 35 minutes
  python scripts/bench/gpu_step.py --models qwen2.5-7b --ways fused trainer
  python scripts/bench/gpu_step.py --layers 8                     of each model, for a small GPU or little time
  python scripts/bench/gpu_step.py --dry-run                      tiny sizes in fp32 on a CPU: is the script right?

LoRA of rank 16, bf16, random weights, 2 rows of 4,096 tokens, each one sample, as in published tables: every token
has a label and neither side needs a mask, so that both use a flash kernel. No checkpointing. Speeds are those of the
median step, since some steps compile kernels.
Every case is a process of its own. ``--out FILE`` keeps each case as a line of JSON once it is measured; what the file
holds of this GPU and this commit is not measured again, unless it failed, so several calls may share the work. Beside
the measured speed stands what the paper profiler predicts, which takes half a minute of a core for each case, or
nothing with ``--measured-only``. Leaves with 1 if a way of halftune failed; what a plan refuses on this GPU (fp8 on an
A100) did not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from beside_trainer import documents, ours, plain, recipe
from harness import case, fresh, head, planned, read_lines, row, tiny_model, write_lines

MODELS = {  # published sizes
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",  # a hybrid
}
WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "trainer": {},
    "plain": {"training": {"fused_layers": False}},
    "compile": {"training": {"torch_compile": True}},
    "plain-compile": {"training": {"fused_layers": False, "torch_compile": True}},
    "fp8": {"precision": {"compute": "bf16", "linear": "fp8"}},
    "full": {"adapter": {"type": "none"}},
    "fa4": {"attention": "fa4"},
    "fa4-fp8": {"attention": "fa4", "precision": {"compute": "bf16", "linear": "fp8"}},
}
DRY = ("fused", "plain", "trainer")
STEPS = 20


def sizes(name: str, layers: int) -> dict[str, Any]:
    """The config.json of a language model, with all of its layers for 0."""
    from halftune.config.facts.published import published_config

    path = published_config(MODELS[name])
    assert path is not None
    raw = json.loads(path.read_text())
    raw |= raw.pop("text_config", {}) | ({"num_hidden_layers": layers} if layers else {})
    return raw | {"layer_types": raw["layer_types"][: raw["num_hidden_layers"]]} if "layer_types" in raw else raw


def write_model(folder: Path, name: str, layers: int) -> None:
    """A bf16 checkpoint of random weights in real sizes, made on the device; ``tiny``: fp32 on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=4096, **heads)
    if name == "tiny":
        return
    (folder / "model.safetensors").unlink()  # its tokenizer stays
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes(name, layers)), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measured(folder: Path, name: str, way: str, layers: int, *, predict: bool) -> dict[str, Any]:
    """One case, in this process."""
    made, file = folder / "made", folder / way / "recipe.yaml"
    if not made.exists():
        write_model(folder / "model", name, layers)
        made.touch()
    tiny = name == "tiny"
    file.parent.mkdir()
    own: dict[str, Any] = {"model": {"name_or_path": str(folder / "model")}, "precision": "fp32" if tiny else "auto"}
    tree = recipe(file.parent, 2, 128 if tiny else 4096, 16, method="pretrain", **own | WAYS[way])
    write_lines(file.parent / "documents.jsonl", [{"text": "\n".join(one["completion"] for one in documents())}])
    file.write_text(json.dumps(tree))
    if way == "trainer":
        return plain(file, STEPS)
    from halftune.core.errors import PlanError

    try:
        return ours(file, STEPS) | (predicted(tree, file, tiny) if predict else {})
    except PlanError as error:
        return {"refused": str(error)}


def predicted(tree: dict[str, Any], file: Path, tiny: bool) -> dict[str, Any]:
    """Tokens per second by the paper profiler on this machine; the tiny model on an H200."""
    from halftune.bench.paper.report import profile
    from halftune.core.errors import PlanError
    from halftune.hardware.catalogue import lookup
    from halftune.hardware.probe import probe

    hardware = lookup("h200") if tiny else probe()
    loaded, plan = planned(tree, file, "h200" if tiny else "")
    try:
        return {"predicted": profile(loaded.run, plan, hardware).tokens_per_second}
    except PlanError as error:  # a GPU without rates
        return {"unpredicted": str(error)}


def where() -> dict[str, str]:
    """The GPU and the commit that a line belongs to."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "commit": commit}


def table(found: list[dict[str, Any]]) -> str:
    """Every case as a row: tokens per second, measured and predicted, over those of the Trainer, and memory."""
    lines = [head("model, way", "tokens / s", "predicted", "of the Trainer's", "peak GiB", "plan expects GiB", "MFU")]
    plainly = {one["model"]: one.get("median") for one in found if one["way"] == "trainer"}
    for one in found:
        speed, other, mfu = one.get("median"), plainly.get(one["model"]), one.get("mfu")
        memory = [f"{one[key] / 2**30:.1f}" if one.get(key) else "–" for key in ("peak", "expected")]
        ahead = f"{speed / other:.2f}" if speed and other and one["way"] != "trainer" else "–"
        rates = [f"{one[key]:,.0f}" if one.get(key) else "–" for key in ("median", "predicted")]
        rates[0] = one.get("note") or one.get("refused") or rates[0]
        name = f"{one['model']}{', ' + str(one['layers']) + ' layers' if one['layers'] else ''}, {one['way']}"
        lines.append(row(name, *rates, ahead, *memory, f"{mfu:.0%}" if mfu else "–"))
    return "\n".join(lines)


def main() -> int:
    """Measures, or is one case."""
    if (words := case()) is not None:
        folder, model, way, layers, predict = words
        print(json.dumps(measured(Path(folder), model, way, int(layers), predict=bool(int(predict)))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--layers", type=int, default=0, help="of each model (default: all)")
    parser.add_argument("--out", type=Path, help="JSON lines; what it holds is not measured again")
    parser.add_argument("--measured-only", action="store_true", help="do not predict")
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    models, ways = (["tiny"], DRY) if asked.dry_run else (asked.models, asked.ways)
    here = where()
    lines = read_lines(asked.out) if asked.out and asked.out.is_file() else []
    found = [one for one in lines if here.items() <= one.items() and "note" not in one]
    for model in models:
        folder = Path(tempfile.mkdtemp())
        known = {one["way"] for one in found if (one["model"], one["layers"]) == (model, asked.layers)}
        for way in (one for one in ways if one not in known):
            named = {"model": model, "way": way, "layers": asked.layers, **here}
            found.append(named | fresh(folder, model, way, asked.layers, int(not asked.measured_only)))
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found[-1]) + "\n")
        shutil.rmtree(folder)
    print(table(found))
    return int(any("note" in one for one in found if one["way"] != "trainer"))


if __name__ == "__main__":
    sys.exit(main())
