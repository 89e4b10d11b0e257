"""The configuration of RWKV-7, compatible with flash-linear-attention's format."""

# No `from __future__ import annotations`: transformers validates values by these types and ignores strings.

from collections.abc import Callable
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from halftune.config.facts.rwkv7_shape import Rwkv7Shape, rwkv7_shape


@strict
class RWKV7Config(PreTrainedConfig):
    """Values of config.json. Files omit defaults, so the defaults are part of the format.

    ``attn_mode``, ``fuse_cross_entropy``, ``fuse_linear_cross_entropy`` and ``use_l2warp`` are settings of
    flash-linear-attention and are preserved. ``fuse_norm`` selects the epsilon of the key norm.
    """

    model_type: ClassVar[str] = "rwkv7"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    number_of_conv_states: ClassVar[int] = 2  # in transformers' cache: the last token of both mixings
    before_use: ClassVar[list[Callable[[], None]]] = []  # registers the model's class, which imports the operators

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
        super().__post_init__(**kwargs)
        for register in self.before_use:
            register()

    @property
    def layer_types(self) -> list[str]:
        """Layer types for transformers' cache: every layer has a recurrent state."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def shape(self) -> Rwkv7Shape:
        """The derived sizes.

        Raises:
            ModelError: see ``rwkv7_shape``.
        """
        return rwkv7_shape({name: value for name, value in vars(self).items() if not name.startswith("_")})
