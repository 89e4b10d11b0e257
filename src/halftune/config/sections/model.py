"""The sections ``model``, ``adapter``, ``attention`` and ``precision``: what is trained, and in which formats."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from halftune.config.sections import LISTED, TYPED, Flag, InputPath, Int, Number, Section
from halftune.config.weight_formats import OnLoad


class NoAdapter(Section):
    """Full fine-tuning: every weight is trained, or those that `train_only` and `train_layers` choose."""

    type: Literal["none"]
    """No adapter."""

    train_only: Annotated[tuple[str, ...], LISTED] = ()
    """Regular expressions. Only parameters with a match in their name are trained, e.g. `[lm_head, 'mlp']`; all others
    are frozen. Empty: every parameter, unless `train_layers` is set."""

    train_layers: Int | None = None
    """Only the last n layers are trained; a negative number means the first n. `train_only` adds further parameters."""

    spread_layers: Flag = False
    """With `train_layers: n`: train the last layer of each of n groups of equal size instead, which are the layers that
    LLaMA Pro's expansion adds (arXiv:2401.02415)."""

    @property
    def is_partial(self) -> bool:
        """Whether some parameters are frozen."""
        return bool(self.train_only) or self.train_layers is not None


class LoraAdapter(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on frozen weights."""

    type: Literal["lora"] = "lora"
    """LoRA."""

    name_or_path: InputPath | None = None
    """Start from this adapter's weights: a folder such as `runs/mine/final`, or a hub id. Its config sets rank, alpha,
    target_modules, modules_to_save, use_rslora and use_dora."""

    rank: Annotated[Int, Field(ge=1)] = 16
    """Rank r of the update B·A."""

    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank (rsLoRA: alpha / sqrt(rank))."""

    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout in front of A."""

    target_modules: Literal["all-linear"] | str | tuple[str, ...] = "all-linear"
    """`all-linear` (every linear layer but the head), a list of module-name endings, or one regular expression."""

    target_parameters: Annotated[tuple[str, ...], LISTED] = ()
    """Fused experts (3-D parameters) to adapt too, by the ends of their names, e.g.
    `[experts.gate_up_proj, experts.down_proj]`. Requires `dropout: 0`."""

    modules_to_save: Annotated[tuple[str, ...], LISTED] = ()
    """Modules trained in full and saved with the adapter, e.g. `[embed_tokens, lm_head]` after adding tokens."""

    use_rslora: Flag = False
    """Rank-stabilised scaling (Kalajdzievski 2023, arXiv:2312.03732)."""

    use_dora: Flag = False
    """Weight-decomposed LoRA (Liu et al. 2024, arXiv:2402.09353)."""

    init: Literal["default", "gaussian", "olora", "pissa", "pissa_niter_4", "pissa_niter_16"] = "default"
    """Initial A and B: small random A and zero B (`default`, `gaussian`), or a part of the base weights, which are
    reduced by it: OLoRA (arXiv:2406.01775), PiSSA (arXiv:2404.02948) by exact SVD, or by a fast one of 4 or 16
    iterations."""

    lora_plus_ratio: Annotated[Number, Field(gt=0)] | None = None
    """Learning rate of B over that of A (LoRA+, Hayou et al. 2024, arXiv:2402.12354: 16 is typical); one learning rate
    by default. Adapters of embeddings keep the learning rate of A."""

    @property
    def reduces_base(self) -> bool:
        """Whether `init` moves a part of the base weights to the adapter."""
        return self.init not in ("default", "gaussian")

    @property
    def saved_rank(self) -> int:
        """Rank of the result, which also undoes what `init` took from the base weights."""
        return 2 * self.rank if self.reduces_base else self.rank


class PeftAdapter(Section):
    """What the adapters of ``halftune.plan.weights.adapter_types`` have in common."""

    target_modules: Literal["all-linear"] | str | tuple[str, ...] = "all-linear"
    """`all-linear` (every linear layer but the head), a list of module-name endings, or one regular expression."""

    modules_to_save: Annotated[tuple[str, ...], LISTED] = ()
    """Modules trained in full and saved with the adapter, e.g. `[embed_tokens, lm_head]` after adding tokens."""


class OftAdapter(PeftAdapter):
    """Orthogonal fine-tuning (arXiv:2306.07280, arXiv:2506.19847): rotates the inputs of frozen linear layers."""

    type: Literal["oft"]
    """OFT."""

    block_size: Annotated[Int, Field(ge=2)] = 32
    """Inputs that are rotated together; the nearest divisor of a layer's number of inputs is used."""


class VeraAdapter(PeftAdapter):
    """Vectors that scale frozen random matrices, which all layers share (arXiv:2310.11454)."""

    type: Literal["vera"]
    """VeRA."""

    rank: Annotated[Int, Field(ge=1)] = 256
    """Rank of the shared matrices."""


class Ia3Adapter(PeftAdapter):
    """Vectors that scale the outputs or the inputs of frozen linear layers (arXiv:2205.05638)."""

    type: Literal["ia3"]
    """IA3."""

    feedforward_modules: Annotated[tuple[str, ...], LISTED] = ("down_proj",)
    """Endings of those target modules whose inputs are scaled instead of their outputs."""


class LohaAdapter(PeftAdapter):
    """Elementwise products of two low-rank updates (LoHa, arXiv:2108.06098)."""

    type: Literal["loha"]
    """LoHa."""

    rank: Annotated[Int, Field(ge=1)] = 16
    """Rank of each of the two updates."""

    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""


class LokrAdapter(PeftAdapter):
    """Kronecker products of a small matrix and a low-rank one (LoKr, arXiv:2212.10650)."""

    type: Literal["lokr"]
    """LoKr."""

    rank: Annotated[Int, Field(ge=1)] = 16
    """Rank of the larger factor, which is stored whole if it is small."""

    alpha: Annotated[Number, Field(gt=0)] = 32.0
    """The update is scaled by alpha / rank."""

    factor: Annotated[Int, Field(ge=-1)] = -1
    """Size of the small factor; -1: near the square root of the layer's size."""


AdapterSection = Annotated[
    NoAdapter | LoraAdapter | OftAdapter | VeraAdapter | Ia3Adapter | LohaAdapter | LokrAdapter,
    Field(discriminator="type"),
    TYPED,
]


Request = Literal["auto", "bf16", "fp16", "fp32"]


class PrecisionSection(Section):
    """Number formats. `precision: bf16` is short for `precision: {compute: bf16}`."""

    word: ClassVar[str | None] = "compute"

    compute: Request = "auto"
    """Dtype of matmuls and attention. `auto`: the best that the device runs at full speed."""

    linear: Literal["auto", "fp8"] = "auto"
    """Format in which linear layers multiply: of frozen weights under LoRA adapters, and of all trained layers in full
    fine-tuning (by torchao). `auto`: as `compute`. `fp8`: float8 (e4m3) with a scale per row, on CUDA from compute
    capability 8.9."""

    trainable: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the trained weights. `auto`: fp32 (master weights)."""

    optimizer_state: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype of the optimizer's moments; `auto` follows `trainable`."""

    tf32: Flag | Literal["auto"] = "auto"
    """Whether fp32 matmuls may use TF32. `auto`: only if compute is not fp32."""

    on_unsupported: Literal["error", "fallback"] = "error"
    """If the device does not support the requested dtype: stop before loading, or use the choice of `auto`."""


Backend = Literal["auto", "fa2", "fa3", "fa4", "sdpa", "flex", "eager"]


class AttentionSection(Section):
    """Softmax and linear attention. `attention: sdpa` is short for `attention: {backend: sdpa}`."""

    word: ClassVar[str | None] = "backend"

    backend: Backend = "auto"
    """Softmax-attention backend. `auto`: the fastest that device, dtype and model support; the plan has the reason."""

    linear: Literal["auto", "halftune", "fla", "torch"] = "auto"
    """Backend of linear-attention layers (gated delta rule, Mamba-2, short convolutions …) where the model has them:
    halftune's own operators, flash-linear-attention, or transformers' torch code, which cannot pack rows."""

    guard: Literal["cast", "strict", "off"] = "cast"
    """Attention operands outside the planned dtype are cast and logged, raise an error, or are ignored."""


class SpecialTokens(Section):
    """Which tokens have a role; the tokenizer knows them, or `model.tokens.add` names them."""

    bos: str | None = None
    """Begins a text."""

    eos: str | None = None
    """Ends a text."""

    pad: str | None = None
    """Pads."""


class TokensSection(Section):
    """Tokens of your own. New rows of the embedding and of an untied output layer are the mean of the old ones."""

    add: Annotated[tuple[str, ...], LISTED] = ()
    """Tokens to add to the tokenizer; those that it has stay as they are. They are special tokens, which texts of
    messages cannot hold, except those named after thoughts and tools, such as `<think>`. With LoRA, the embedding and
    the output layer are trained in full and saved with the adapter."""

    special: SpecialTokens = Field(default_factory=SpecialTokens)
    """Which tokens begin a text, end one and pad, e.g. `{pad: "<|pad|>"}`."""

    pad_to_multiple_of: Annotated[Int, Field(ge=1)] | None = None
    """Round the number of embedding rows up to a multiple, when tokens are added."""


Trained = Literal["frozen", "lora", "full"]


class TrainSection(Section):
    """Which parts of a multimodal model are trained: by LoRA, in full, or not at all."""

    language: Literal["auto", "lora", "full", "frozen"] = "auto"
    """The language model with its output layer. `auto`: as `adapter` says."""

    vision: Trained = "frozen"
    """The image encoder, without its projector."""

    audio: Trained = "frozen"
    """The audio encoder, without its projector."""

    projector: Trained = "frozen"
    """What maps the encoders' features to the language model: `multi_modal_projector`, `visual.merger` and the like.
    With LoRA on other parts, `full` saves it with the adapter."""


class ModelSection(Section):
    """The base model and its tokenizer."""

    name_or_path: InputPath
    """A Hugging Face hub id, a local folder, or `builtin:<name>` (a small real architecture made locally, offline)."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    parts: Literal["all", "text"] = "all"
    """For a multimodal checkpoint: `all` keeps its towers (vision, audio), frozen and saved unchanged; `text` uses the
    text-only class, and the result has no towers."""

    train: TrainSection = Field(default_factory=TrainSection)
    """Parts of a multimodal model, e.g. `{vision: frozen, projector: full}`; needs `data.images` or `data.audio`."""

    quantization: OnLoad = "none"
    """Quantise the frozen linear layers on load, by bitsandbytes: `nf4` (QLoRA: 4 bit, quantised scales), `nf4_single`
    (fp32 scales) or `int8` (LLM.int8). Embeddings, output layer and norms stay as they are. For a quantised checkpoint,
    leave it `none`."""

    quantize_experts: Flag = False
    """With `quantization`: quantise fused experts too (3-D parameters, most weights of a mixture of experts)."""

    tokenizer: InputPath | None = None
    """Hub id or folder of another tokenizer; the model's own by default."""

    chat_template: InputPath | None = None
    """Name of a chat template (`chatml`, `llama3` …: docs/reference/chat-templates.md), or path of a Jinja file. It
    replaces the tokenizer's own."""

    tokens: TokensSection = Field(default_factory=TokensSection)
    """Tokens to add, and the special tokens to use."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, e.g. `{enable_thinking: false}`."""

    trust_remote_code: Flag = False
    """Execute the checkpoint's remote code. Requires `revision`, so that the code cannot change."""


class TeacherSection(Section):
    """The frozen teacher model. A plain string is short for `{name_or_path: string}`."""

    word: ClassVar[str | None] = "name_or_path"

    name_or_path: InputPath
    """A Hugging Face hub id, a local folder, or `builtin:<name>`, with the vocabulary of the trained model."""

    revision: str | None = None
    """Branch, tag or commit of a hub model."""

    quantization: OnLoad = "none"
    """As `model.quantization`."""
