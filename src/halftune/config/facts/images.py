"""Model types that are trained on images, one row each: their processor, and what their forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ImageFamily:
    """How a model type takes images.

    Attributes:
        processor: name of its class in transformers.
        expansion: what stands for an image in the text. ``count``: its token, repeated as the processor counts for the
            size; ``fixed``: one text for all sizes; ``size``: the text that the processor gives for a blank image.
        inputs: results of the image processor that the forward pass takes.
        token_types: argument of the forward pass that marks image tokens; empty if there is none.
        nested: the image processor takes a list of images for each sample.
        two_way: tokens of an image attend to later ones too, which neither packed rows nor attention backends without a
            mask can compute.
    """

    processor: str
    expansion: Literal["count", "fixed", "size"]
    inputs: tuple[str, ...]
    token_types: str = ""
    nested: bool = False
    two_way: bool = False

    @property
    def mrope(self) -> bool:
        """Positions have three axes (time, height, width), which packed rows state for each sample."""
        return "image_grid_thw" in self.inputs


_QWEN = ("pixel_values", "image_grid_thw")
IMAGE_FAMILIES = {
    "qwen2_vl": ImageFamily("Qwen2VLProcessor", "count", _QWEN, "mm_token_type_ids"),
    "qwen2_5_vl": ImageFamily("Qwen2_5_VLProcessor", "count", _QWEN, "mm_token_type_ids"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ImageFamily("Qwen3VLProcessor", "count", _QWEN, "mm_token_type_ids"),
    ),
    "glm4v": ImageFamily("Glm4vProcessor", "count", _QWEN, "mm_token_type_ids"),
    "glm46v": ImageFamily("Glm46VProcessor", "count", _QWEN, "mm_token_type_ids"),
    "paddleocr_vl": ImageFamily("PaddleOCRVLProcessor", "size", _QWEN, "mm_token_type_ids"),
    "gemma3": ImageFamily("Gemma3Processor", "fixed", ("pixel_values",), "token_type_ids", two_way=True),
    "gemma4": ImageFamily(
        "Gemma4Processor", "size", ("pixel_values", "image_position_ids"), "mm_token_type_ids",
        nested=True, two_way=True,
    ),
    "llava": ImageFamily("LlavaProcessor", "count", ("pixel_values",)),
    "llava_next": ImageFamily("LlavaNextProcessor", "count", ("pixel_values", "image_sizes")),
    **{
        kind: ImageFamily(processor, "size", ("pixel_values", "pixel_attention_mask"), nested=True)
        for kind, processor in (("idefics3", "Idefics3Processor"), ("smolvlm", "SmolVLMProcessor"))
    },
    "internvl": ImageFamily("InternVLProcessor", "size", ("pixel_values",)),
}  # fmt: skip
