"""Verifies on a small copy of the model, before training, that packed samples do not attend to each other."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from halftune.core.choice import Choice
from halftune.core.errors import HalftuneError, ModelError
from halftune.model.attention.linear import routed_linear_layers
from halftune.model.attention.register import registered_attention
from halftune.model.files.load_errors import first_line
from halftune.plan import Plan

LENGTHS = (11, 19, 6)  # longer than the reduced window, all different
TOLERANCE = 1e-5
VOCABULARY, _MAX_LAYERS = 128, 8  # of the copy
_VECTOR_NOISE = 0.1
CANNOT_RUN = "cannot run packed rows"
# Upper limits of sizes that only cost time; windows are shorter than the samples.
_LIMITS = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 8),
    "num_kv_shared_layers": 0,
    "value_dim": 64,
}
# State-space layers: (heads, head size, inner width over hidden width, groups), by the families' config keys.
_STATE_SPACE = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand", "mamba_ngroups"),
    ("mamba_num_heads", "mamba_head_dim", "expand", "n_groups"),
    ("num_heads", "head_dim", "expand", "n_groups"),
)
_NO_HEADS = 64  # hidden size of the copy of a model without attention

# Errors of third-party model code that does not support the check: its own (ValueError; ImportError for a missing
# package), torch's shape and kernel errors (RuntimeError with NotImplementedError), unknown forward arguments
# (TypeError), assertions, fields or layers missing in the reduced config (lookups), and our own errors.
REFUSALS = (
    ValueError,
    RuntimeError,
    TypeError,
    AssertionError,
    AttributeError,
    LookupError,
    ImportError,
    StrictDataclassError,
    HalftuneError,
)


def packing_verdict(
    model_config: PretrainedConfig, plan: Plan, copy_of: Callable[[PretrainedConfig], PreTrainedModel] | None = None
) -> Choice[bool]:
    """Check that each sample of a packed row gets the same logits as alone.

    A small fp32 copy with random weights (each kind of layer at least once) runs three samples packed, and each alone
    with the model's eager attention, on the CPU. Takes well under a second; does not change the global random state.

    Args:
        model_config: config of the model to train.
        plan: attention and number formats, adapted to the CPU.
        copy_of: builds the copy; default :func:`small_copy` of the language model.
    """
    kind = model_config.model_type
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            with silent():
                model = (copy_of or small_copy)(model_config)
                here = _on_cpu(plan, model)
                with registered_attention(here) as name, _routed_linear_layers(model, here):
                    error = packing_error(model, name)
                    alone = packing_error(model, name, LENGTHS[1:2])  # longer than the window
        except REFUSALS as refusal:
            if not isinstance(refusal, HalftuneError) and _raised_by_us(refusal):
                raise
            said = (
                refusal.what if isinstance(refusal, HalftuneError) else first_line(refusal)
            )  # the caller adds the remedy
            return Choice(False, f"a small copy of {kind} {CANNOT_RUN}: {said}")
    if error > TOLERANCE:
        what = f"packed samples of {kind} attend to each other"
        if alone > TOLERANCE:  # no other sample is there
            what = f"the window is lost, or what else only the masks of {kind} have, in packed rows"
        return Choice(False, f"{what}: relative logit error {error:.1e} on a small copy")
    return Choice(True, f"packed samples of {kind} get the same logits as alone (error {error:.0e} on a small copy)")


def _routed_linear_layers(model: PreTrainedModel, plan: Plan) -> AbstractContextManager[None]:
    return nullcontext() if plan.attention.linear.value == "none" else routed_linear_layers(model, plan)


def _raised_by_us(error: BaseException) -> bool:
    """Whether halftune's own code raised the error, which would be a bug."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "").partition(".")[0] == "halftune"


def packing_error(model: PreTrainedModel, attention: str, lengths: tuple[int, ...] = LENGTHS) -> float:
    """Largest relative difference of a sample's logits in a packed row and alone.

    Args:
        model: in eval mode, on the CPU.
        attention: attention implementation for packed rows; single samples use eager.
        lengths: tokens per sample.

    Raises:
        ModelError: the model does not use transformers' attention interface.
    """
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)))
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        raise ModelError("the model has its own attention code", code="attention.packing_unsupported")
    packed = model(**packed_row(ids, lengths), use_cache=False).logits.split(lengths, 1)
    model.set_attn_implementation("eager")
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(packed, alone, strict=True))


def packed_row(ids: torch.Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Inputs of a packed row, as from the collator: ``ids`` ``[1, T]`` with samples of ``lengths``."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    sample = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "seq_idx": sample[None],
    }


def small_copy(model_config: PretrainedConfig) -> PreTrainedModel:
    """A small model of the same architecture and flags: few narrow layers, small vocabulary, fp32, random weights."""
    text = model_config.get_text_config(decoder=True)
    small = type(text).from_dict(shrunk_config(text))
    remote = type(text).__module__.startswith("transformers_modules")  # its code was allowed to load the model already
    model = AutoModelForCausalLM.from_config(
        small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=remote
    )
    randomise(model.parameters())
    return model.eval()


