"""The command line that serves runs on vLLM as they were trained, without vLLM or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from halftune.config.facts.folder import read_json
from halftune.core.atomic import write_text
from halftune.core.errors import ModelError
from halftune.export.vllm import obstacles, rank_limit
from halftune.model.result.completed_run import CompletedRun

KEY = "VLLM_API_KEY"  # an argument would show it to every user of the machine
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_QUANTISED = {"nf4": "bitsandbytes", "nf4_single": "bitsandbytes", "int8": "bitsandbytes"}
_TEMPLATE = "chat_template.jinja"


def vllm_command(
    runs: Mapping[str, CompletedRun], base: str | None, *, host: str, port: int, max_tokens: int | None
) -> list[str]:
    """The command, and beside the first run's result the file of decoding settings that it names.

    Args:
        runs: name → run, of one base; see `runs.open_runs`.
        base: name of the base; None for a full model.
        host: address to listen on.
        port: port to listen on.
        max_tokens: of prompt and answer together at most; None: vLLM's choice.

    Raises:
        ModelError: vLLM cannot load one of the adapters, or the runs differ in what vLLM has once.
    """
    first = next(iter(runs.values()))
    model, plan = first.result, first.plan
    name = base or next(iter(runs))
    command = ["vllm", "serve", model.name_or_path, "--served-model-name", name, "--host", host, "--port", str(port)]
    command += ["--dtype", _DTYPES[plan.precision.compute.value], "--tokenizer", str(first.final.absolute())]
    if model.revision:
        command += ["--revision", model.revision]
    if model.trust_remote_code:
        command += ["--trust-remote-code"]
    if quantised := _QUANTISED.get(model.quantization):
        command += ["--quantization", quantised]
    if max_tokens is not None:
        command += ["--max-model-len", str(max_tokens)]
    for run in runs.values():
        _check_shared(first, run)
    if (template := first.final.absolute() / _TEMPLATE).is_file():
        command += ["--chat-template", str(template)]
    command += ["--generation-config", str(_write_generation_config(first))]
    return command + (_adapters(runs) if base else [])


def _adapters(runs: Mapping[str, CompletedRun]) -> list[str]:
    configs = {name: read_json(run.final / "adapter_config.json") for name, run in runs.items()}
    for name, config in configs.items():
        if found := obstacles(config):
            what = f"vLLM does not serve the adapter as it was trained: {found[0]}"
            remedy = "use --engine transformers, or merge it: halftune export"
            raise ModelError(what, where=str(runs[name].final), remedy=remedy, code="serve.vllm_unsupported")
    rank = max(config["r"] for config in configs.values())
    modules = [f"{name}={run.final.absolute()}" for name, run in runs.items()]
    most = ["--max-loras", str(len(runs)), "--max-lora-rank", str(rank_limit(rank))]
    return ["--enable-lora", *most, "--lora-modules", *modules]


def _check_shared(first: CompletedRun, run: CompletedRun) -> None:
    """vLLM has one chat template, one tokenizer and one set of decoding defaults for all adapters.

    Raises:
        ModelError: two runs differ in them.
    """
    for name in (_TEMPLATE, "tokenizer.json"):
        ours, other = (one.final / name for one in (first, run))
        if ours.is_file() != other.is_file() or (ours.is_file() and ours.read_bytes() != other.read_bytes()):
            what = f"{name} differs from that of {first.folder.name}; vLLM has one for all adapters"
            remedy = "use --engine transformers, or serve each by a process of its own"
            raise ModelError(what, where=str(run.final), remedy=remedy, code="serve.vllm_unsupported")


def _write_generation_config(run: CompletedRun) -> Path:
    """The folder with decoding settings and stop tokens of a run: the base's own file may not list them."""
    from transformers import GenerationConfig

    from halftune.model.generate import ending_ids
    from halftune.model.tokenizer.tokenizer import load_tokenizer

    try:
        own = GenerationConfig.from_pretrained(run.result.name_or_path, revision=run.result.revision or "main")
    except OSError:  # many folders have none
        own = GenerationConfig()
    decoding = run.loaded.run.generation
    made = {
        "eos_token_id": ending_ids(load_tokenizer(run.result), own),
        "max_new_tokens": decoding.max_new_tokens,
        "temperature": float(decoding.temperature),
        "top_p": float(decoding.top_p),
        "repetition_penalty": float(decoding.repetition_penalty),
        **({"top_k": decoding.top_k} if decoding.top_k else {}),
    }
    folder = run.folder.absolute() / "serve"
    folder.mkdir(exist_ok=True)
    write_text(folder / "generation_config.json", json.dumps(made, indent=2) + "\n")
    return folder
