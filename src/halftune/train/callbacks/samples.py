"""``samples.json``: the answers to ``logging.sample_prompts`` before the first step and after the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from halftune.core import heartbeat
from halftune.core.atomic import write_text
from halftune.core.files import MOST_JSON, read_json
from halftune.core.log import get_logger
from halftune.model.generate import generate_reply
from halftune.train.callbacks.base import Callback, Phase
from halftune.train.parallel.fsdp2 import reshard
from halftune.train.state import TrainState

log = get_logger(__name__)
NAME = "samples.json"


class Samples(Callback):
    """Asks the model before and after. Generation draws from a random stream of its own: training is not touched.

    Where processes hold shares of the weights, all of them generate, and the main one writes.
    """

    watches = together = True

    def on_start(self, run: TrainState) -> None:
        """Answers before the first step. A run that goes on keeps the stored ones."""
        if run.step == 0 and self._takes_part(run):
            self._write(run, [{"prompt": p, "before": self._answer(run, p)} for p in run.config.logging.sample_prompts])

    def on_phase(self, run: TrainState, phase: Phase) -> None:
        """Answers when training has finished, with the weights that are the result."""
        if phase != "finished" or not self._takes_part(run):
            return
        before = _before(run.folder)
        prompts = run.config.logging.sample_prompts
        rows = [{"prompt": p, "before": before.get(p), "after": self._answer(run, p)} for p in prompts]
        self._write(run, rows)

    def _takes_part(self, run: TrainState) -> bool:
        return run.is_main or run.sharded

    def _answer(self, run: TrainState, prompt: str) -> str:
        messages = [{"role": "system", "content": run.config.data.system}] if run.config.data.system else []
        messages.append({"role": "user", "content": prompt})
        kind = run.device.type
        own = kind in ("cuda", "xpu")  # devices whose random stream can be set aside
        with torch.random.fork_rng([run.device] if own else [], device_type=kind if own else "cuda"):
            torch.manual_seed(run.config.training.seed)
            answer = generate_reply(
                run.model,
                run.tokenizer,
                messages,
                run.config.generation,
                run.plan,
                on_text=lambda _: heartbeat.beat(),
                template_variables=run.config.model.chat_template_kwargs,
                sharded=run.device if run.sharded else None,
            )
        if run.sharded:
            reshard(run.model)
        return answer

    def _write(self, run: TrainState, rows: list[dict[str, Any]]) -> None:
        if not run.is_main:
            return
        try:
            write_text(run.folder / NAME, json.dumps({"samples": rows}, ensure_ascii=False, indent=1))
        except OSError as error:
            log.warning("cannot write %s: %s", run.folder / NAME, error.strerror)


def _before(folder: Path) -> dict[str, Any]:
    """Prompt → the answer before training, of those that were stored."""
    path = folder / NAME
    try:
        return {row["prompt"]: row.get("before") for row in read_json(path, MOST_JSON)["samples"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s is not readable, the answers before training are lost: %s", path, error)
        return {}
