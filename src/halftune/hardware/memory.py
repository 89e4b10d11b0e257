"""Will it fit: an estimate of a run's peak memory on one device, from sizes alone.

What a layer keeps for its backward pass is added up operation by operation, as transformers' layers are written. The
constants at the top were measured; docs/precision.md states how far the estimate is from reality.
"""

from __future__ import annotations

from dataclasses import dataclass

from halftune.config.facts.model import ModelFacts
from halftune.config.quantised import KEPT
from halftune.hardware.facts import Kind

# The runtime itself: on a CPU the resident size of a process that has imported everything, on a GPU its context.
RUNTIME_BYTES: dict[Kind, int] = {
    "cpu": 540 << 20,
    "cuda": 700 << 20,
    "rocm": 900 << 20,
    "xpu": 700 << 20,
    "mps": 600 << 20,
}
# What an allocator loses between blocks, as a share of all else. glibc keeps freed blocks of up to 32 MiB to itself,
# which is fast and costs much; GPU allocators lose less.
FRAGMENTATION: dict[Kind, float] = {"cpu": 0.25, "cuda": 0.06, "rocm": 0.06, "xpu": 0.06, "mps": 0.06}
# Optimizer moments per trained weight.
MOMENTS = {"adamw": 2.0, "adam": 2.0, "adagrad": 1.0, "adafactor": 0.02, "sgd": 0.0}
# fp32 scratch of the loss beside the logits, which their gradient overwrites.
LOSS_SCRATCH: dict[Kind, int] = {
    "cpu": 4 << 20,
    "cuda": 128 << 20,
    "rocm": 128 << 20,
    "xpu": 128 << 20,
    "mps": 128 << 20,
}
# Copies of a linear-attention layer's q, k, v that its chunked form keeps, in fp32: transformers' own code, operators.
LINEAR_COPIES = {"torch": 14, "halftune": 2, "fla": 2}
# Where our operators run in torch, they say themselves what they keep beside their inputs (``scan_kept``).
LINEAR_COPIES_BESIDE_KEPT = 1
# A model whose logits are scaled or capped after the head's product holds them; its loss cannot be taken in parts.
TOUCHED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# Where activations are computed again, the gradients of one layer's inner tensors exist beside them: that much of a
# layer. A CPU's allocator loses more, most where separate operations leave blocks of many sizes (all weights trained).
LAYER_GRADIENTS = {"cpu": {True: 3.6, False: 1.7}}
# What DoRA keeps of every adapted layer's output: the layer's own and the update's, in the compute dtype, for the
# magnitudes' gradient; and what its fp32 magnitudes widen, in bytes per element.
DORA_COPIES, DORA_WIDENED = 2, 3


