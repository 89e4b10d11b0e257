"""The targets of ``--quantize``: the merged model in fewer bits, as plain transformers loads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from halftune.core.errors import ModelError
from halftune.core.optional import need
from halftune.export.options import Options
from halftune.model.files.architectures import is_multimodal, no_progress_bars, remote_class
from halftune.model.files.locate import locate
from halftune.model.result.completed_run import CompletedRun
from halftune.model.result.merge import logits_of, random_ids
from halftune.model.result.save import save_tokenizer
from halftune.model.tokenizer.tokenizer import load_tokenizer


def _nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _int8(_dtype: torch.dtype) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_8bit=True)


def _fp8(_dtype: torch.dtype) -> TorchAoConfig:
    return TorchAoConfig(need("torchao.quantization", why="fp8").Float8WeightOnlyConfig())


def _int8_weights(_dtype: torch.dtype) -> TorchAoConfig:
    return TorchAoConfig(need("torchao.quantization", why="int8-wo").Int8WeightOnlyConfig())


FORMATS: dict[str, Callable[[torch.dtype], Any]] = {"nf4": _nf4, "int8": _int8, "fp8": _fp8, "int8-wo": _int8_weights}
"""Name → the quantisation config for the dtype of what is not quantised. Each was saved and loaded again on a CPU;
torchao's int4 weights were not: their packings are made on a GPU only."""


def check(run: CompletedRun, options: Options) -> None:
    """Check that transformers alone can load the model.

    Raises:
        ModelError: it is multimodal, a reward model, or built by its own code.
    """
    folder = locate(run.result)
    if is_multimodal(folder, run.result) or remote_class(folder) is not None or run.loaded.run.method.type == "reward":
        what = f"--quantize {options.target} takes language models of transformers only"
        remedy = "export without --quantize, and quantise the folder with a tool for this model"
        raise ModelError(what, where=str(folder), remedy=remedy, code="export.quantize_unsupported")


def write(run: CompletedRun, merged: Path, output: Path, options: Options) -> list[str]:
    """Quantise the merged model, save it, load it again with plain transformers, and compare the logits.

    Args:
        run: the run.
        merged: folder of the merged model.
        output: an empty folder.
        options: names the format.

    Returns:
        lines for the terminal.

    Raises:
        ModelError: the saved model's logits are not finite.
    """
    plain = _load(merged, dtype="auto")
    ids_BT = random_ids(plain)
    expected_BTV = logits_of(plain, ids_BT)
    settings = FORMATS[options.target](plain.dtype)
    dtype = plain.dtype
    del plain
    # Saved before a forward pass: on some CPUs, bitsandbytes packs 4-bit weights anew there, and saves them so.
    quantised = _load(merged, dtype=dtype, quantization_config=settings)
    with no_progress_bars():
        quantised.save_pretrained(output)
    del quantised
    save_tokenizer(load_tokenizer(run.result), output)
    actual_BTV = logits_of(_load(output), ids_BT)
    error = float((actual_BTV - expected_BTV).norm() / expected_BTV.norm())
    if not error < float("inf"):
        what = f"the model in {options.target} gives logits that are not finite"
        raise ModelError(what, remedy="use another format", code="export.quantize_unsupported")
    before, after = (sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (merged, output))
    return [
        f"{options.output}: linear layers in {options.target}, {after / before:.0%} of the merged model's bytes",
        f"loaded again with transformers: relative logit error {error:.1e} against the model that is not quantised",
    ]


def _load(folder: Path, **arguments: Any) -> PreTrainedModel:
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(folder, **arguments).eval()
