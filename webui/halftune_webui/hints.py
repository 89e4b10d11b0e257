"""What the form suggests where a model or data is named; free text stays possible."""

from __future__ import annotations

from pathlib import Path

from halftune.config.builtin_data import BUILTIN_DATA
from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.rules.files import BUILTIN, DATA_ENDINGS

MOST = 60


def hints() -> dict[str, list[str]]:
    """Dotted key (without indices) → suggestions: what halftune brings, then what lies in the working directory."""
    data = [f"{BUILTIN}{name}" for name in BUILTIN_DATA]
    models = [f"{BUILTIN}{name}" for name in BUILTIN_MODELS]
    sources = [*data, *_data_files()]
    return {
        "model.name_or_path": [*models, *_finished_models()],
        "data.train.path": sources,
        "data.eval.path": sources,
        "model.chat_template": ["chatml"],
    }


def _data_files() -> list[str]:
    here = Path()
    near = [*here.glob("*"), *(path for folder in ("data", "datasets") for path in (here / folder).glob("*"))]
    return sorted(str(path) for path in near if path.suffix in DATA_ENDINGS[:6] and path.is_file())[:MOST]


def _finished_models() -> list[str]:
    """Whole models that earlier runs here have left."""
    return sorted(str(path.parent) for path in Path("runs").glob("*/final/config.json"))[:MOST]
