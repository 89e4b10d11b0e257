"""What the form suggests where a model or data is named; free text stays possible."""

from __future__ import annotations

from pathlib import Path

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.rules.files import BUILTIN, DATA_ENDINGS, is_hidden
from halftune.config.sections.data import BUILTIN_DATA
from halftune_webui.runs.view.show import name_of
from halftune_webui.settings import Settings

MOST = 60


def hints(settings: Settings) -> dict[str, list[str]]:
    """Dotted key (without indices) → suggestions: what halftune brings, then what lies in the web UI's folders now."""
    data = [f"{BUILTIN}{name}" for name in BUILTIN_DATA]
    models = [f"{BUILTIN}{name}" for name in BUILTIN_MODELS]
    sources = [*data, *_data_files(settings.roots[0])]
    return {
        "model.name_or_path": [*models, *_finished_models(settings)],
        "method.teacher.name_or_path": [*models, *_finished_models(settings)],
        "data.train.path": sources,
        "data.eval.path": sources,
        "model.chat_template": ["chatml"],
    }


def _data_files(here: Path) -> list[str]:
    found = (path for folder in (here, here / "data", here / "datasets") for path in folder.glob("*"))
    near = [path for path in found if not is_hidden(path.name)]
    return sorted(name_of(path, here) for path in near if path.suffix in DATA_ENDINGS[:6] and path.is_file())[:MOST]


def _finished_models(settings: Settings) -> list[str]:
    """Whole models that earlier runs of this web UI have left."""
    found = settings.runs.glob("*/final/config.json")
    return sorted(name_of(path.parent, settings.roots[0]) for path in found)[:MOST]