def randomise(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Set random weights that make leaks visible.

    With the usual small initialisation, attention and so a leak would be too weak to detect; vectors of zeros or ones
    may disable what they scale.
    """
    for parameter in parameters:
        if parameter.ndim > 1:
            parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(_VECTOR_NOISE * torch.randn_like(parameter))


def shrunk_config(
    config: PretrainedConfig, *, narrow: bool = True, vocabulary: int = VOCABULARY, first: int = 0
) -> dict[str, Any]:
    """The config's values with reduced sizes; flags, kinds of layers and head sizes stay.

    ``narrow=False`` also keeps the hidden size and the heads, for compiling kernels. The ``first`` layers all stay.
    """
    values = config.to_dict()
    values.pop("quantization_config", None)
    layers = sorted({*_kinds_of_layers(config, values), *range(min(first, config.num_hidden_layers))})
    sizes = {
        **(_widths(config, values) if narrow else {}),
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_hidden_layers": len(layers),
    }
    numbered = {
        name: [new for new, index in enumerate(layers) if index in value]
        for name, value in _numbers_of_layers(config, values).items()
    }
    values = {name: _of_layers(value, layers, config.num_hidden_layers) for name, value in values.items()} | numbered
    limits = dict(_LIMITS)
    if not narrow:
        limits.pop("value_dim", None)
    values |= {name: _limited(values[name], most) for name, most in _known(config, values, limits).items()}
    small = values | _known(config, values, sizes)
    return small | (_state_space_widths(small, sizes["hidden_size"]) if narrow else {})


def _known(config: PretrainedConfig, values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of ``given`` that the config has, by its own names for them."""
    named = {config.attribute_map.get(name, name): value for name, value in given.items()}
    return {name: value for name, value in named.items() if name in values}


def _widths(config: PretrainedConfig, values: dict[str, Any]) -> dict[str, int]:
    """Heads and hidden size: at most two key heads with two query heads each, of unchanged head size."""
    if config.attribute_map.get("num_attention_heads", "num_attention_heads") not in values:
        return {"hidden_size": max(_NO_HEADS, values.get("head_dim") or 0)}
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = values.get("num_key_value_heads") or heads
    few_kv = min(kv_heads, 2)
    few = few_kv * min(heads // kv_heads, 2)
    head_size = values.get("head_dim") or hidden // heads
    return {"num_attention_heads": few, "num_key_value_heads": few_kv, "hidden_size": few * head_size}


def _state_space_widths(values: dict[str, Any], hidden: int) -> dict[str, int]:
    """As many heads as fit into the inner width of a state-space layer, in one group."""
    for heads, head_size, expand, groups in _STATE_SPACE:
        if all(isinstance(values.get(name), int) for name in (heads, head_size, expand, groups)):
            width = values[expand] * hidden
            size = math.gcd(values[head_size], width)
            count = width // size
            more = {"mamba_d_ssm": count * size} if "mamba_d_ssm" in values else {}
            if "attention_hidden_size" in values:  # attention over the stream and the embeddings, side by side
                head = 2 * hidden // values["num_attention_heads"]
                more |= {"attention_hidden_size": 2 * hidden, "attention_head_dim": head}
            return {heads: count, head_size: size, groups: 1, **more}
    return {}


def _of_layers(value: Any, layers: list[int], count: int) -> Any:
    """What a value says about ``layers`` where it is a list or a dict with one entry for each of ``count`` layers."""
    if isinstance(value, list) and len(value) == count:
        return [value[index] for index in layers]
    if isinstance(value, dict) and all(str(key).isdigit() for key in value):
        by_layer = {int(key): entry for key, entry in value.items()}
        return {new: by_layer[old] for new, old in enumerate(layers) if old in by_layer}
    return value


def _numbers_of_layers(config: PretrainedConfig, values: dict[str, Any]) -> dict[str, list[int]]:
    """The values that list the numbers of some layers, where others have one entry for each."""
    count = config.num_hidden_layers
    return {
        name: value
        for name, value in values.items()
        if "layer" in name
        and isinstance(value, list)
        and value
        and all(type(one) is int and one < count for one in value)
        and all(one < other for one, other in pairwise(value))
    }


def _limited(value: Any, most: int) -> Any:
    if isinstance(value, list):
        return [_limited(entry, most) for entry in value]
    return min(value, most) if isinstance(value, int) else value


def _kinds_of_layers(config: PretrainedConfig, values: dict[str, Any]) -> list[int]:
    """Indices of layers such that each kind occurs, at least two where the model has two."""
    count = config.num_hidden_layers
    numbers = _numbers_of_layers(config, values)
    per_layer = [
        value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == count and name not in numbers
    ]
    per_layer += [[index in value for index in range(count)] for value in numbers.values() if len(value) < count]
    if not per_layer:
        endings = ("_interval", "_period", "_pattern", "_step")
        periods = [value for name, value in values.items() if name.endswith(endings) and isinstance(value, int)]
        return list(range(min(count, max([2, *periods]), _MAX_LAYERS)))
    first: dict[str, int] = {}
    for index, kind in enumerate(zip(*per_layer, strict=True)):
        first.setdefault(repr(kind), index)
    kinds = list(first.values())[:_MAX_LAYERS]
    return kinds if len(kinds) > 1 else list(range(min(count, 2)))


def _on_cpu(plan: Plan, model: PreTrainedModel) -> Plan:
    """The plan for the check: packed, fp32, on the CPU; eager for models that need it."""
    why = "the packing check runs on the CPU"
    softmax = "sdpa" if plan.attention.softmax.value != "eager" and model._supports_sdpa else "eager"
    attention = replace(
        plan.attention,
        softmax=Choice(softmax, why),
        provider=Choice("transformers" if softmax == "eager" else "torch", why),
        varlen=Choice("segments", why),
        linear=Choice("halftune", why) if plan.attention.linear.value == "fla" else plan.attention.linear,
        guard="off",
    )
    precision = replace(plan.precision, compute=Choice("fp32", why))
    return replace(plan, attention=attention, precision=precision, batch=replace(plan.batch, packing=Choice(True, why)))


@contextmanager
def silent() -> Iterator[None]:
    """Silence transformers' warnings about the copy, which would seem to be about the model."""
    shown = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(shown)
