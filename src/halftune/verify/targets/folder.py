"""A folder that plain transformers loads, or an adapter that plain peft loads: as everybody else loads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from halftune.config.facts.folder import read_json
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.model.files.architectures import ignore_peft_warnings, no_progress_bars
from halftune.model.files.load_errors import LOAD_ERRORS, first_line
from halftune.model.files.locate import locate
from halftune.model.generate import ending_ids, evaluating
from halftune.verify.draw import render
from halftune.verify.measure import score
from halftune.verify.probes import Probe, Probes
from halftune.verify.targets import Seen

ADAPTER, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class FolderTarget:
    """See ``Target``.

    Attributes:
        folder: of the model or adapter.
        model: in evaluation mode, in the format of its files, on a GPU where there is one.
        absent: weights of the model that its files do not have: transformers makes them at random.

    Args:
        folder: with ``config.json`` or ``adapter_config.json``.
        base: model of an adapter whose own base cannot be found.

    Raises:
        ModelError: transformers or peft cannot load it.
    """

    def __init__(self, folder: Path, base: str = "") -> None:
        self.folder, self.name = folder, str(folder)
        self.kind = "adapter" if (folder / ADAPTER).is_file() else "folder"
        self.model, self.absent = load_plain(folder, base)
        self.tokenizer = plain_tokenizer(folder, base)
        self.device = next(self.model.parameters()).device
        first = next(one for one in self.model.parameters() if one.is_floating_point())
        quantised: Any = getattr(base_of(self.model).config, "quantization_config", None)
        self.format = _FORMATS.get(first.dtype, "") if quantised is None else _quantised(quantised)

    def tokens(self, probe: Probe, probes: Probes, tokenizer: Any) -> list[int] | None:
        """See ``Target``."""
        if probe.messages is None:
            return list(self.tokenizer(probe.text, add_special_tokens=False)["input_ids"])
        if not self.tokenizer.chat_template:
            return []
        found = render(self.tokenizer, probe.messages, probe.tools, probes.variables, probes.day)
        return found[1] if found else []

    def stops(self, probes: Probes, tokenizer: Any) -> set[int] | None:
        """See ``Target``. What ``generate`` stops at without being told more."""
        base = base_of(self.model)
        if self.kind == "adapter":  # its own tokenizer says where an answer ends
            return set(ending_ids(self.tokenizer, base.generation_config))
        listed = base.generation_config.eos_token_id if base.generation_config is not None else None
        listed = base.config.get_text_config().eos_token_id if listed is None else listed
        return set(listed if isinstance(listed, list) else [] if listed is None else [listed])

    def see(self, probes: Sequence[Probe], tokenizer: Any) -> Seen:
        """See ``Target``."""
        pairs = [(one.prompt, one.answer) for one in probes]
        rows = len(base_of(self.model).get_input_embeddings().weight)
        if any(token >= rows for prompt, answer in pairs for token in (*prompt, *answer)):
            return Seen([])  # the embeddings were cut
        asked = [[[token for token, _ in place] for place in one.top] for one in probes]
        with evaluating(self.model):
            found = score(self.model, pairs, 0, self.device, asked=asked)
        return Seen(
            [one.logprobs for one in found],
            [[place[0][0] for place in one.top] for one in found],
            [one.asked for one in found],
        )


def _quantised(config: Any) -> str:
    """The row of ``causes.yaml`` for a quantised folder."""
    told = config if isinstance(config, dict) else config.to_dict()
    text = str(told)
    if told.get("load_in_4bit") or "int4" in text.lower():
        return "nf4"
    return "fp8" if "float8" in text.lower() else "int8"


_PEFT = "base_model.model."  # stands before the names of weights in an adapter's file
_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def base_of(model: Any) -> Any:
    """The transformers model inside a peft model."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def load_plain(folder: Path, base: str = "", dtype: Any = "auto") -> tuple[Any, list[str]]:
    """Load a folder as plain transformers or peft do; also the names of weights that its files lack.

    Args:
        folder: with ``config.json`` or ``adapter_config.json``.
        base: model of an adapter whose own base cannot be found.
        dtype: of the weights.

    Raises:
        ModelError: it cannot be loaded.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    try:
        with no_progress_bars(), ignore_peft_warnings():
            if (folder / ADAPTER).is_file():
                whole, absent = load_plain(base_folder(folder, base), dtype=dtype)
                _grow(whole, folder / WEIGHTS)
                return PeftModel.from_pretrained(whole, str(folder)).eval(), absent
            named = (AutoConfig.from_pretrained(str(folder)).architectures or [""])[0]  # also of towers
            kind: Any = getattr(transformers, named, AutoModelForCausalLM)
            model, told = kind.from_pretrained(str(folder), **options)
    except LOAD_ERRORS as error:
        what = f"plain transformers cannot load it: {first_line(error)}"
        remedy = "check the folder; name the base model of an adapter with --base"
        raise ModelError(what, where=str(folder), remedy=remedy, code="verify.target_unusable") from error
    return model.to(device).eval(), sorted({*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])})


def _grow(model: Any, adapter: Path) -> None:
    """Give the base model as many rows as an adapter with added tokens brings; peft leaves that to its user."""
    embedding = model.get_input_embeddings().weight
    names = {name for name, one in model.named_parameters(remove_duplicate=False) if one is embedding}
    if not adapter.is_file():
        return
    with safe_open(adapter, "pt") as file:
        shapes = [file.get_slice(key).get_shape() for key in file.keys() if key.removeprefix(_PEFT) in names]  # noqa: SIM118
    if shapes and shapes[0][0] != len(embedding):
        model.resize_token_embeddings(shapes[0][0], mean_resizing=False)


def base_folder(adapter: Path, base: str = "") -> Path:
    """The folder or hub id of an adapter's base model: ``base``, or the one that the adapter names."""
    named = base or str(read_json(adapter / ADAPTER).get("base_model_name_or_path"))
    return locate(ModelSection(name_or_path=named)) if named.startswith("builtin:") else Path(named)


def plain_tokenizer(folder: Path, base: str = "") -> Any:
    """The tokenizer beside a model, or an adapter's base model's.

    Raises:
        ModelError: there is none.
    """
    named = str(base_folder(folder, base)) if base or (folder / ADAPTER).is_file() else ""
    own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    try:
        return AutoTokenizer.from_pretrained(str(folder) if own or not named else named)
    except LOAD_ERRORS as error:
        what = f"its tokenizer cannot be loaded: {first_line(error)}"
        raise ModelError(
            what, where=str(folder), remedy="copy the tokenizer beside the model", code="verify.target_unusable"
        ) from error
