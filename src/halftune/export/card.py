"""The model card of an export: facts of the run, in the Hugging Face Hub's format, and no claims.

Paths of the machine are left out: a base model or data set is named if it is one of the hub.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from halftune.config.reading.names import looks_local
from halftune.core.errors import HalftuneError
from halftune.core.files import SMALL_JSON, read_json, read_limited, read_text
from halftune.core.log import get_logger
from halftune.core.run_metrics import NAME, read_metrics
from halftune.export.options import Options
from halftune.model.files.locate import locate
from halftune.model.files.result import finished_at
from halftune.model.result.completed_run import CompletedRun

log = get_logger(__name__)
README = "README.md"
Rows = Iterator[tuple[str, object]]
PACKAGES = ("torch", "transformers", "peft")
TEXT = {"folder": "transformers", "adapter": "peft", "gguf": "gguf"}
"""Library of the hub for a target; others are transformers'."""


def write_card(run: CompletedRun, folder: Path, options: Options, stored: str) -> None:
    """Write ``README.md``; what an earlier step wrote there (how to load the model) comes after the facts.

    Args:
        run: the exported run.
        folder: the folder that is being written.
        options: has the name and the target.
        stored: number format of the weights in the folder.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / README
    before = read_text(path) if path.is_file() else ""
    front = ModelCardData(**_front(run, options)).to_yaml()
    rows = "\n".join(f"| {name} | {value} |" for name, value in _facts(run, stored))
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
        text = read_limited(locate(run.loaded.run.model) / README, SMALL_JSON).decode("utf-8", errors="replace")
        card = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, yaml.YAMLError, HalftuneError):
        return {}
    return {key: str(card[key]) for key in ("license", "license_name", "license_link") if card.get(key)}


def _facts(run: CompletedRun, stored: str) -> Rows:
    yield "method", run.loaded.run.method.type
    yield "adapter", _adapter(run)
    yield from _rows_of(run, "plan.json", _precision)
    yield "saved dtype", stored
    yield from _rows_of(run, "data_report.json", _data)
    yield from _rows_of(run, NAME, _training)
    yield from _rows_of(run, "environment.json", _environment)


def _rows_of(run: CompletedRun, name: str, rows: Callable[[CompletedRun, Path], Rows]) -> list[tuple[str, object]]:
    """The rows from a file of the run folder; none, and a warning, if its content is not what a run writes."""
    path = run.folder / name
    try:
        return list(rows(run, path))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        log.warning("the model card leaves out the facts of %s: %s: %s", path, type(error).__name__, error)
        return []


def _precision(_run: CompletedRun, path: Path) -> Rows:
    precision = read_json(path)["precision"]
    for key in ("storage", "trainable", "compute"):
        if value := (precision.get(key) or {}).get("value"):
            yield f"{key} dtype", _text(value)


def _data(_run: CompletedRun, path: Path) -> Rows:
    report = read_json(path)
    for kind, title in (("train", "training"), ("eval", "evaluation")):
        for one in report.get(kind) or ():
            name = one["name"] if _of_hub(one["name"]) or one["name"].startswith("builtin:") else "a local file"
            counts = f"{one['samples']:,} samples, {one['tokens']:,} tokens, {one['trained_tokens']:,} trained"
            yield f"{title} data", f"{_text(name)}: {counts}"


def _environment(_run: CompletedRun, path: Path) -> Rows:
    made = read_json(path)
    packages = made.get("packages") or {}
    versions = {"halftune": made.get("halftune"), **{name: packages.get(name) for name in PACKAGES}}
    if known := [f"{name} {_text(version)}" for name, version in versions.items() if version]:
        yield "versions", ", ".join(known)
    names = Counter(_text(one["name"]) for one in (made.get("hardware") or {}).get("devices") or ())
    if names:
        yield "hardware", ", ".join(f"{count} × {name}" for name, count in names.items())


def _text(value: Any) -> str:
    """A name in a table.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str) or not value.isprintable() or "|" in value:
        raise TypeError(f"{str(value)[:50]!r} is not a name")
    return value


def _adapter(run: CompletedRun) -> str:
    adapter = run.loaded.run.adapter
    made = {key: value for key, value in adapter.model_dump().items() if key in ("rank", "alpha") and value is not None}
    return ", ".join([adapter.type, *(f"{key} {value}" for key, value in made.items())])


def _training(run: CompletedRun, path: Path) -> Rows:
    """Steps, tokens and the last losses of ``metrics.jsonl``, up to the step of the exported weights."""
    step, training = run.step, run.loaded.run.training
    if step is None and training.load_best:
        lines, metric = read_metrics(run.folder), training.metric_for_best
        evaluated = ((line[metric], line["step"]) for line in lines if line.get(metric) is not None)
        _, step = min((one for one in evaluated if math.isfinite(one[0])), default=(None, None))
    last, tokens = dict[str, Any](), 0
    for line in read_metrics(run.folder):
        more, loss = (line.get(key) or 0 for key in ("tokens_trained", "loss"))  # GRPO's loss may be below 0
        if min(line["step"], more) < 0 or not math.isfinite(loss):
            raise ValueError(f"step {line['step']} cannot have been measured")
        if step is None or line["step"] <= step:
            last |= {key: line[key] for key in ("step", "loss", "eval_loss") if line.get(key) is not None}
            tokens += more
    if not last and path.exists():
        raise ValueError("no step can be read")
    if step is not None or last:
        trained = max(last.get("step", 0), finished_at(run.folder) or 0)  # the end of metrics.jsonl may be lost
        yield "steps", f"{trained if step is None else step:d}"
    if last:
        yield "trained tokens", f"{tokens:,}"
    for key, name in (("loss", "last training loss"), ("eval_loss", "last evaluation loss")):
        if key in last:
            yield name, f"{last[key]:.4f}"
