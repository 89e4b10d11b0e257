"""Loads a model: reads its checkpoint, and then applies the rows of ``AFTER_LOAD``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedModel

from halftune.config.facts.safetensors_headers import read_headers
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.model.attention.experts import route_experts
from halftune.model.attention.linear import route_linear_layers
from halftune.model.attention.qk_dtype import cast_qk_to_compute_dtype
from halftune.model.attention.register import current_guard, guard_imported_kernels, register_attention
from halftune.model.files.architectures import is_multimodal, read_config, remote_class, runs_its_code
from halftune.model.files.locate import locate
from halftune.model.load.lazy_weights import LazyWeights
from halftune.model.load.own_dtypes import mark_kept_by_code
from halftune.model.load.quantised.formats import compute_as_planned
from halftune.model.load.read_weights import Loading, check_complete, read
from halftune.model.load.remote_code import accept_arguments_of_peft
from halftune.model.load.runtime_buffers import compute_in_fp32
from halftune.model.load.tower_attention import guard_towers
from halftune.model.load.towers import detach_towers, record_prediction_heads, towers_called_for_text
from halftune.model.load.weight_range import RangeCheck
from halftune.model.tokenizer.added_tokens import add_rows
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.model.tokenizer.vocabulary import sync_tying_config
from halftune.plan import Plan


def load_model(
    model: ModelSection, plan: Plan, *, for_training: bool = True, lazy: LazyWeights | None = None, seed: int = 0
) -> PreTrainedModel:
    """Load the model on the CPU, with weights in ``plan.precision.storage`` and attention behind the plan's guard.

    Parameters that match ``keep_fp32``, or that the model's code keeps in fp32, are read directly as fp32, and so are
    buffers of remote code. Rotary tables are fp32. A multimodal checkpoint is loaded with the class in its config.json;
    its towers are frozen, and removed if text does not use them.

    Args:
        model: the checkpoint.
        plan: gives dtypes, attention backend and gradient checkpointing.
        for_training: if False, no weight requires a gradient and the key-value cache is enabled.
        lazy: if given, weights stay on the meta device and their sources are recorded in it.
        seed: of the weights of a new score head.

    Raises:
        ModelError: the checkpoint cannot be read, or weights are missing, of the wrong shape, or too large for fp16.
    """
    folder = locate(model)
    remote_code = runs_its_code(folder, trust_remote_code=model.trust_remote_code) and remote_class(folder) is not None
    weights, attention = RangeCheck(folder, plan), register_attention(plan)
    config = read_config(folder, trust_remote_code=False) if is_multimodal(folder, model) else None
    files = LazyWeights() if lazy is None and config is not None else lazy
    loading = Loading(model, plan, for_training, lazy, seed, folder, remote_code, attention, config, files, weights)
    loaded, keys = read(loading)
    check_complete(keys, loading)
    loading = replace(loading, unknown=tuple(keys["unexpected_keys"]))
    for row in AFTER_LOAD:
        if row.applies(loading):
            row.apply(loaded, loading)
    return loaded


def _always(_load: Loading) -> bool:
    return True


class Step(NamedTuple):
    """A row of ``AFTER_LOAD``.

    Attributes:
        name: what is done to a model that has been read.
        applies: whether this one needs it.
        apply: changes the model in place; raises ``ModelError`` where that is not possible.
    """

    name: str
    applies: Callable[[Loading], bool]
    apply: Callable[[PreTrainedModel, Loading], object]


def _use_towers(model: PreTrainedModel, load: Loading) -> None:
    """Guard a model's towers if the plan uses them; else detach those that text does not use."""
    assert load.config is not None
    assert load.files is not None
    used = load.plan.towers is not None and load.plan.towers.value == "used"
    detach_towers(model, None if used else towers_called_for_text(load.config), load.files)
    if used:
        guard_towers(model, load.plan, load.attention)


def _grow_vocabulary(model: PreTrainedModel, load: Loading) -> None:
    tokens = len(load_tokenizer(load.section))
    add_rows(model, tokens, load.section.tokens, lazy=load.lazy is not None)


