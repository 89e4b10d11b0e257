"""The configuration of an RWKV-7: names and defaults of flash-linear-attention's format, so files read both ways."""

# No `from __future__ import annotations`: transformers checks values by these types, and takes a string for none.

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoModelForCausalLM, PreTrainedConfig

from halftune.config.facts.rwkv7_shape import Rwkv7Shape, rwkv7_shape


@strict
class RWKV7Config(PreTrainedConfig):
    """What config.json says. Files leave out what equals a default, so the defaults are part of the format.

    ``attn_mode``, ``fuse_cross_entropy``, ``fuse_linear_cross_entropy`` and ``use_l2warp`` tell flash-linear-attention
    how to compute and are carried along. ``fuse_norm`` tells which epsilon the keys' norm has.
    """

    model_type: ClassVar[str] = "rwkv7"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    number_of_conv_states: ClassVar[int] = 2  # what transformers' cache holds: the last token of either mixing

    attn_mode: str = "chunk"
    hidden_size: int = 2048
    hidden_ratio: int | float | None = 4
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    head_dim: int | None = 64
    num_heads: int | None = None
    decay_low_rank_dim: int | None = 64
    gate_low_rank_dim: int | None = 128
    a_low_rank_dim: int | None = 64
    v_low_rank_dim: int | None = 16
    hidden_act: str = "sqrelu"
    max_position_embeddings: int | None = 2048
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float | int = 1e-5
    attn: dict[str, Any] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    initializer_range: float | int = 0.02
    fuse_norm: bool = True
    fuse_cross_entropy: bool | None = True
    fuse_linear_cross_entropy: bool | None = False
    use_l2warp: bool | None = True
    vocab_size: int = 32000
    value_dim: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Makes the model's class known to ``AutoModelForCausalLM``: whoever reads no RWKV-7 imports none."""
        super().__post_init__(**kwargs)
        from halftune.model.rwkv7.modeling import RWKV7ForCausalLM

        # The class is the key here, and it is ours alone: nothing of anybody else's is replaced.
        AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)

    @property
    def layer_types(self) -> list[str]:
        """What transformers' cache asks: every layer carries a state."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def shape(self) -> Rwkv7Shape:
        """The sizes that follow.

        Raises:
            ModelError: see ``rwkv7_shape``.
        """
        return rwkv7_shape({name: value for name, value in vars(self).items() if not name.startswith("_")})
