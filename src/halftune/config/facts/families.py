"""Facts about model types that config.json does not contain, one row each. Most types need none.

The suffix ``_text`` of a model type is ignored. For a model with towers, the row of the outer type takes precedence
over the decoder's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """A model type.

    Attributes:
        kind: ``encoder`` for bidirectional attention (unless ``model_types.ONE_WAY`` applies), ``encoder-decoder``
            (unless its config says otherwise), ``pictures`` if the forward pass requires images, ``other`` if it does
            not predict the next token (diffusion, classification, robot actions).
        attention: ``interface`` if softmax attention uses transformers' AttentionInterface, ``own`` for own attention
            code, ``none`` without softmax attention.
        sinks: whether attention has learned sink logits.
        hybrid: whether some layers are linear attention, state-space or convolution; config.json may not list them.
        operators: our operators for these layers, in call order; empty if they cannot be used.
        fla: whether flash-linear-attention has kernels for these layers.
        packs: whether these layers get the sample boundaries of packed rows.
        mixes: what else passes information between the samples of a packed row, as a sentence.
        positions: ``rotary``, ``learned`` or ``alibi``; empty if config.json tells.
        overflows_fp16: trained in bf16, with activations beyond fp16's 65,504.
        keep_fp32: patterns of parameters that stay fp32 in every storage dtype.
        why_fp32: the reason; empty if the model's code defines them in fp32.
        lora_exclude: linear layers that peft refuses to adapt, since fused kernels read their weights directly.
        expert_names: linear layers that peft treats as experts, for which it has no DoRA.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder", "pictures", "other"] = "decoder"
    attention: Literal["interface", "own", "none"] = "interface"
    sinks: bool = False
    hybrid: bool = False
    operators: tuple[str, ...] = ()
    fla: bool = False
    packs: bool = False
    mixes: str = ""
    positions: Literal["", "rotary", "learned", "alibi"] = ""
    overflows_fp16: bool = False
    keep_fp32: tuple[str, ...] = ()
    why_fp32: str = ""
    lora_exclude: tuple[str, ...] = ()
    expert_names: tuple[str, ...] = ()


_CONV = ("causal_conv1d",)
_DELTA, _KDA, _SSD = (*_CONV, "gated_delta_rule"), (*_CONV, "kda"), (*_CONV, "ssd")
_D = r"\.D$"  # of a state-space mixer
_MIXER_D, _MAMBA_D = (rf"\.mixer{_D}",), (rf"\.mamba{_D}",)
_READ_PAST = ("out_proj", "conv1d")
_GATED = ("gate_proj", "up_proj", "down_proj", "gate")
_DELTA_RULE = Family(hybrid=True, operators=_DELTA, fla=True, packs=True)
_DELTA_PER_CHANNEL = Family(hybrid=True, operators=_KDA, fla=True, packs=True)
_CONVOLUTION = Family(hybrid=True, operators=_CONV, packs=True)
_ROTARY = Family(positions="rotary")
_OWN = Family(attention="own")
_LEARNED = Family(positions="learned")
_OVERFLOWS = Family(overflows_fp16=True)

