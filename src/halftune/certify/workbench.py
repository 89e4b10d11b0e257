"""The small copy of a model in a folder of its own, with rows to train on, and recipes for both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from halftune.certify.certificate import Line, Verdict
from halftune.config.load import LoadedConfig, load_config
from halftune.config.recipe_facts import run_facts
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ConfigError, HalftuneError, PlanError
from halftune.hardware.catalogue import lookup
from halftune.model.files.load_errors import first_line
from halftune.plan import Plan, resolve
from halftune.train.signals.interrupt import Interrupted

TOKENIZER = "builtin:qwen2-tiny"
STEPS, ROWS = 2, 12
# What a model's own code may raise at sizes that its authors did not try.
REFUSALS = (
    ValueError, RuntimeError, TypeError, AssertionError, AttributeError, LookupError, ArithmeticError, ImportError,
    StrictDataclassError, OSError, EOFError, StopIteration,
)  # fmt: skip
_SAID = [f"It is {2 * n}" + " yes" * (n % 5) for n in range(ROWS)]
_ASKED = [f"What is {n} and {n}?" for n in range(ROWS)]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "conversation": [{"prompt": ask, "completion": say} for ask, say in zip(_ASKED, _SAID, strict=True)],
    "document": [{"text": f"{ask} {say}"} for ask, say in zip(_ASKED, _SAID, strict=True)],
    "preference": [
        {"prompt": ask, "chosen": say, "rejected": "No idea"} for ask, say in zip(_ASKED, _SAID, strict=True)
    ],
    "prompt": [{"prompt": ask, "answer": str(2 * n)} for n, ask in enumerate(_ASKED)],
    "rated": [
        {"prompt": ask, "completion": say, "label": n % 3 > 0}
        for n, (ask, say) in enumerate(zip(_ASKED, _SAID, strict=True))
    ],
}


@dataclass(frozen=True)
class Workbench:
    """Where a model is tried.

    Attributes:
        folder: temporary; holds the runs.
        section: the small copy.
        whole: the model itself.
    """

    folder: Path
    section: ModelSection
    whole: ModelSection

    def recipe(self, name: str, records: str = "conversation", **sections: Any) -> LoadedConfig:
        """A recipe of the small copy in fp32 that writes to the folder ``name``.

        Raises:
            ConfigError: its keys do not go together.
        """
        rows = self.folder / f"{records}.jsonl"
        if not rows.exists():
            rows.write_text("".join(json.dumps(row) + "\n" for row in RECORDS[records]))
        training = {
            "output_dir": str(self.folder / name), "max_steps": STEPS, "per_device_train_batch_size": 4,
            "learning_rate": 1e-2, "warmup_ratio": 0, "save_steps": "end",
        }  # fmt: skip
        training |= sections.pop("training", {})
        data = {"train": str(rows), "max_length": 128} | sections.pop("data", {})
        tree = {
            "model": _plain(self.section),
            "precision": "fp32",
            "adapter": {"type": "lora", "rank": 4},
            "data": data,
            "training": training,
            "logging": {"progress": False, "probes": 0},
            **sections,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(tree))  # JSON is YAML
        return load_config(path)

    def plan(self, loaded: LoadedConfig) -> Plan:
        """The plan of a recipe on a CPU.

        Raises:
            PlanError: the plan refuses it.
        """
        return resolve(loaded.run, lookup("cpu"), run_facts(loaded.run))

    def asked(self, name: str, **sections: Any) -> LoadedConfig:
        """A recipe of the model itself, to plan with."""
        tree = {
            "model": _plain(self.whole), "adapter": {"type": "lora"}, "data": {"train": "builtin:python-docs"},
            "training": {"output_dir": str(self.folder / "never")}, **sections,
        }  # fmt: skip
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(tree))
        return load_config(path, look_at_files=False)


def _plain(section: ModelSection) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_unset=True)


@contextmanager
def reported(check: str, lines: list[Line], refused: Verdict = "refused") -> Iterator[None]:
    """Inside, an error becomes a line: what a plan refuses has the verdict ``refused``, anything else is a ``no``."""
    try:
        yield
    except Interrupted:
        raise
    except (PlanError, ConfigError) as error:
        first = error.problems[0] if error.problems else error
        lines.append(Line(check, refused, first.what, first.remedy or ""))
    except HalftuneError as error:
        lines.append(Line(check, "no", error.what, error.remedy or ""))
    except REFUSALS as error:  # of the model's own code
        lines.append(Line(check, "no", f"{type(error).__name__}: {first_line(error)}"))