@dataclass(frozen=True)
class Workload:
    """One device's share of a training step.

    Attributes:
        kind: of the device.
        storage, trainable, compute, state: bytes per element of the dtypes of the plan.
        autocast: whether weights are cast to the compute dtype in the forward pass.
        half_range: whether fp16 computes, whose gradients are scaled.
        trained: weights that are trained.
        adapter: those of them beside the frozen model (0 in full fine-tuning).
        optimizer: name of the optimizer.
        tokens: fed tokens of a micro-batch, padding included.
        length: tokens that attend to each other at most.
        labelled: share of the tokens that carry a label.
        accumulation: forward passes per step; above 1, gradients exist beside activations.
        attention: the softmax backend.
        checkpointing: whether activations are recomputed.
        adapted_inputs: widths of the inputs of adapted layers, summed over all of them, where dropout copies them.
        dora_outputs: widths of the outputs of adapted layers, summed over all of them, where DoRA scales them.
        packed: whether rows are packed and computed sample by sample.
        fused: whether the gated feed-forward block keeps its two inner products only (frozen weights, no dropout).
        linear: what computes linear-attention layers: ``halftune | fla | torch | none``.
        scan_kept: bytes that each of them keeps for its backward pass beside its inputs.
        scan_workspace: bytes of its backward pass.
        strategy: how processes share the model: ``single``, ``ddp`` or ``fsdp2``.
        processes: that share it.
        offload: with fsdp2, shards live in main memory.
        regather: with fsdp2, a layer's weights go after its forward pass and come again for the backward pass.
        sync_each: with fsdp2 and several forward passes per step, gradients are reduced after each of them.
    """

    kind: Kind
    storage: int
    trainable: int
    compute: int
    state: int
    autocast: bool
    trained: int
    adapter: int
    optimizer: str
    tokens: int
    length: int
    labelled: float
    accumulation: int
    attention: str
    checkpointing: bool
    adapted_inputs: int = 0
    dora_outputs: int = 0
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

    @property
    def full(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.adapter == 0


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose; ``overlap`` is what gradients take over from activations that are freed as they come."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    overhead: int
    overlap: int

    @property
    def total(self) -> int:
        """Peak bytes."""
        parts = self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.overhead
        return parts - self.overlap


def estimate(work: Workload, facts: ModelFacts) -> Estimate:
    """Peak memory of training on one device; pure.

    A replica of several (``ddp``) holds its gradients, which are the buckets that are summed, all the time.
    """
    weights = round(facts.num_parameters * _weight_bytes(work, facts)) + work.adapter * work.trainable
    gradients = work.trained * work.trainable
    moments = round(work.trained * work.state * MOMENTS[work.optimizer])
    activations = _activations(work, facts)
    logits = _logits(work, facts)
    if work.strategy == "fsdp2":
        weights, gradients, moments = _sharded(work, facts, weights, gradients, moments)
    overlap = min(gradients, activations + logits) if work.accumulation == 1 and work.strategy == "single" else 0
    rest = weights + gradients + moments + activations + logits - overlap
    overhead = RUNTIME_BYTES[work.kind] + round(rest * FRAGMENTATION[work.kind])
    return Estimate(weights, gradients, moments, activations, logits, overhead, overlap)


def _sharded(work: Workload, facts: ModelFacts, weights: int, gradients: int, moments: int) -> tuple[int, int, int]:
    """Weights, gradients and moments of one of several processes that each hold a share.

    Embedding and head are gathered for the whole step, decoder layers two at a time (one computes while the next one
    comes), and all of them where they are not let go in between; the gradient of one such group exists whole before it
    is reduced; where that is done once a step only, all of them do.
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
    """Parameters outside the decoder layers."""
    return facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)


def _weight_bytes(work: Workload, facts: ModelFacts) -> float:
    return KEPT.get(facts.quantization or "", float(work.storage))


def _logits(work: Workload, facts: ModelFacts) -> int:
    """The head's inputs at labelled positions and the loss's scratch; logits too where the loss needs all of them.

    Positions are kept where any row has a label, so rows side by side keep more than a packed one. The loss of a plain
    head is taken a few rows at a time; fp16 holds logits, whose gradients must be scaled.
    """
    raw = (facts.raw or {}).get("text_config") or facts.raw or {}
    positions = work.tokens * (1 - (1 - work.labelled) ** (work.tokens // work.length if not work.packed else 1))
    held = work.half_range or any(raw.get(key) not in (None, 1, 1.0) for key in TOUCHED_LOGITS)
    width = facts.hidden_size + (facts.vocab_size if held else 0)
    return round(positions * width * work.compute) + LOSS_SCRATCH[work.kind]


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
    casts = 0
    if work.autocast and work.storage > work.compute:  # half copies of the weights, kept for the backward pass
        casts = (facts.num_parameters - _ends(facts)) * work.compute
        if work.checkpointing or work.strategy == "fsdp2":  # there they are gathered as such, and let go
            casts //= facts.num_layers
    # at the first layer whose backward pass needs a workspace, the tensors of the one behind it are gone already
    scans = work.scan_kept * (1 if work.checkpointing else facts.linear_layers)
    scans += max(0, work.scan_workspace - round(work.tokens * layer))
    return round(work.tokens * (kept + ends)) + casts + scans


def _norms(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token: the fp32 input of each norm, its output where a weight's gradient needs it."""
    count = sum(
        1
        for t in facts.likely_tensors
        if t.layers and t.shape == (facts.hidden_size,) and t.name.endswith("norm.weight")
    )
    per_norm = 4 + work.compute + (work.compute if work.full else 0)
    return max(count, 1) * facts.hidden_size * per_norm


def _attention(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token of one softmax layer: q, k, v, the output twice (transposed), and eager's score matrices."""
    query, key = facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    kept = (query + 2 * key + 2 * query) * work.compute + facts.num_heads * 4
    if any(t.name.endswith("q_norm.weight") for t in facts.tensors):
        kept += (query + key) * (4 + work.compute)
    if work.attention == "eager":
        kept += facts.num_heads * work.length * (4 if work.compute == 4 else 4 + work.compute)  # softmax, its cast
    return kept


def _linear_attention(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token of one linear-attention layer: the convolution, and the chunked form's fp32 copies."""
    raw = (facts.raw or {}).get("text_config") or facts.raw or {}
    keys = int(raw.get("linear_num_key_heads", 0)) * int(raw.get("linear_key_head_dim", 0))
    values = int(raw.get("linear_num_value_heads", 0)) * int(raw.get("linear_value_head_dim", 0))
    width = 2 * keys + values or 4 * facts.hidden_size
    copies = LINEAR_COPIES_BESIDE_KEPT if work.scan_workspace else LINEAR_COPIES[work.linear]
    return width * (3 * work.compute + 4 * copies)


def _feed_forward(work: Workload, facts: ModelFacts) -> float:
    """Bytes per token of one feed-forward block: gate, its activation, up, and their product; fused: gate and up."""
    raw = (facts.raw or {}).get("text_config") or facts.raw or {}
    width = facts.intermediate_size
    if facts.num_experts:
        width = int(raw.get("moe_intermediate_size") or width) * max(facts.num_experts_per_token, 1)
        width += int(raw.get("shared_expert_intermediate_size") or 0)
    return (2 if work.fused and not facts.num_experts else 4) * width * work.compute
