"""How many weights are trained, and in which modules, from names and shapes alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from halftune.config.facts.architecture import Tensor, TensorKind
from halftune.config.facts.model import ModelFacts
from halftune.config.optimizers import OPTIMIZERS, Optim, OptimizerSpec
from halftune.config.run import RunConfig
from halftune.config.sections.model import AdapterSection, LoraAdapter, NoAdapter, PeftAdapter
from halftune.config.weight_formats import format_of
from halftune.core.choice import Choice
from halftune.core.errors import PlanError
from halftune.core.table import did_you_mean
from halftune.hardware import Kind
from halftune.plan.adapter_types import BY_LORA

if TYPE_CHECKING:
    from halftune.plan.adapter_types import AdapterSpec
    from halftune.plan.experts import Shapes

HEAD = "lm_head"
_EXPRESSION_SECONDS, _EXPRESSION_MEMORY = 5, 1 << 30  # an adapter of somebody else may bring its expression


@dataclass(frozen=True)
class Adapted:
    """What an adapter touches.

    Attributes:
        count: trained weights, with the reason.
        tensors: (shape, whether it is a hidden matrix, how many) of the trained weights.
        adapter: those of them in low-rank updates (and DoRA's magnitudes).
        saved_whole: those in ``modules_to_save``, which exist beside the frozen ones.
        inputs: (input width, number of modules) of every wrapped linear layer.
        dora_outputs: output widths of all wrapped layers, summed, where DoRA scales them; else 0.
        experts: weights of fused experts that are adapted.
    """

    count: Choice[int]
    tensors: tuple[tuple[tuple[int, ...], bool, int], ...]
    adapter: int = 0
    saved_whole: int = 0
    inputs: tuple[tuple[int, int], ...] = ()
    dora_outputs: int = 0
    experts: int = 0

    def state_bytes(self, optimizer: OptimizerSpec, width: int) -> int:
        """Return the bytes of optimizer state of all trained weights; where their shapes are estimated, by the count.

        Args:
            optimizer: its row.
            width: bytes per element where the optimizer does not fix them.
        """
        state = sum(optimizer.state(shape, hidden) * count for shape, hidden, count in self.tensors)
        described = sum(math.prod(shape) * count for shape, _, count in self.tensors)
        return state * (optimizer.state_width or width) * self.count.value // max(1, described)


def choose_optimizer(config: RunConfig, adapted: Adapted, kind: Kind) -> Choice[str]:
    """The optimizer that was asked for, how many weights each of its algorithms updates, and how it does so.

    Args:
        config: what was asked.
        adapted: the trained weights.
        kind: kind of the device.
    """
    name, adapter = config.training.optim, config.adapter
    chosen, spec = _updated(name, adapted), OPTIMIZERS[name]
    if spec.state_format:
        each = adapted.state_bytes(spec, spec.state_width) / max(1, adapted.count.value)
        chosen += f"; state takes {each:.3g} bytes per weight"
    if spec.paged:
        chosen += "; on a CPU, paging has no effect" if kind == "cpu" else "; state moves to main memory if needed"
    if isinstance(adapter, LoraAdapter) and adapter.lora_plus_ratio is not None:
        rate = config.training.learning_rate
        chosen += f"; LoRA+: learning rate {rate * adapter.lora_plus_ratio:.3g} for B, {rate:.3g} for the rest"
    return Choice(name, chosen)


def _updated(name: Optim, adapted: Adapted) -> str:
    """Which weights an optimizer updates."""
    spec, trained = OPTIMIZERS[name], adapted.count.value
    if not spec.rest:
        return f"updates all {trained:,} trained weights"
    described = sum(math.prod(shape) * count for shape, _, count in adapted.tensors)
    hidden = sum(math.prod(shape) * count for shape, inside, count in adapted.tensors if inside)
    hidden = hidden * trained // max(1, described)
    rest = f"{spec.rest} updates the other {trained - hidden:,}: embeddings, output layer, vectors and stacked experts"
    return f"updates {hidden:,} weights in hidden matrices; {rest}"


def count_trainable(facts: ModelFacts, adapter: AdapterSection) -> Adapted:
    """Counts trained weights: exact where the architecture is known, else for a Llama-like model of these sizes.

    Raises:
        PlanError: an adapter would touch nothing: no module has the names asked for; or DoRA is asked for where peft
            could not load it again.
    """
    if isinstance(adapter, NoAdapter):
        return _count_whole(facts, adapter)
    tensors = facts.likely_tensors
    touched = _touched(tensors, adapter)
    if facts.tensors:
        _check_targets(tensors, adapter, found=bool(touched or _expert_names(adapter)))
        _check_tied(facts, adapter, touched)
        _check_saved(facts, adapter)
        _check_dora(facts, adapter, sorted({tensor.module.rpartition(".")[2] for tensor in touched}))
    updates = [
        (shape, is_hidden(tensor) and len(shape) == 2, len(names))
        for tensor, names in touched.items()
        for shape in _update_shapes(tensor, adapter, names[0])
    ]
    on_experts, experts, described = _expert_updates(facts, adapter)
    updates += on_experts
    saved = _saved(facts, tensors, adapter)
    low_rank, whole = (sum(math.prod(shape) * count for shape, _, count in some) for some in (updates, saved))
    reason = _reason(adapter, touched, described, whole=whole > 0, estimated=not facts.tensors)
    reason += _shares(facts, touched, experts)
    inputs = tuple((tensor.shape[-1], len(names)) for tensor, names in touched.items())
    dora = isinstance(adapter, LoraAdapter) and adapter.use_dora
    outputs = sum(tensor.shape[0] * len(names) for tensor, names in touched.items() if dora)
    return Adapted(Choice(low_rank + whole, reason), (*updates, *saved), low_rank, whole, inputs, outputs, experts)


def _expert_updates(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> tuple[Shapes, int, str]:
    """Shapes of updates of fused experts, as in ``Adapted.tensors``; their size in ``Adapted.experts``; a clause."""
    if not isinstance(adapter, LoraAdapter) or not adapter.target_parameters:
        return (), 0, ""
    from halftune.plan.experts import updates  # few runs adapt experts

    return updates(facts, adapter)


def _count_whole(facts: ModelFacts, adapter: NoAdapter) -> Adapted:
    if adapter.is_partial:
        from halftune.plan.train_only import count_trained  # few runs freeze parts

        return Adapted(*count_trained(facts, adapter))
    every = tuple((tensor.shape, is_hidden(tensor), tensor.count) for tensor in facts.likely_tensors)
    return Adapted(Choice(facts.num_parameters, "full fine-tuning: every weight"), every)


def _saved(
    facts: ModelFacts, tensors: tuple[Tensor, ...], adapter: LoraAdapter | PeftAdapter
) -> list[tuple[tuple[int, ...], bool, int]]:
    """(shape, whether it is a hidden matrix, how many) of the modules that are trained in full."""
    counts = ((one, _matching(one, adapter.modules_to_save)) for one in tensors)
    saved = [(one.shape, is_hidden(one), count) for one, count in counts if count]
    if facts.tie_word_embeddings and HEAD in adapter.modules_to_save and not _saves_embedding(tensors, adapter):
        # a tied head is saved together with the embedding
        saved.append(((facts.vocab_size, facts.hidden_size), False, 1))
    return saved


def _expert_names(adapter: LoraAdapter | PeftAdapter) -> tuple[str, ...]:
    return adapter.target_parameters if isinstance(adapter, LoraAdapter) else ()


def _reason(
    adapter: LoraAdapter | PeftAdapter,
    touched: dict[Tensor, list[str]],
    on_experts: str,
    *,
    whole: bool,
    estimated: bool,
) -> str:
    """What is trained, as the plan says it."""
    modules = sum(len(names) for names in touched.values())
    kinds = sorted({tensor.module.rpartition(".")[2] for tensor in touched})
    reason = f"{_title(adapter)} on {modules} modules ({', '.join(kinds)})" if touched else _title(adapter)
    lora = adapter if isinstance(adapter, LoraAdapter) else LoraAdapter()
    parts = {
        ", with DoRA's magnitudes": lora.use_dora,
        f"; {on_experts}": on_experts,
        f"; {', '.join(adapter.modules_to_save)} in full": whole,
        f"; initial weights by {lora.init}": lora.init != "default",
        f"; starts from {lora.name_or_path}": lora.name_or_path is not None,
        "; estimated from the sizes of a Llama": estimated,
    }
    return "".join([reason, *filter(parts.get, parts)])


def _shares(facts: ModelFacts, touched: dict[Tensor, list[str]], experts: int) -> str:
    """How much of the model the adapted modules hold, and fused experts that hold most of it and are left out."""
    from halftune.plan.experts import expert_tensors

    whole = max(facts.num_parameters, 1)
    adapted = sum(tensor.size * len(names) for tensor, names in touched.items()) + experts
    left_out = sum(one.size * one.count for one in expert_tensors(facts)) - experts
    said = f"; the adapted modules hold {min(adapted / whole, 1):.0%} of the weights"
    if left_out > whole / 2:
        said += f"; fused experts hold {left_out / whole:.0%} and are not adapted (see adapter.target_parameters)"
    return said


def is_hidden(tensor: Tensor) -> bool:
    """Whether it is a matrix between embedding and output layer."""
    return len(tensor.shape) == 2 and tensor.kind != "embedding" and tensor.module != HEAD


def _touched(tensors: Iterable[Tensor], adapter: LoraAdapter | PeftAdapter) -> dict[Tensor, list[str]]:
    """The tensors that get an update, with the names of their modules. A regular expression has a time limit."""
    if not isinstance(adapter.target_modules, str) or adapter.target_modules == "all-linear":
        return {tensor: names for tensor in tensors if (names := _targets(tensor, adapter))}
    from halftune.core.time_limit import Limits, OutOfTime  # few runs use an expression

    try:
        with Limits(_EXPRESSION_SECONDS, _EXPRESSION_MEMORY):
            return {tensor: names for tensor in tensors if (names := _targets(tensor, adapter))}
    except OutOfTime as error:
        what = f"matching {adapter.target_modules[:80]!r} takes more than {_EXPRESSION_SECONDS} s of CPU time"
        where, remedy = "adapter.target_modules", "all-linear, or a list of names"
        raise PlanError(what, where=where, remedy=remedy, code="config.bad_target_modules") from error


def _targets(tensor: Tensor, adapter: LoraAdapter | PeftAdapter) -> list[str]:
    """Names of the modules that get an update, as peft matches them."""
    target = adapter.target_modules
    if tensor.kind not in wraps(adapter):
        return []
    if target == "all-linear":
        return list(tensor.modules()) if tensor.kind in ("linear", "conv1d") else []
    if isinstance(target, str):
        try:
            return [name for name in tensor.modules() if re.fullmatch(target, name)]
        except re.error as error:
            what = f"{target!r} is not a regular expression: {error}"
            raise PlanError(
                what,
                where="adapter.target_modules",
                remedy="all-linear, or a list of names",
                code="config.bad_target_modules",
            ) from error
    return [name for name in tensor.modules() if _ends_with(name, target)]


def wraps(adapter: LoraAdapter | PeftAdapter) -> tuple[TensorKind, ...]:
    """Kinds of weights that an adapter can be on."""
    return BY_LORA if isinstance(adapter, LoraAdapter) else spec_of(adapter).wraps


def _matching(tensor: Tensor, modules: tuple[str, ...]) -> int:
    """How many of these tensors lie in one of the modules (or below it). peft matches any end of a name: ``norm`` means
    ``input_layernorm``, too."""
    if not modules:
        return 0
    parents = (name.split(".") for name in tensor.modules())
    return sum(any(".".join(parts[:i]).endswith(modules) for i in range(1, len(parts) + 1)) for parts in parents)


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _title(adapter: LoraAdapter | PeftAdapter) -> str:
    if isinstance(adapter, LoraAdapter):
        return f"LoRA of rank {adapter.rank}"
    return spec_of(adapter).title.format(**adapter.model_dump())


def spec_of(adapter: PeftAdapter) -> AdapterSpec:
    """The row of an adapter."""
    from halftune.plan.adapter_types import ADAPTER_TYPES  # few runs need it

    return ADAPTER_TYPES[adapter.model_dump()["type"]]


def _update_shapes(
    tensor: Tensor, adapter: LoraAdapter | PeftAdapter, module: str
) -> list[tuple[int, ...]] | tuple[tuple[int, ...], ...]:
    """Shapes of A, of B, and of DoRA's magnitudes; of another adapter, those of its row."""
    rows, columns = tensor.shape
    if isinstance(adapter, PeftAdapter):
        return spec_of(adapter).shapes(adapter, rows, columns, module)
    magnitudes = [(columns if tensor.kind == "embedding" else rows,)] if adapter.use_dora else []
    return [(adapter.rank, columns), (rows, adapter.rank), *magnitudes]


def _saves_embedding(tensors: tuple[Tensor, ...], adapter: LoraAdapter | PeftAdapter) -> bool:
    return any(tensor.kind == "embedding" and _matching(tensor, adapter.modules_to_save) for tensor in tensors)


def _check_names(
    names: tuple[str, ...], tensors: Iterable[Tensor], adapter: LoraAdapter | PeftAdapter, known: list[str]
) -> None:
    """Refuse a name that matches nothing, or only layers that this type of adapter cannot be on."""
    for name in names:
        matched = [one for one in tensors if any(_ends_with(module, (name,)) for module in one.modules())]
        if not matched:
            what, remedy = f"no linear layer is named {name!r}", did_you_mean(name, known)
            raise PlanError(what, where="adapter.target_modules", remedy=remedy, code="config.bad_target_modules")
        if not any(one.kind in wraps(adapter) for one in matched):
            raise _not_on(adapter, matched[0], name)


_LAYERS = {"conv1d": "Conv1D layers", "embedding": "embeddings"}


def _not_on(adapter: LoraAdapter | PeftAdapter, tensor: Tensor, name: str) -> PlanError:
    what = f"adapter: {adapter.model_dump()['type']} does not support {_LAYERS.get(tensor.kind, tensor.kind)} ({name})"
    remedy = "use adapter: lora" if tensor.kind in BY_LORA else "remove it from adapter.target_modules"
    return PlanError(what, where="adapter.target_modules", remedy=remedy, code="plan.adapter_unavailable")


def _check_tied(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter, touched: Iterable[Tensor]) -> None:
    """Refuse an update of one of two modules that share a weight: merged, it would move the other one, too."""
    shared = [one for one in touched if one.kind in ("embedding", "head") and one.shape[0] == facts.vocab_size]
    if facts.tie_word_embeddings and shared:
        name = shared[0].module.rpartition(".")[2]
        kind = adapter.model_dump()["type"]
        what = f"adapter: {kind} on {name}, whose weight the output layer shares: it could not be merged"
        remedy = "train it in full (adapter.modules_to_save: [embed_tokens]), or leave it out of adapter.target_modules"
        raise PlanError(what, where="adapter.target_modules", remedy=remedy, code="plan.adapter_unavailable")


def _check_targets(tensors: tuple[Tensor, ...], adapter: LoraAdapter | PeftAdapter, *, found: bool) -> None:
    """Names that match no module are mistakes: peft would say so only after the weights are loaded."""
    layers = [tensor for tensor in tensors if tensor.kind != "parameter"]
    known = sorted({one.module.rpartition(".")[2] for one in layers if one.kind in wraps(adapter)})
    targets, where = adapter.target_modules, "adapter.target_modules"
    if isinstance(targets, tuple):
        _check_names(targets, layers, adapter, known)
    if not found and targets == "all-linear" and (other := [one for one in layers if one.kind == "conv1d"]):
        raise _not_on(adapter, other[0], other[0].module.rpartition(".")[2])
    if not found:
        remedy = f"the model's linear layers: {', '.join(known)}; a regular expression must match a whole name"
        if targets in known:
            remedy = f"write it as a list: [{targets}]"
        raise PlanError(f"no module matches {targets!r}", where=where, remedy=remedy, code="config.bad_target_modules")


def _check_saved(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> None:
    for name in adapter.modules_to_save:
        if name != HEAD and not any(_matching(tensor, (name,)) for tensor in facts.tensors):
            known = {part for tensor in facts.tensors for part in tensor.module.split(".") if part != "*"} | {HEAD}
            remedy = did_you_mean(name, known)
            what = f"no module is named {name!r}"
            raise PlanError(what, where="adapter.modules_to_save", remedy=remedy, code="config.bad_target_modules")


def _check_dora(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter, kinds: list[str]) -> None:
    lost = [kind for kind in kinds if kind in facts.expert_modules]
    if isinstance(adapter, PeftAdapter):
        _check_type(facts, adapter, kinds)
    elif adapter.use_dora and lost:
        what = f"DoRA on {', '.join(lost)} of {facts.model_type}: peft has no DoRA for names of experts"
        others = ", ".join(kind for kind in kinds if kind not in lost)
        remedy = f"adapter.use_dora: false, or adapter.target_modules: [{others}]"
        raise PlanError(what, where="adapter.use_dora", remedy=remedy, code="plan.dora_on_experts")


def _check_type(facts: ModelFacts, adapter: PeftAdapter, kinds: list[str]) -> None:
    """Refuse bases for which peft has no such adapter, or could not load it again."""
    what, kind = "", adapter.model_dump()["type"]
    if format_of(facts.quantization).bytes_per_param is not None:
        what = f"quantised weights ({facts.quantization})"
    elif kind == "oft" and "kv_b_proj" in kinds:  # of multi-head latent attention
        what = "kv_b_proj, whose inputs have four dimensions, which peft takes for images"
    if what:
        raise PlanError(
            f"adapter: {kind} does not support {what}",
            where="adapter",
            remedy="use adapter: lora",
            code="plan.adapter_unavailable",
        )
