"""Estimates a run's peak memory on one device from sizes alone.

Saved activations are added up per operation, as in transformers' layers. The constants at the top were measured;
docs/measurements/benchmarks.md compares the estimate with measured memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halftune.config.facts.architecture import total_elements
from halftune.config.facts.model import ModelFacts
from halftune.config.weight_formats import format_of
from halftune.hardware import Kind

# The runtime itself: on a CPU the resident size of a process after all imports, on a GPU its context.
RUNTIME_BYTES: dict[Kind, int] = {
    "cpu": 540 << 20,
    "cuda": 700 << 20,
    "rocm": 900 << 20,
    "xpu": 700 << 20,
    "mps": 600 << 20,
}
# Allocator fragmentation, as a share of everything else. glibc caches freed blocks of up to 32 MiB; GPU allocators lose
# less.
FRAGMENTATION: dict[Kind, float] = {"cpu": 0.25, "cuda": 0.06, "rocm": 0.06, "xpu": 0.06, "mps": 0.06}
# A chunk of logits, which their gradient overwrites: on CPUs in fp32, elsewhere in the dtype of compute (of 2 bytes).
LOSS_SCRATCH: dict[Kind, int] = {
    "cpu": 4 << 20,
    "cuda": 128 << 20,
    "rocm": 128 << 20,
    "xpu": 128 << 20,
    "mps": 128 << 20,
}
TRAINED_HEAD = 4  # as many times larger on GPUs, where the head is trained
# fp32 copies of q, k, v that a chunked linear-attention layer saves, by backend.
LINEAR_COPIES = {"torch": 14, "halftune": 2, "fla": 2}
# With our torch operators, all that they save besides their inputs is in ``scan_kept``.
LINEAR_COPIES_BESIDE_KEPT = 1
# Models that scale or cap logits after the head materialise them; their loss cannot be computed in parts.
TOUCHED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# With gradient checkpointing, gradients of one layer's activations exist in addition: this share of a layer. A CPU's
# allocator loses more, most with full fine-tuning, whose operations leave blocks of many sizes.
LAYER_GRADIENTS = {"cpu": {True: 3.6, False: 1.7}}
# DoRA saves two outputs of every adapted layer for the gradient of the magnitudes: the layer's and the update's, in the
# compute dtype. Its fp32 magnitudes widen tensors by this many bytes per element.
DORA_COPIES, DORA_WIDENED = 2, 3


@dataclass(frozen=True)
class Workload:
    """One device's share of a training step.

    Attributes:
        kind: kind of the device.
        storage, trainable, compute: bytes per element of the plan's dtypes.
        autocast: whether weights are cast to the compute dtype in the forward pass.
        half_range: whether compute is fp16, whose gradients are scaled.
        trained: number of trained weights.
        adapter: number of adapter weights among them (0 in full fine-tuning).
        optimizer_state: bytes of the optimizer's state of all trained weights.
        tokens: tokens of a micro-batch, padding included.
        length: maximum number of tokens that attend to each other.
        labelled: share of tokens with a label.
        accumulation: forward passes per step; above 1, gradients and activations exist at the same time.
        attention: the softmax backend.
        checkpointing: whether activations are recomputed.
        float8: number of frozen weights in float8.
        adapted_inputs: sum of the input widths of all adapted layers, if dropout copies them.
        dora_outputs: sum of the output widths of all adapted layers, if DoRA scales them.
        experts: weights of fused experts that are computed in each pass, from quantised ones or as W + B·A.
        packed: whether rows are packed.
        fused: whether layers are fused (frozen weights, no dropout): the gated feed-forward block saves only its two
            inner products, and on CUDA a norm its input as it is.
        linear: backend of linear-attention layers: ``halftune | fla | torch | none``.
        scan_kept: bytes that each such layer saves for backward besides its inputs.
        scan_workspace: bytes that its backward pass allocates.
        strategy: how processes share the model: ``single``, ``ddp`` or ``fsdp2``.
        processes: number of processes.
        offload: with fsdp2, whether shards are in main memory.
        regather: with fsdp2, whether layers are resharded after forward and gathered again for backward.
        teacher: bytes of another model that each device holds whole.
        towers: of a run with images or audio, what is trained of the towers: ``frozen``, ``projector`` (alone),
            ``lora`` or ``full``.
        media: ``image``, ``audio``.
        sync_each: with fsdp2 and gradient accumulation, whether gradients are reduced after each micro-batch.
    """

    kind: Kind
    storage: int
    trainable: int
    compute: int
    autocast: bool
    trained: int
    adapter: int
    optimizer_state: int
    tokens: int
    length: int
    labelled: float
    accumulation: int
    attention: str
    checkpointing: bool
    float8: int = 0
    adapted_inputs: int = 0
    dora_outputs: int = 0
    experts: int = 0
    packed: bool = False
    half_range: bool = False
    fused: bool = False
    linear: str = "torch"
    scan_kept: int = 0
    scan_workspace: int = 0
    strategy: str = "single"
    processes: int = 1
    offload: bool = False
    regather: bool = True
    sync_each: bool = True
    teacher: int = 0
    towers: str = ""
    media: tuple[str, ...] = ()

    @property
    def full(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.adapter == 0


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose.

    Attributes:
        weights, gradients, optimizer, activations, logits, overhead: the parts; overhead is the runtime itself.
            Gradients include those that a tied weight's is the sum of, where they are there at the peak.
        overlap: gradients that reuse the memory of activations freed during backward.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    overhead: int
    overlap: int = 0

    @property
    def total(self) -> int:
        """Peak bytes: the sum of the parts less the overlap."""
        parts = self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.overhead
        return parts - self.overlap


def estimate(work: Workload, facts: ModelFacts) -> Estimate:
    """Return the peak memory of training on one device.

    DDP replicas keep their gradients, which are views of the all-reduce buckets.
    """
    weights = weight_bytes(facts, facts.quantization, work.storage) + work.adapter * work.trainable
    weights -= work.float8 * (work.storage - 1)
    if work.full:  # those that are trained may be wider than the frozen ones
        weights += work.trained * (work.trainable - work.storage)
    alone, half = work.accumulation == 1 and work.strategy == "single", _half_of_tied(work, facts)
    gradients = work.trained * work.trainable + (2 * half if alone else 0)
    moments = work.optimizer_state
    activations, logits, towers = _activations(work, facts), _logits(work, facts) + half, 0
    if work.towers:
        from halftune.hardware.tower_memory import tower_memory, tower_weights  # few runs have images

        shards = work.processes if work.strategy == "fsdp2" else 1
        towers = tower_weights(facts, shards, offload=work.offload, regather=work.regather) * work.storage
        tower = tower_memory(
            facts, work.tokens, work.compute, work.media, mode=work.towers, checkpointing=work.checkpointing
        )
        activations = max(activations + tower.held, tower.peak - logits)  # not at the same time
    if work.strategy == "fsdp2":
        weights, gradients, moments = _sharded(work, facts, weights, gradients, moments)
    weights += work.teacher + towers
    overlap = min(gradients, activations + logits) if alone else 0
    rest = weights + gradients + moments + activations + logits - overlap
    overhead = RUNTIME_BYTES[work.kind] + round(rest * FRAGMENTATION[work.kind])
    return Estimate(weights, gradients, moments, activations, logits, overhead, overlap)


def _half_of_tied(work: Workload, facts: ModelFacts) -> int:
    """Bytes of one of the two fp32 gradients that a trained tied embedding gets on a GPU.

    The head's exists when the layers' backward pass begins, and both are there beside their sum when it ends.
    """
    if work.kind == "cpu" or not facts.tie_word_embeddings or not _trains_head(work, facts):
        return 0
    return facts.vocab_size * facts.hidden_size * 4


def _trains_head(work: Workload, facts: ModelFacts) -> bool:
    """Whether so many of the model's own weights are trained that the head is among them."""
    return work.full and work.trained > facts.num_parameters - facts.vocab_size * facts.hidden_size


