"""``samples.json``: the answers to ``logging.sample_prompts`` before the first step and after the last one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halftune.core.atomic import write_text
from halftune.core.files import MOST_JSON, read_json
from halftune.core.log import get_logger
from halftune.core.processes import heartbeat
from halftune.model.files.locate import media_of
from halftune.model.generate import generate_reply
from halftune.train.callback import Callback, Phase
from halftune.train.state import TrainState

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaProcessor
    from halftune.data.media.prompts import Content

log = get_logger(__name__)
NAME = "samples.json"


class Samples(Callback):
    """Asks the model before and after. Generation draws from a random stream of its own: training is not touched.

    Where processes hold shares of the weights, all of them generate, and the main one writes.
    """

    watches = together = True
    _media: MediaProcessor | None = None
    _digest = ""  # of the answers before training

    def state(self) -> dict[str, Any]:
        """A checksum of the answers before training."""
        return {"before": self._digest} if self._digest else {}

    def restore(self, state: dict[str, Any]) -> None:
        """The checksum that the checkpoint knows."""
        self._digest = state["before"]

    def on_start(self, run: TrainState) -> None:
        """Answers before the first step. A run that goes on keeps the stored ones."""
        if run.step == 0 and self._takes_part(run):
            rows = [{**shown, "before": self._answer(run, content)} for shown, content in self._asked(run)]
            self._digest = _digest(rows)
            self._write(run, rows)

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """Answers when training has finished, with the weights that are the result."""
        if phase != "finished" or not self._takes_part(run):
            return
        before, rows = _before(run.folder), []
        if before and self._digest not in ("", _digest(before)):
            log.warning("%s was changed during the run: its answers before training may be wrong", run.folder / NAME)
        for shown, content in self._asked(run):
            early = next((before.pop(at) for at, row in enumerate(before) if row.get("prompt") == shown["prompt"]), {})
            rows.append({**shown, "before": early.get("before"), "after": self._answer(run, content)})
        self._write(run, rows)

    def _asked(self, run: TrainState) -> list[tuple[dict[str, Any], Content]]:
        """What the report shows of each prompt, and the content of its message."""
        prompts, settings = run.config.logging.sample_prompts, media_of(run.config)
        if settings is None or not run.config.logging.sample_media:
            return [({"prompt": prompt}, prompt) for prompt in prompts]
        from halftune.data.media.preview import MediaPreview  # few runs have images
        from halftune.data.media.processor import MediaProcessor
        from halftune.data.media.prompts import prompt_contents

        self._media = MediaProcessor(settings, run.tokenizer)
        preview, asked = MediaPreview(settings, run.tokenizer), []
        for prompt, content in zip(prompts, prompt_contents(run.config), strict=True):
            refs = [part["ref"] for part in content if "ref" in part] if isinstance(content, list) else []
            asked.append(({"prompt": prompt, "media": preview.as_data(refs)}, content))
        return asked

    def _takes_part(self, run: TrainState) -> bool:
        return run.is_main or run.sharded

    def _answer(self, run: TrainState, content: Content) -> str:
        system = run.config.data.system
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        kind = run.device.type
        own = kind in ("cuda", "xpu")  # devices whose random stream can be set aside
        aside = torch.random.fork_rng([run.device] if own else [], device_type=kind if own else "cuda")
        with aside, run.strategy.generating(run.model):
            torch.manual_seed(run.config.training.seed)
            return generate_reply(
                run.model,
                run.tokenizer,
                messages,
                run.config.generation,
                run.plan,
                on_text=lambda _: heartbeat.beat(),
                template_variables=run.config.model.chat_template_kwargs,
                sharded=run.device if run.sharded else None,
                images=self._media,
            )

    def _write(self, run: TrainState, rows: list[dict[str, Any]]) -> None:
        if not run.is_main:
            return
        try:
            write_text(run.folder / NAME, json.dumps({"samples": rows}, ensure_ascii=False, indent=1))
        except OSError as error:
            log.warning("cannot write %s: %s", run.folder / NAME, error.strerror)


def _digest(rows: list[dict[str, Any]]) -> str:
    """A checksum of prompts and their answers before training."""
    return hashlib.sha256(json.dumps([(row["prompt"], row.get("before")) for row in rows]).encode()).hexdigest()


def _before(folder: Path) -> list[dict[str, Any]]:
    """The rows that were stored before training."""
    path = folder / NAME
    try:
        return [row for row in read_json(path, MOST_JSON)["samples"] if row.get("prompt")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s is not readable, the answers before training are lost: %s", path, error)
        return []