def _make_buffers(model: PreTrainedModel, load: Loading) -> None:
    assert load.lazy is not None
    load.lazy.materialise_buffers(model)
    load.lazy.check = load.weights.tensor


def _install_score_head(model: PreTrainedModel, load: Loading) -> None:
    from halftune.model.load.score_head import install  # imports peft

    install(model, load.section, load.seed, new="score.weight" not in read_headers(load.folder))


def _name(model: PreTrainedModel, load: Loading) -> None:
    model.config.name_or_path = model.name_or_path = load.section.name_or_path  # not a folder in a cache


def _prepare_inference(model: PreTrainedModel, _: Loading) -> None:
    current_guard().watch(model)
    model.requires_grad_(False).eval()


def _prepare_training(model: PreTrainedModel, load: Loading) -> None:
    model.config.use_cache = False
    if load.plan.batch.gradient_checkpointing.value:
        recompute_activations(model)
    model.train()


def recompute_activations(model: PreTrainedModel) -> None:
    """Enable non-reentrant gradient checkpointing, by this transformers version's method name.

    Raises:
        ModelError: the architecture does not support it.
    """
    if not model.supports_gradient_checkpointing:
        what = f"{type(model).__name__} does not support gradient checkpointing"
        raise ModelError(
            what,
            remedy="set training.gradient_checkpointing: false, and reduce the batch size",
            code="model.no_gradient_checkpointing",
        )
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


AFTER_LOAD = (
    # first: no other row concerns what it removes
    Step("towers", lambda load: load.config is not None, _use_towers),
    # these two before rows that add weights or change dtypes: they tell what became of the tensors in the files
    Step(
        "rounded weights",
        lambda load: load.plan.weights.origin == "checkpoint" and not load.quantised,
        lambda model, load: load.weights.log_rounding(model, load.plan),
    ),
    Step(
        "prediction heads",
        lambda load: not load.quantised,
        lambda model, load: record_prediction_heads(model, load.folder, load.unknown),
    ),
    # before lazy loading, which records the weights as they then are
    Step("added tokens", lambda load: bool(load.section.tokens.add), _grow_vocabulary),
    # before every other row that adds or changes tensors: it initialises again what has no values
    Step("lazy loading", lambda load: load.lazy is not None, _make_buffers),
    Step("score head", lambda load: load.scores, _install_score_head),
    # after lazy loading, which computes these buffers in the storage dtype
    Step("runtime buffers", _always, lambda model, load: compute_in_fp32(model, load.section)),
    # these three in any order: each looks at layers of its own
    Step(
        "linear attention",
        lambda load: load.plan.attention.linear.value != "none",
        lambda model, load: route_linear_layers(model, load.plan),
    ),
    Step("experts", _always, lambda model, load: route_experts(model, load.plan)),
    Step(
        "4-bit layers",
        _always,
        lambda model, load: compute_as_planned(model, load.plan, for_training=load.for_training),
    ),
    # after all rows that add tensors or change their dtypes
    Step("marks of fp32 weights", _always, lambda model, load: mark_kept_by_code(model, load.plan)),
    # after the marks: what stays fp32 may exceed the range of fp16
    Step("range of weights", _always, lambda model, load: load.weights.model(model)),
    # after added tokens, for which transformers ties the output layer again
    Step("tying in the config", _always, lambda model, _: sync_tying_config(model)),
    Step("dtype of query and key", _always, lambda model, load: cast_qk_to_compute_dtype(model, load.plan)),
    # after linear attention: this scope then opens before that one, which decides about functions that both replace
    Step("imported kernels", _always, lambda model, load: guard_imported_kernels(model, remote_code=load.remote_code)),
    # in any order with the two above, which wrap `forward`, too
    Step(
        "arguments of peft",
        lambda load: load.remote_code,
        lambda model, load: accept_arguments_of_peft(model, load.section),
    ),
    # before the guard watches the model: it tells places in code by this name
    Step("name", _always, _name),
    # last: everything is there that is frozen, watched or switched to its mode
    Step("inference", lambda load: not load.for_training, _prepare_inference),
    Step("training", lambda load: load.for_training, _prepare_training),
)
