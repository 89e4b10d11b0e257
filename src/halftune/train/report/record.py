"""Everything that a run folder says about its run, read once; a missing file is an empty answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from halftune.core.files import MOST_JSON, read_json, read_text
from halftune.train.callbacks.metrics import read_metrics

HERE = "halftune.train.report"  # whose templates and styles make the page


@dataclass(frozen=True)
class Record:
    """A run, from its folder.

    Attributes:
        folder: the run folder.
        training, evaluations: lines of ``metrics.jsonl``.
        plan, environment, data, dtypes, guard, profile: the JSON files of those names.
        samples: rows of ``samples.json``.
        config: ``resolved.yaml`` as values; ``config_text`` as text, with the origin of each value.
        unreadable: files that are there and cannot be read.
    """

    folder: Path
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    plan: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, Any]
    dtypes: dict[str, Any]
    guard: dict[str, Any]
    profile: dict[str, Any]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    config_text: str
    unreadable: list[str] = field(default_factory=list)

    def setting(self, *keys: str) -> Any:
        """A value of the configuration, or None."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.setting("logging", "run_name") or self.folder.resolve().name


def read(folder: Path) -> Record:
    """Reads a run folder, of a run in any state."""
    unreadable: list[str] = []

    def values(name: str) -> dict[str, Any]:
        path = folder / name
        if not path.exists():
            return {}
        try:
            found = read_json(path, MOST_JSON)
        except (OSError, ValueError):
            found = None
        if isinstance(found, dict):
            return found
        unreadable.append(name)
        return {}

    path = folder / "resolved.yaml"
    text, config = "", {}
    try:
        text = read_text(path) if path.exists() else ""
        config = yaml.safe_load(text) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        unreadable.append(path.name)
    lines = list(read_metrics(folder))
    return Record(
        folder=folder,
        training=[line for line in lines if "loss" in line],
        evaluations=[line for line in lines if "eval_loss" in line],
        plan=values("plan.json"),
        environment=values("environment.json"),
        data=values("data_report.json"),
        dtypes=values("dtypes.json"),
        guard=values("guard.json"),
        profile=values("profile.json"),
        samples=values("samples.json").get("samples", []),
        config=config if isinstance(config, dict) else {},
        config_text=text,
        unreadable=unreadable,
    )
