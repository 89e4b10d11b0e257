"""A GGUF file, by llama-cpp-python: what llama.cpp, Ollama and LM Studio compute."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from halftune.core.errors import ModelError
from halftune.core.optional import need
from halftune.core.processes import heartbeat
from halftune.model.files.load_errors import LOAD_ERRORS
from halftune.verify.draw import render
from halftune.verify.probes import TOP, Probe, Probes
from halftune.verify.targets import Finding, Seen

_ROOM = 64  # tokens beyond the longest probe
_TYPES = {0: "fp32", 1: "fp16", 2: "q4", 7: "q8_0", 15: "q4", 32: "bf16"}  # llama.cpp's general.file_type


class GgufTarget:
    """See ``Target``.

    Args:
        file: the GGUF file.
        probes: decide the context length.

    Raises:
        MissingPackageError: llama-cpp-python is not installed.
        ModelError: llama.cpp cannot load the file.
    """

    kind = "gguf"

    def __init__(self, file: Path, probes: Probes) -> None:
        self._library: Any = need("llama_cpp", why="verify against a GGUF file", distribution="llama-cpp-python")
        self.name = str(file)
        longest = max(len(one.prompt) + len(one.answer) for one in probes.probes) + _ROOM
        try:
            self._llama: Any = self._library.Llama(
                str(file), n_ctx=longest, n_batch=longest, logits_all=True, verbose=False
            )
        except (ValueError, RuntimeError, OSError) as error:
            what = f"llama.cpp cannot load it: {error}"
            raise ModelError(what, where=str(file), remedy="export it again", code="verify.target_unusable") from error
        self.metadata: dict[str, str] = self._llama.metadata
        kind = self.metadata.get("general.file_type", "")
        self.format = _TYPES.get(int(kind), "q4") if kind.isdigit() else ""

    def settings(self, folder: Path, base: str) -> list[Finding]:
        """What the file's settings change in the numbers, as far as llama.cpp tells them: 6 decimals.

        Args:
            folder: of the result.
            base: its base model, which has the ``config.json`` of an adapter.
        """
        try:
            config: Any = AutoConfig.from_pretrained(folder if (folder / "config.json").is_file() else base)
        except LOAD_ERRORS:
            return []
        config, kind = config.get_text_config(), self.metadata.get("general.architecture", "")
        ours = {
            "rope.freq_base": (getattr(config, "rope_parameters", None) or {}).get("rope_theta"),
            "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        }
        theirs = {name: self.metadata.get(f"{kind}.{name}") for name in ours}
        changed = [
            f"{name} is {theirs[name]} instead of {one:g}"
            for name, one in ours.items()
            if one is not None and theirs[name] is not None and abs(float(theirs[name] or 0) - one) > 1e-6 + 1e-4 * one
        ]
        return [Finding("weights.config", ", ".join(changed))] if changed else []

    def tokens(self, probe: Probe, probes: Probes, tokenizer: Any) -> list[int] | None:
        """See ``Target``: as llama.cpp's chat does, which adds BOS where the file says so."""
        text: str | None = probe.text
        if probe.messages is not None:
            own = copy(tokenizer)
            own.chat_template = self.metadata.get("tokenizer.chat_template")
            found = (
                render(own, probe.messages, probe.tools, probes.variables, probes.day) if own.chat_template else None
            )
            text = found and found[0]
        if text is None:
            return []
        add = self.metadata.get("tokenizer.ggml.add_bos_token") == "true"
        add = add and not text.startswith(str(tokenizer.bos_token))
        return list(self._llama.tokenize(text.encode(), add_bos=add, special=True))

    def stops(self, probes: Probes, tokenizer: Any) -> set[int] | None:
        """See ``Target``: EOS, EOT and EOM of the file, and tokens that llama.cpp knows to end a turn."""
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        found = {int(one) for name in names if (one := self.metadata.get(f"tokenizer.ggml.{name}", "")).isdigit()}
        vocabulary = self._llama._model.vocab
        return found | {one for one in probes.stops if self._library.llama_vocab_is_eog(vocabulary, one)}

    def see(self, probes: Sequence[Probe], tokenizer: Any) -> Seen:
        """See ``Target``."""
        logprobs, likeliest, of_top = [], [], []
        for probe in probes:
            heartbeat.beat()
            self._llama.reset()
            ids, start = [*probe.prompt, *probe.answer], len(probe.prompt)
            self._llama.eval(ids)
            logits = np.asarray(self._llama.scores[start - 1 : len(ids) - 1], dtype=np.float64)
            highest = logits.max(axis=1, keepdims=True)
            values = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
            places = np.arange(len(probe.answer))
            logprobs.append(values[places, probe.answer].tolist())
            likeliest.append(values.argmax(axis=1).tolist())
            wanted = np.array([[token for token, _ in place[:TOP]] for place in probe.top])
            of_top.append(np.take_along_axis(values, wanted, axis=1).tolist())
        return Seen(logprobs, likeliest, of_top)
