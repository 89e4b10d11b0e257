"""Towers of a multimodal model in a run on text: never trained, rarely in memory, and saved as they came.

What is neither the language model nor its head is a tower: vision and audio encoders, their projectors. A small copy of
the model is run on text to see which of them its code calls. The others are taken out of the model that trains, and
whatever writes a result copies their tensors from the files of the base, byte by byte.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel, initialization

from halftune.config.facts.safetensors_headers import weight_files
from halftune.core.errors import HalftuneError, ModelError
from halftune.core.log import get_logger
from halftune.model.computed import without_weights
from halftune.model.damage import first_line
from halftune.model.packing_check import REFUSALS, VOCABULARY, shrunken, silent, stir
from halftune.model.unread import Unread, why_not

log = get_logger(__name__)

PROCESSORS = "*processor_config.json"


@dataclass(frozen=True)
class Towers:
    """What a model has beside its language model.

    Attributes:
        folder: of the checkpoint that holds their tensors.
        names: of modules and parameters, as in ``model.named_modules()``.
        tensors: their names in the checkpoint's files.
    """

    folder: Path
    names: tuple[str, ...]
    tensors: tuple[str, ...]

    def own(self, name: str) -> bool:
        """Whether a module or a tensor, by its name in the model, belongs to one of them."""
        return any(name == tower or name.startswith(f"{tower}.") for tower in self.names)

    @property
    def pattern(self) -> str:
        """A regular expression that matches the full names of their modules, and nothing else's."""
        return rf"({'|'.join(re.escape(name) for name in self.names)})(\..*)?"

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Their tensors as the files have them, one after the other.

        Raises:
            OSError, SafetensorError: a file cannot be read, or a tensor is not there any more.
        """
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(self.folder)]
            places = {name: file for file in files for name in file.keys()}  # noqa: SIM118, not a mapping
            for name in self.tensors:
                if name not in places:
                    raise OSError(f"{name} is not in the files of {self.folder} any more")
                yield name, places[name].get_tensor(name)

    def complete(self, config: dict[str, Any], text: str, folder: Path) -> None:
        """Brings what a saved model needs beside its weights: processors' files, and the towers' part of its config.

        Args:
            config: of the saved model; changed in place.
            text: name of the part that describes the language model.
            folder: of the saved model.
        """
        base = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        config |= {name: part for name, part in base.items() if isinstance(part, dict) and _describes(name, text)}
        for path in self.folder.glob(PROCESSORS):
            if path.parent != folder:
                shutil.copyfile(path, folder / path.name)


def _describes(name: str, text: str) -> bool:
    """Whether a part of config.json describes a tower."""
    return name.endswith("_config") and name not in (text, "quantization_config", "generation_config")


_OF: weakref.WeakKeyDictionary[nn.Module, Towers] = weakref.WeakKeyDictionary()


def towers_of(model: nn.Module) -> Towers | None:
    """The towers of a model that ``load_model`` has made; None of a plain language model."""
    return _OF.get(model)


class NotLoaded(nn.Module):
    """Stands where a tower was."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Refuses to run.

        Raises:
            ModelError: always.
        """
        raise ModelError("this tower is not loaded: the run is on text", remedy="feed it text alone")


def text_config_name(config: PretrainedConfig) -> str:
    """Name of the part of a config that describes the language model; empty where the config itself does."""
    text = config.get_text_config(decoder=True)
    return next((name for name in config.sub_configs if vars(config).get(name) is text), "")


def beside_the_language_model(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules, and of the parameters outside of them, that are neither language model nor head."""
    whole: Any = model
    parts = (whole.get_decoder(), whole.get_output_embeddings(), whole.get_input_embeddings())
    language = {id(part) for part in parts if part is not None}
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            if id(child) in language:
                continue
            if language & {id(inner) for inner in child.modules()}:
                visit(child, f"{path}{name}.")
            elif next(child.parameters(), None) is not None:
                found.append(f"{path}{name}")
        found.extend(f"{path}{name}" for name in module._parameters if module._parameters[name] is not None)

    if id(model) not in language:
        visit(model, "")
    return tuple(found)


