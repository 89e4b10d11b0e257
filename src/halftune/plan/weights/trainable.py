"""How many weights are trained, and in which modules, from names and shapes alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from halftune.config.facts.architecture import Tensor, total_elements
from halftune.config.facts.model import ModelFacts
from halftune.config.optimizers import OPTIMIZERS, Optim, OptimizerSpec
from halftune.config.run import RunConfig
from halftune.config.sections.model import AdapterSection, LoraAdapter, NoAdapter, PeftAdapter
from halftune.core.choice import Choice
from halftune.hardware import Kind
from halftune.plan.weights.experts import Shapes, updates
from halftune.plan.weights.targets import (
    check_adapter,
    is_hidden,
    is_table,
    saved_around,
    spec_of,
    tied_head,
    touched_by,
)
from halftune.plan.weights.train_only import count_trained


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
        summed: weights of fused experts whose W + B·A is computed in each pass.
        wrapped: base weights of all wrapped linear layers whose sizes float8 products take.
    """

    count: Choice[int]
    tensors: tuple[tuple[tuple[int, ...], bool, int], ...]
    adapter: int = 0
    saved_whole: int = 0
    inputs: tuple[tuple[int, int], ...] = ()
    dora_outputs: int = 0
    summed: int = 0
    wrapped: int = 0

    def state_bytes(self, optimizer: OptimizerSpec, width: int) -> int:
        """Return the bytes of optimizer state of all trained weights; where their shapes are estimated, by the count.

        Args:
            optimizer: its row.
            width: bytes per element where the optimizer does not fix them.
        """
        state = sum(optimizer.state(shape, hidden) * count for shape, hidden, count in self.tensors)
        described = _weights(self.tensors)
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
    hidden = _weights(row for row in adapted.tensors if row[1]) * trained // max(1, _weights(adapted.tensors))
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
    touched = touched_by(facts, adapter)
    if facts.tensors:
        check_adapter(facts, adapter, touched)
    on_experts, experts, summed, described = _expert_updates(facts, adapter)
    updates = [*_updates(touched, adapter), *on_experts]
    saved = _saved(facts, adapter)
    low_rank, whole = _weights(updates), _weights(saved)
    # what is trained, as the plan says it
    modules = sum(len(names) for names in touched.values())
    kinds = sorted({tensor.module.rpartition(".")[2] for tensor in touched})
    reason = f"{_title(adapter)} on {modules} modules ({', '.join(kinds)})" if touched else _title(adapter)
    lora = adapter if isinstance(adapter, LoraAdapter) else LoraAdapter()
    parts = {
        ", with DoRA's magnitudes": lora.use_dora,
        f"; {described}": described,
        f"; {', '.join(adapter.modules_to_save)} in full": whole > 0,
        f"; initial weights by {lora.init}": lora.init != "default",
        f"; starts from {lora.name_or_path}": lora.name_or_path is not None,
        "; estimated from the sizes of a Llama": not facts.tensors,
    }
    reason = "".join([reason, *filter(parts.get, parts)])
    reason += _shares(facts, touched, experts)
    inputs = tuple((tensor.shape[-1], len(names)) for tensor, names in touched.items())
    dora = isinstance(adapter, LoraAdapter) and adapter.use_dora
    outputs = sum(tensor.shape[0] * len(names) for tensor, names in touched.items()) if dora else 0
    fit = sum(tensor.size * len(names) for tensor, names in touched.items() if all(n % 16 == 0 for n in tensor.shape))
    trained = (*updates, *saved)
    return Adapted(Choice(low_rank + whole, reason), trained, low_rank, whole, inputs, outputs, summed, fit)


def _updates(
    touched: Mapping[Tensor, Sequence[str]], adapter: LoraAdapter | PeftAdapter
) -> Iterator[tuple[tuple[int, ...], bool, int]]:
    """The tensors of an adapter, as in ``Adapted.tensors``."""
    for tensor, names in touched.items():
        for shapes, count in Counter(_update_shapes(tensor, adapter, name) for name in names).items():
            yield from ((shape, is_hidden(tensor) and len(shape) == 2, count) for shape in shapes)


def _weights(rows: Iterable[tuple[tuple[int, ...], bool, int]]) -> int:
    """Number of weights in rows of (shape, whether they are hidden matrices, how many)."""
    return sum(math.prod(shape) * count for shape, _, count in rows)


def _expert_updates(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> tuple[Shapes, int, int, str]:
    """LoRA on fused experts, as ``plan.weights.experts.updates`` describes it."""
    if not isinstance(adapter, LoraAdapter) or not adapter.target_parameters:
        return (), 0, 0, ""
    return updates(facts, adapter)


def _count_whole(facts: ModelFacts, adapter: NoAdapter) -> Adapted:
    if adapter.is_partial:
        return Adapted(*count_trained(facts, adapter))
    every = tuple((tensor.shape, is_hidden(tensor), tensor.count) for tensor in facts.likely_tensors)
    return Adapted(Choice(facts.num_parameters, "full fine-tuning: every weight"), every)


def _saved(facts: ModelFacts, adapter: LoraAdapter | PeftAdapter) -> list[tuple[tuple[int, ...], bool, int]]:
    """(shape, whether it is a hidden matrix, how many) of the modules that are trained in full."""
    saved = adapter.modules_to_save
    if not saved:
        return []
    tensors = facts.likely_tensors
    counts = {one: sum(bool(saved_around(name, saved)) for name in one.modules()) for one in tensors}
    whole = [one for one in tensors if counts[one]]
    # a tied head and the embedding are trained as one weight
    if not any(is_table(one, facts.vocab_size) for one in whole):
        whole += [one for one in tied_head(facts) if saved_around(one.module, saved)]
    return [(one.shape, is_hidden(one), counts.get(one, 1)) for one in whole]


def _shares(facts: ModelFacts, touched: dict[Tensor, list[str]], experts: int) -> str:
    """How much of the model the adapted modules hold, and fused experts that hold most of it and are left out."""
    from halftune.plan.weights.experts import expert_tensors

    whole = max(facts.num_parameters, 1)
    adapted = sum(tensor.size * len(names) for tensor, names in touched.items()) + experts
    left_out = total_elements(expert_tensors(facts)) - experts
    said = f"; the adapted modules hold {min(adapted / whole, 1):.0%} of the weights"
    if left_out > whole / 2:
        said += f"; fused experts hold {left_out / whole:.0%} and are not adapted (see adapter.target_parameters)"
    return said


def _title(adapter: LoraAdapter | PeftAdapter) -> str:
    if isinstance(adapter, LoraAdapter):
        return f"LoRA of rank {adapter.rank}"
    return spec_of(adapter).title.format(**adapter.model_dump())


def _update_shapes(tensor: Tensor, adapter: LoraAdapter | PeftAdapter, module: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of A, of B, and of DoRA's magnitudes; of another adapter, those of its row."""
    rows, columns = tensor.shape
    if isinstance(adapter, PeftAdapter):
        return spec_of(adapter).shapes(adapter, rows, columns, module)
    magnitudes = [(columns if tensor.kind == "embedding" else rows,)] if adapter.use_dora else []
    return ((adapter.rank, columns), (rows, adapter.rank), *magnitudes)
