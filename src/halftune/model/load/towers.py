"""Parts of a checkpoint outside its language model: frozen, usually not in memory, and copied to the result.

Towers are all modules except the language model and its head: vision and audio encoders and their projectors. A small
copy of the model runs on text to find the towers that its code calls. The others are removed from the model, and saving
copies their tensors from the base model's files. So it does with weights for multi-token prediction, which
transformers' classes ignore.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, initialization

from halftune.config.facts.architecture import prediction_heads
from halftune.config.facts.safetensors_headers import read_headers, weight_files
from halftune.config.facts.wrapped import tensors_around, unwrapped, wrapper_of
from halftune.core.errors import HalftuneError, ModelError
from halftune.core.log import get_logger
from halftune.model.attention.packing_check import REFUSALS, VOCABULARY, randomise, shrunk_config, silent
from halftune.model.files.architectures import multimodal_auto
from halftune.model.files.load_errors import first_line
from halftune.model.load.lazy_weights import LazyWeights, why_not
from halftune.model.load.runtime_buffers import without_weights

# Attributes of a loaded model. A model around it (peft's) passes attributes on, but has no towers of its own.
_TOWERS, _PREDICTION_HEADS = "halftune_towers", "halftune_prediction_heads"


def record_prediction_heads(model: PreTrainedModel, folder: Path, unexpected: Iterable[str]) -> None:
    """Record the tensors for multi-token prediction that the model does not load.

    Args:
        model: as loaded by ``from_pretrained``.
        folder: of its checkpoint.
        unexpected: unexpected tensors, without those that its class ignores.
    """
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or ()) or r"(?!)")
    layers: int = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", sys.maxsize)
    found, unexpected = prediction_heads(read_headers(folder), layers), set(unexpected)
    if names := tuple(name for name in found if name in unexpected or ignored.search(name)):
        setattr(model, _PREDICTION_HEADS, (folder, names))
        log.info(
            "copying %d tensors for multi-token prediction unchanged, first %s, from %s", len(names), names[0], folder
        )


def stored_prediction_heads(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]] | None:
    """The recorded tensors from the files, as an iterator; None if there are none.

    Raises:
        OSError, SafetensorError: while iterating, a file is missing or was replaced.
    """
    found = vars(model).get(_PREDICTION_HEADS)
    return None if found is None else as_stored(*found)


def as_stored(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over tensors of a checkpoint's files.

    Raises:
        OSError, SafetensorError: a file cannot be read, or a tensor is missing.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118, not a mapping
        for name in names:
            if name not in places:
                raise OSError(f"tensor {name} is missing from the files of {folder}")
            yield name, places[name].get_tensor(name)


log = get_logger(__name__)

PROCESSORS = "*processor_config.json"
_TOKENIZERS = {"voxtral": ("tekken.json",)}  # of processors that do not read ours


@dataclass(frozen=True)
class Towers:
    """The towers of a model.

    Attributes:
        folder: checkpoint with their tensors.
        names: of frozen modules and parameters, as in ``model.named_modules()`` and ``named_parameters()``.
        tensors: names of the frozen ones in the checkpoint's files.
        roots: names of all towers, also of those that are trained.
        sources: names of a tensor in the model → in the checkpoint's files.
    """

    folder: Path
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    roots: tuple[str, ...] = ()
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def own(self, name: str) -> bool:
        """Whether the module or tensor of this name belongs to a frozen part of a tower."""
        return _below(name, self.names)

    def contain(self, name: str) -> bool:
        """Whether the module or tensor of this name belongs to a tower, frozen or trained."""
        return _below(name, self.roots or self.names)

    @property
    def pattern(self) -> str | None:
        """A regular expression for the full names of their frozen modules; None if there are none."""
        return rf"({'|'.join(re.escape(name) for name in self.names)})(\..*)?" if self.names else None

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over their tensors in the checkpoint's files.

        Raises:
            OSError, SafetensorError: a file cannot be read, or a tensor is missing.
        """
        return as_stored(self.folder, self.tensors)

    def complete(self, config: dict[str, Any], text: str, folder: Path) -> dict[str, Any]:
        """Copy processor files and the towers' sub-configs to a saved model; return its config.

        Args:
            config: the saved model's config.
            text: name of the language model's sub-config.
            folder: folder of the saved model.
        """
        outer = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        row, base = wrapper_of(outer), unwrapped(outer)
        made = config | {name: part for name, part in base.items() if isinstance(part, dict) and _describes(name, text)}
        files = _TOKENIZERS.get(str(outer.get("model_type")), ()) if row is None else row.files
        if self.folder != folder:
            beside = filter(Path.is_file, map(self.folder.joinpath, files))
            for path in (*self.folder.glob(PROCESSORS), *beside):
                shutil.copyfile(path, folder / path.name)
        if row is None:
            return made
        around = {key: value for key, value in outer.items() if key != "torch_dtype"}
        return {**around, row.part: made, "dtype": made.get("dtype")}