def set_towers_apart(model: PreTrainedModel, called: frozenset[str] | None, files: Unread) -> None:
    """Freezes a model's towers, notes where their tensors are, and takes those out that text does not need.

    Args:
        model: as ``from_pretrained`` has made it.
        called: names of towers that its code calls for text, too; None where nobody knows.
        files: has recorded where each of its weights came from.
    """
    names = beside_the_language_model(model)
    if not names:
        return
    towers = Towers(files.folder, names, ())
    own = [name for name in model.state_dict() if towers.own(name)]
    _check_found(model, towers, files)
    _OF[model] = towers = Towers(files.folder, names, tuple(sorted(files.sources(own))))
    count = sum(one.numel() for name, one in model.named_parameters() if towers.own(name))
    for name in () if called is None else set(names) - called:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        if leaf in parent._parameters:
            parent._parameters[leaf] = None
        else:
            setattr(parent, leaf, NotLoaded())
    for name, parameter in model.named_parameters():
        if towers.own(name):
            parameter.requires_grad_(False)
    log.info(
        "%s: %s (%s parameters) frozen, saved as in %s", type(model).__name__, ", ".join(names), f"{count:,}",
        files.folder,
    )  # fmt: skip


def _check_found(model: PreTrainedModel, towers: Towers, files: Unread) -> None:
    """Makes sure that it is known where in the files each weight of the towers is.

    Raises:
        ModelError: of one it is not: what is saved would lack it.
    """
    named = [(name, one) for name, one in model.named_parameters(remove_duplicate=False) if towers.own(name)]
    found = {id(one) for name, one in named if files.sources([name])}
    lost = next((name for name, one in named if id(one) not in found), "")
    if lost:
        what = f"where {lost} is in the files is not known{'; ' if (why := why_not()) else ''}{why}"
        raise ModelError(what, where=str(files.folder), remedy="model.parts: text trains the language model alone")


def small_whole(config: PretrainedConfig) -> PreTrainedModel:
    """As ``small_copy``, with the outer class around the language model; its towers have no numbers.

    Raises:
        Exception: the model's own code cannot be made so small.
    """
    whole = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    setattr(whole, text_config_name(config), type(text).from_dict(shrunken(text)))
    for name, value in vars(whole).items():  # no random token is a place holder of a picture
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value < VOCABULARY:
            setattr(whole, name, VOCABULARY + value)
    whole.dtype, whole._attn_implementation = torch.float32, "eager"
    with initialization.no_init_weights(), without_weights():
        model = AutoModelForImageTextToText.from_config(whole, dtype=torch.float32, attn_implementation="eager")
    towers = Towers(Path(), beside_the_language_model(model), ())
    _give_numbers(model, [name for name, _ in model.named_parameters() if not towers.own(name)])
    return model.eval()


def _give_numbers(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Gives weights on the meta device random numbers, as the model's code begins them, then stirs them."""
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
    stir(given)


class _Asked(NotLoaded):
    """Stands in a tower's place and tells that something was wanted of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __getattr__(self, _name: str) -> Any:
        raise _Wanted(self.name)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Tells that it was called."""
        raise _Wanted(self.name)


class _Wanted(Exception):
    """Carries the name of a tower."""


def called_for_text(config: PretrainedConfig) -> frozenset[str] | None:
    """Names of the towers that a model's code calls where it is given text alone; found on a small copy.

    None where the copy cannot be made or run, and nothing is known.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            with silent():
                return _called(small_whole(config).train())
        except REFUSALS as refusal:
            said = refusal.what if isinstance(refusal, HalftuneError) else first_line(refusal)
            log.warning("%s: all towers are loaded; a small copy does not run on text: %s", config.model_type, said)
            return None


def _called(model: PreTrainedModel) -> frozenset[str]:
    found = {name: attrgetter(name)(model) for name in beside_the_language_model(model)}
    towers = {name: one for name, one in found.items() if isinstance(one, nn.Module)}
    for name in towers:
        _put(model, name, _Asked(name))
    called: set[str] = set()
    while True:
        try:
            model(input_ids=torch.randint(3, VOCABULARY, (1, 4)), use_cache=False)
        except _Wanted as wanted:
            (name,) = wanted.args
            if name in called:
                raise
            called.add(name)
            _put(model, name, towers[name])
            _give_numbers(model, [one for one, _ in model.named_parameters() if one.startswith(f"{name}.")])
            continue
        return frozenset(called)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, module)