def _sharded(work: Workload, facts: ModelFacts, weights: int, gradients: int, moments: int) -> tuple[int, int, int]:
    """Weights, gradients and moments of one FSDP2 process.

    Embedding and head are gathered for the whole step. Decoder layers are gathered two at a time (prefetch), or all of
    them without resharding. The full gradient of one such group exists before it is reduced; without a reduction per
    micro-batch, all of them do.
    """
    ends = round(weights * min(1.0, _ends(facts) / facts.num_parameters))
    layers = weights - ends
    gathered = ends + (layers * 2 // facts.num_layers if work.regather else layers)
    largest = max(ends, layers // facts.num_layers) * gradients // max(weights, 1)
    if work.accumulation > 1 and not work.sync_each:
        largest = gradients
    held = 0 if work.offload else 1
    share = [-(-size // work.processes) * held for size in (weights, gradients, moments)]
    return share[0] + gathered, share[1] + largest, share[2]


def _ends(facts: ModelFacts) -> int:
    """Number of parameters outside the decoder layers."""
    return facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)


def weight_bytes(facts: ModelFacts, quantization: str | None, storage: int) -> int:
    """Return the bytes of a model's weights, whose linear layers may be quantised.

    Args:
        facts: the model.
        quantization: a row of the table of weight formats; None for plain weights.
        storage: bytes per element of the storage dtype, which embeddings, output layer, norms and fused experts have.
    """
    quantised = format_of(quantization).bytes_per_param
    if quantised is None:
        return facts.num_parameters * storage
    tensors = facts.likely_tensors
    layers = (one for one in tensors if one.kind in ("linear", "conv1d") and one.module != "lm_head")
    linear = total_elements(layers)
    linear += experts_size(facts) if facts.quantized_experts else 0
    linear = linear * facts.num_parameters // total_elements(tensors)
    return round(linear * quantised) + (facts.num_parameters - linear) * storage


def experts_size(facts: ModelFacts) -> int:
    """Number of weights of fused experts, which are 3-D parameters."""
    return total_elements(one for one in facts.likely_tensors if len(one.shape) == 3 and "expert" in one.name)


def _logits(work: Workload, facts: ModelFacts) -> int:
    """The head's inputs at labelled positions and the loss's scratch, and the logits if they are materialised.

    A position is kept if any row has a label there, so a batch keeps more than a packed row. The loss of a plain head
    is computed a few rows at a time; fp16 materialises logits, whose gradients must be scaled.
    """
    raw = facts.decoder_config
    positions = work.tokens * (1 - (1 - work.labelled) ** (work.tokens // work.length if not work.packed else 1))
    held = work.half_range or any(raw.get(key) not in (None, 1, 1.0) for key in TOUCHED_LOGITS)
    width = facts.hidden_size + (facts.vocab_size if held else 0)
    scratch = LOSS_SCRATCH[work.kind]
    if work.kind != "cpu":
        in_chunks = _trains_head(work, facts) and not held and not work.teacher
        scratch *= work.compute // 2 * (TRAINED_HEAD if in_chunks else 1)
    return round(positions * width * work.compute) + scratch


def _activations(work: Workload, facts: ModelFacts) -> int:
    residual = 4 if work.autocast and work.storage == 4 else work.storage
    softmax = facts.num_layers - facts.linear_layers
    layer = (
        _attention(work, facts) * softmax + _linear_attention(work, facts) * facts.linear_layers
    ) / facts.num_layers
    layer += _norms(work, facts) + _feed_forward(work, facts)
    dora = work.dora_outputs * (DORA_COPIES * work.compute + DORA_WIDENED)
    ends = facts.hidden_size * (residual + 4 + work.compute)  # embedding, final norm
    if work.checkpointing:
        again = 1 + LAYER_GRADIENTS.get(work.kind, {}).get(work.full, 1)
        kept = residual * facts.hidden_size * facts.num_layers + (layer + dora / facts.num_layers) * again
    else:
        kept = layer * facts.num_layers + work.adapted_inputs * (work.compute + 1) + dora
    # computed experts are kept for backward, where a layer has their gradient, or computes them again
    experts = work.experts * work.storage // (facts.num_layers if work.checkpointing else 1)
    experts += work.experts * work.storage // facts.num_layers
    # when the first layer's backward pass needs its workspace, the tensors of the layer after it are freed already
    scans = work.scan_kept * (1 if work.checkpointing else facts.linear_layers)
    scans += max(0, work.scan_workspace - round(work.tokens * layer))
    return round(work.tokens * (kept + ends)) + _casts(work, facts) + experts + scans


def _casts(work: Workload, facts: ModelFacts) -> int:
    """Copies of the weights in the dtype of compute, which autocast makes and saves for backward."""
    if work.autocast and work.storage > work.compute:
        copies = (facts.num_parameters - _ends(facts)) * work.compute
        freed = work.checkpointing or work.strategy == "fsdp2"  # after each layer
        return copies // facts.num_layers if freed else copies
    return work.trained * work.compute if work.autocast and work.full and work.trainable > work.compute else 0


def _norms(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token: each norm's input, in fp32 unless it is fused on CUDA, and its output."""
    count = sum(
        1
        for t in facts.likely_tensors
        if t.layers and t.shape == (facts.hidden_size,) and t.name.endswith("norm.weight")
    )
    held = work.compute if work.fused and work.kind == "cuda" else 4
    per_norm = held + work.compute + (work.compute if work.full else 0)
    return max(count, 1) * facts.hidden_size * per_norm


def _attention(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token of one softmax layer: q, k, v, the output twice (transposed), and eager's scores."""
    query, key = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    kept = (query + 2 * key + 2 * query) * work.compute + facts.num_heads * 4
    if any(t.name.endswith("q_norm.weight") for t in facts.tensors):
        kept += (query + key) * (4 + work.compute)
    if work.attention == "eager":
        kept += facts.num_heads * work.length * (4 if work.compute == 4 else 4 + work.compute)  # softmax, its cast
    return kept


def _linear_attention(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token of one linear-attention layer: the convolution, and the chunked form's fp32 copies."""
    raw = facts.decoder_config
    keys = int(raw.get("linear_num_key_heads", 0)) * int(raw.get("linear_key_head_dim", 0))
    values = int(raw.get("linear_num_value_heads", 0)) * int(raw.get("linear_value_head_dim", 0))
    width = 2 * keys + values or 4 * facts.hidden_size
    copies = LINEAR_COPIES_BESIDE_KEPT if work.scan_workspace else LINEAR_COPIES[work.linear]
    return width * (3 * work.compute + 4 * copies)


def _feed_forward(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token of one feed-forward block: gate, activation, up and product; fused: gate and up only."""
    raw = facts.decoder_config
    width = facts.intermediate_size
    if facts.num_experts:
        width = _widest(raw, "moe_intermediate_size", width) * max(facts.num_experts_per_token, 1)
        width += _widest(raw, "shared_expert_intermediate_size", 0)
    return (2 if work.fused and not facts.num_experts else 4) * width * work.compute


def _widest(raw: Mapping[str, Any], name: str, otherwise: int) -> int:
    """A size in the config; the maximum of a list (per layer or kind of expert)."""
    value = raw.get(name) or otherwise
    return max(value) if isinstance(value, list) else int(value)