def _below(name: str, roots: Sequence[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def _describes(name: str, text: str) -> bool:
    """Whether a sub-config of config.json is a tower's."""
    return name.endswith("_config") and name not in (text, "quantization_config", "generation_config")


def towers_of(model: nn.Module) -> Towers | None:
    """The towers of a model from ``load_model``; None for a plain language model."""
    return vars(model).get(_TOWERS)


def set_towers(model: nn.Module, towers: Towers) -> None:
    """Record a model's towers."""
    setattr(model, _TOWERS, towers)


class NotLoaded(nn.Module):
    """Placeholder of a removed tower."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise an error.

        Raises:
            ModelError: always.
        """
        what = "tower not loaded (text-only run)"
        raise ModelError(what, remedy="pass text inputs only", code="model.wrong_use")


def text_config_name(config: PretrainedConfig) -> str:
    """Name of the language model's sub-config; empty if it is the config itself."""
    text = config.get_text_config(decoder=True)
    return next((name for name in config.sub_configs if vars(config).get(name) is text), "")


def for_parts(config: PretrainedConfig, attention: str) -> dict[str, str]:
    """``attn_implementation`` per sub-config; towers use eager, which all support.

    Some towers look up the name in their own table. Some outer classes, which compute no attention, reject names with
    ``sdpa``.
    """
    outer: Any = multimodal_auto(config)._model_mapping[type(config)]
    text = text_config_name(config)
    towers = {name: attention if name == text else "eager" for name in config.sub_configs}
    return {"": "eager" if text and "sdpa" in attention and not outer._supports_sdpa else attention, **towers}


def tower_names(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules and direct parameters that belong to neither the language model nor its head."""
    whole: Any = model
    parts = (whole.get_decoder(), whole.get_output_embeddings(), whole.get_input_embeddings())
    language = {id(part) for part in parts if part is not None}
    return () if id(model) in language else tuple(_outside(language, model))


def _outside(language: set[int], module: nn.Module, path: str = "") -> Iterator[str]:
    """Names of the parts below ``module`` that contain no module of ``language`` and are in none."""
    for name, child in module.named_children():
        if id(child) in language:
            continue
        if language & {id(inner) for inner in child.modules()}:
            yield from _outside(language, child, f"{path}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{path}{name}"
    yield from (f"{path}{name}" for name, parameter in module._parameters.items() if parameter is not None)


def _remove(model: PreTrainedModel, name: str) -> None:
    path, _, leaf = name.rpartition(".")
    parent = model.get_submodule(path)
    if leaf in parent._parameters:
        parent._parameters[leaf] = None
    else:
        setattr(parent, leaf, NotLoaded())


def detach_towers(model: PreTrainedModel, called: frozenset[str] | None, files: LazyWeights) -> None:
    """Freeze a model's towers, record their source tensors, and remove those that text does not need.

    Args:
        model: as loaded by ``from_pretrained``.
        called: names of towers that are also called for text; None if unknown.
        files: the recorded sources of weights.
    """
    names = tower_names(model)
    if not names:
        return
    towers = Towers(files.folder, names, ())
    own = [name for name in model.state_dict() if towers.own(name)]
    _check_found(model, towers, files)
    others, kind = tensors_around(files.folder), type(model).__name__
    sources = {name: tuple(files.sources([name])) for name in own}
    towers = Towers(files.folder, names, (*sorted(files.sources(own)), *others), names, sources)
    set_towers(model, towers)
    frozen = [one for name, one in model.named_parameters() if towers.own(name)]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for name in set(names) - called if called is not None else ():
        _remove(model, name)
    if others:
        parts = ", ".join(sorted({name.partition(".")[0] for name in others}))
        log.info("%s: left out %s (%d tensors), copied on save", kind, parts, len(others))
    count = f"{sum(map(torch.numel, frozen)):,}"
    log.info("%s: froze %s (%s parameters), copied from %s on save", kind, ", ".join(names), count, files.folder)


def _check_found(model: PreTrainedModel, towers: Towers, files: LazyWeights) -> None:
    """Check that the source of each tower weight is recorded.

    Raises:
        ModelError: a source is unknown, so the saved model would lack the weight.
    """
    named = [(name, one) for name, one in model.named_parameters(remove_duplicate=False) if towers.own(name)]
    found = {id(one) for name, one in named if files.sources([name])}
    lost = next((name for name, one in named if id(one) not in found), "")
    if lost:
        what = f"cannot find the source of {lost} in the checkpoint{'; ' if (why := why_not()) else ''}{why}"
        raise ModelError(
            what,
            where=str(files.folder),
            remedy="set model.parts: text to train the language model alone",
            code="model.towers_not_found",
        )


def small_multimodal_copy(config: PretrainedConfig) -> PreTrainedModel:
    """As ``small_copy``, but of the multimodal class; its towers are on the meta device.

    Raises:
        Exception: the model's code does not support such small sizes.
    """
    text = config.get_text_config(decoder=True)
    small = type(text).from_dict(shrunk_config(text))
    whole = copy.deepcopy(config) if text is not config else small
    if text is not config:
        setattr(whole, text_config_name(config), small)
    for name, value in vars(whole).items():  # keep random tokens from being image placeholders
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value < VOCABULARY:
            setattr(whole, name, VOCABULARY + value)
    whole.dtype, whole._attn_implementation = torch.float32, "eager"
    with initialization.no_init_weights(), without_weights():
        model = multimodal_auto(whole).from_config(whole, dtype=torch.float32, attn_implementation="eager")
    towers = Towers(Path(), tower_names(model), ())
    _init_weights(model, [name for name, _ in model.named_parameters() if not towers.own(name)])
    for name in tower_names(model):  # Idefics 3 computes where its first parameter is, which is a tower's
        parent = model.get_submodule(name.rpartition(".")[0])
        parent.register_parameter("on_cpu", nn.Parameter(torch.empty(0), requires_grad=False))
    return model.eval()


def _init_weights(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Initialise weights on the meta device with the model's code, then randomise them."""
    given = []
    for name in names:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        old = parent._parameters[leaf]
        assert old is not None
        parent._parameters[leaf] = new = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=False)
        given.append(new)
    for module in model.modules():
        module._is_hf_initialized = False  # pyright: ignore[reportArgumentType]
    model.initialize_weights()
    model.tie_weights()
    randomise(given)


class _Probe(NotLoaded):
    """Placeholder of a tower that raises when it is used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __getattr__(self, _name: str) -> Any:
        raise _TowerCalled(self.name)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raise ``_TowerCalled``."""
        raise _TowerCalled(self.name)


class _TowerCalled(Exception):
    """A tower was used; the argument is its name."""


def towers_called_for_text(config: PretrainedConfig) -> frozenset[str] | None:
    """Names of the towers that a model's code calls for text inputs, found on a small copy.

    None if the copy cannot be built or run.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            with silent():
                return _called(small_multimodal_copy(config).train())
        except REFUSALS as refusal:
            said = refusal.what if isinstance(refusal, HalftuneError) else first_line(refusal)
            log.warning("%s: loading all towers (cannot run a small copy on text: %s)", config.model_type, said)
            return None


def _called(model: PreTrainedModel) -> frozenset[str]:
    found = {name: attrgetter(name)(model) for name in tower_names(model)}
    towers = {name: one for name, one in found.items() if isinstance(one, nn.Module)}
    for name in towers:
        _replace_module(model, name, _Probe(name))
    called: set[str] = set()
    while True:
        try:
            model(input_ids=torch.randint(3, VOCABULARY, (1, 4)), use_cache=False)
        except _TowerCalled as wanted:
            (name,) = wanted.args
            if name in called:
                raise
            called.add(name)
            _replace_module(model, name, towers[name])
            _init_weights(model, [one for one, _ in model.named_parameters() if one.startswith(f"{name}.")])
            continue
        return frozenset(called)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
