"""The model card of an export: facts of the run, in the Hugging Face Hub's format, and no claims.

Paths of the machine are left out: a base model or data set is named if it is one of the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import metadata_load

from halftune.config.reading.names import looks_local
from halftune.core.errors import HalftuneError
from halftune.core.files import read_json
from halftune.export.options import Options
from halftune.model.files.locate import locate
from halftune.model.result.completed_run import CompletedRun

README = "README.md"
PACKAGES = ("torch", "transformers", "peft")
TEXT = {"folder": "transformers", "adapter": "peft", "gguf": "gguf"}
"""Library of the hub for a target; others are transformers'."""


def write_card(run: CompletedRun, folder: Path, options: Options) -> None:
    """Write ``README.md``; what an earlier step wrote there (how to load the model) comes after the facts.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / README
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    front = ModelCardData(**_front(run, options)).to_yaml()
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(run))
    text = f"---\n{front}\n---\n\n# {options.name}\n\n| fact | value |\n|---|---|\n{rows}\n"
    path.write_text(text + (f"\n{before}" if before else ""), encoding="utf-8")


def _front(run: CompletedRun, options: Options) -> dict[str, Any]:
    config = run.loaded.run
    adapter = run.is_adapter and options.target == "adapter"
    found: dict[str, Any] = {
        "library_name": TEXT.get(options.target, "transformers"),
        "pipeline_tag": None if config.method.type == "reward" else "text-generation",
        "tags": ["halftune", config.method.type, *([config.adapter.type] if run.is_adapter else [])],
        "datasets": [source.path for source in config.data.train if _of_hub(source.path)] or None,
    }
    if _of_hub(config.model.name_or_path):
        relation = "adapter" if adapter else "quantized" if options.target not in ("folder", "adapter") else "finetune"
        found |= {"base_model": config.model.name_or_path, "base_model_relation": relation}
    return {**found, **_license(run)}


def _of_hub(name: str) -> bool:
    return not (looks_local(name) or name.startswith("builtin:") or Path(name).exists()) and name.count("/") == 1


def _license(run: CompletedRun) -> dict[str, str]:
    """The license in the base model's card, if there is one."""
    try:
        card = metadata_load(locate(run.loaded.run.model) / README) or {}
    except (OSError, ValueError, HalftuneError):
        return {}
    return {key: str(card[key]) for key in ("license", "license_name", "license_link") if card.get(key)}


def _facts(run: CompletedRun) -> Iterator[tuple[str, object]]:
    config, precision = run.loaded.run, _read(run.folder, "plan.json").get("precision") or {}
    yield "method", config.method.type
    yield "adapter", _adapter(run)
    for key in ("storage", "trainable", "compute", "saved"):
        if value := (precision.get(key) or {}).get("value"):
            yield f"{key} dtype", value
    data = _read(run.folder, "data_report.json")
    for kind in ("train", "eval"):
        for one in data.get(kind) or ():
            name = one["name"] if _of_hub(one["name"]) or one["name"].startswith("builtin:") else "a local file"
            counts = f"{one['samples']:,} samples, {one['tokens']:,} tokens, {one['trained_tokens']:,} trained"
            yield f"{'training' if kind == 'train' else 'evaluation'} data", f"{name}: {counts}"
    yield from _training(run)
    made = _read(run.folder, "environment.json")
    packages: dict[str, str] = made.get("packages") or {}
    versions = {
        "halftune": made.get("halftune"),
        **{name: packages.get(name) for name in ("torch", "transformers", "peft")},
    }
    if known := [f"{name} {version}" for name, version in versions.items() if version]:
        yield "versions", ", ".join(known)
    devices: list[dict[str, Any]] = (made.get("hardware") or {}).get("devices") or []
    if devices:
        yield "hardware", f"{len(devices)} × {devices[0]['name']}"


def _adapter(run: CompletedRun) -> str:
    adapter = run.loaded.run.adapter
    made = {key: value for key, value in adapter.model_dump().items() if key in ("rank", "alpha") and value is not None}
    return ", ".join([adapter.type, *(f"{key} {value}" for key, value in made.items())])


def _training(run: CompletedRun) -> Iterator[tuple[str, object]]:
    """Steps, tokens and the last losses of ``metrics.jsonl``, up to the step of the exported weights."""
    lines, training = list[dict[str, Any]](), run.loaded.run.training
    try:
        for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            lines.append(json.loads(line))
    except (OSError, ValueError):  # no metrics, or a last line that was cut off
        pass
    step, metric = run.step, training.metric_for_best
    if step is None and training.load_best:
        evaluated = [line for line in lines if line.get(metric) is not None]
        step = min(evaluated, key=lambda line: line[metric])["step"] if evaluated else None
    lines = [line for line in lines if step is None or line["step"] <= step]
    last = {key: value for line in lines for key, value in line.items()}
    if step is not None or lines:
        yield "steps", last["step"] if step is None else step
    if lines:
        yield "trained tokens", f"{sum(line.get('tokens_trained') or 0 for line in lines):,}"
    for key, name in (("loss", "last training loss"), ("eval_loss", "last evaluation loss")):
        if last.get(key) is not None:
            yield name, f"{last[key]:.4f}"


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = read_json(folder / name)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