FAMILIES: dict[str, Family] = {
    # softmax attention
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), _LEARNED),
    **dict.fromkeys(("llama", "mistral", "phi", "phi3", "qwen2", "gpt_neox", "olmo", "stablelm", "qwen2_moe"), _ROTARY),
    "mixtral": Family(positions="rotary", expert_names=("w1", "w2", "w3", "gate")),
    "qwen3_moe": Family(expert_names=_GATED),
    "olmoe": Family(expert_names=_GATED),
    "gpt_oss": Family(sinks=True, keep_fp32=(r"(^|\.)(norm|input_layernorm|post_attention_layernorm)\.weight$",)),
    "mimo_v2_flash": Family(sinks=True),
    **dict.fromkeys(("gemma", "gemma2"), Family(positions="rotary", overflows_fp16=True)),
    **dict.fromkeys(
        ("gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "vaultgemma"),
        _OVERFLOWS,
    ),
    # own attention code
    **dict.fromkeys(
        ("codegen", "falcon", "fuyu", "gpt_neo", "gpt_neox_japanese", "gptj", "openai-gpt", "trocr", "xglm"), _OWN
    ),
    **dict.fromkeys(("bloom", "mpt"), Family(attention="own", positions="alibi")),
    # linear attention, state spaces, convolutions
    "qwen3_next": Family(hybrid=True, operators=_DELTA, fla=True, packs=True, expert_names=_GATED),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "olmo_hybrid"), _DELTA_RULE),
    "qwen4_exp": Family(
        hybrid=True,
        operators=_DELTA,
        fla=True,
        mixes="the indexer of qwen4_exp's attention chooses among the keys of the whole row",
    ),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _DELTA_PER_CHANNEL),
    "glm5_next": Family(hybrid=True, operators=_KDA, fla=True),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTION),
    "mamba": Family(attention="none", hybrid=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST),
    "falcon_mamba": Family(attention="none", hybrid=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST),
    "mamba2": Family(
        attention="none", hybrid=True, operators=_SSD, packs=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST
    ),
    "nemotron_h": Family(hybrid=True, operators=_SSD, packs=True, keep_fp32=_MIXER_D, lora_exclude=_READ_PAST),
    "falcon_h1": Family(hybrid=True, operators=_SSD, packs=True, keep_fp32=_MAMBA_D, lora_exclude=_READ_PAST),
    **dict.fromkeys(
        ("bamba", "granitemoehybrid", "zamba2"), Family(hybrid=True, operators=_SSD, packs=True, keep_fp32=_MAMBA_D)
    ),
    **dict.fromkeys(("jamba", "minimax", "zamba"), Family(hybrid=True)),
    "recurrent_gemma": Family(hybrid=True, overflows_fp16=True),
    **dict.fromkeys(("rwkv", "xlstm"), Family(attention="none", hybrid=True)),
    "rwkv7": Family(
        attention="none",
        hybrid=True,
        operators=("rwkv7",),
        packs=True,
        keep_fp32=(r"\.attn\.(k_k|k_a|r_k)$", r"\.attn\.[wav]_lora\.lora\.2\.bias$"),
        why_fp32="the bias of the decay and the vectors that scale keys are small, and act on every token",
    ),
    # encoders; some can be configured as causal
    **dict.fromkeys(
        (
            *("albert", "bert", "bert-generation", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
            *("electra", "ernie", "esm", "eurobert", "flaubert", "modernbert", "mpnet", "roberta", "roc_bert", "xmod"),
            *("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        ),
        Family(kind="encoder"),
    ),
    **dict.fromkeys(
        ("big_bird", "cpmant", "megatron-bert", "reformer", "rembert", "roformer", "xlm", "xlnet"),
        Family(kind="encoder", attention="own"),
    ),
    # encoder-decoders
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5"),
            *("m2m_100", "marian", "mbart", "moonshine", "nllb-moe", "pegasus", "pegasus_x", "plbart", "rag", "udop"),
            *("seamless_m4t", "seamless_m4t_v2", "speech-encoder-decoder", "speech_to_text", "speecht5"),
            *("switch_transformers", "vision-encoder-decoder", "whisper"),
        ),
        Family(kind="encoder-decoder"),
    ),
    **dict.fromkeys(("mvp", "prophetnet"), Family(kind="encoder-decoder", attention="own")),
    **dict.fromkeys(("mt5", "t5", "t5gemma", "t5gemma2", "umt5"), Family(kind="encoder-decoder", overflows_fp16=True)),
    # the forward pass requires images
    **dict.fromkeys(
        ("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2", "pix2struct"),
        Family(kind="pictures"),
    ),
    **dict.fromkeys(("diffusion_gemma", "evolla", "pi0", "shieldgemma2"), Family(kind="other")),
}
OWN = frozenset({"rwkv7"})  # implemented in halftune, not in transformers
_PLAIN = Family()


def family_of(*model_types: object) -> Family:
    """Return the row of the first model type that has one; a plain decoder's if none has."""
    return next((FAMILIES[name] for name in _spelt(model_types) if name in FAMILIES), _PLAIN)


def _spelt(model_types: Iterable[object]) -> Iterator[str]:
    for name in map(str, model_types):
        yield name
        yield name.removesuffix("_text")
