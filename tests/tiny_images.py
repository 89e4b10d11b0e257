"""Tiny models that see: random weights, a processor, a tokenizer trained here, and images."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from halftune.config.facts.media import IMAGE_FAMILIES
from halftune.model.files.architectures import no_progress_bars

_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 64 * 16},
}  # fmt: skip
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
_QWEN_TOWER = {"depth": 1, "num_heads": 2, "patch_size": 4, "intermediate_size": 24}
_QWEN3_TOWER = {**_QWEN_TOWER, "hidden_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4,
                        "partial_rotary_factor": 0.25, "mrope_interleaved": True},
}  # fmt: skip
_CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OMNI_TOKENS = {
    "image_token": "<|image_pad|>", "audio_token": "<|audio|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio>", "audio_eos_token": "<audio|>",
}  # fmt: skip
# kind: config, image processor, processor, placeholder in the template, named tokens
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, dict[str, str]]] = {
    **{
        kind: (
            {"text_config": {**_TEXT, "rope_parameters": _ROPE, **text}, "vision_config": tower},
            _QWEN_IMAGES, {}, "<|vision_start|><|image_pad|><|vision_end|>", {"image_token": "<|image_pad|>"},
        )
        for kind, tower, text in (
            ("qwen2_vl", {"depth": 1, "num_heads": 2, "patch_size": 4, "embed_dim": 16, "hidden_size": 32}, {}),
            ("qwen2_5_vl", {**_QWEN_TOWER, "hidden_size": 16, "out_hidden_size": 32, "window_size": 16}, {}),
            ("qwen3_vl", {**_QWEN3_TOWER, "deepstack_visual_indexes": [0]}, {}),
            ("qwen3_vl_moe", {**_QWEN3_TOWER, "deepstack_visual_indexes": [0]}, _EXPERTS),
            ("qwen3_5", _QWEN3_TOWER, _HYBRID),
            ("qwen3_5_moe", _QWEN3_TOWER, {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 16}),
        )
    },
    **{
        kind: (
            {"text_config": {**_TEXT, "rope_parameters": _ROPE}, "vision_config": {
                **_QWEN_TOWER, "hidden_size": 16, "out_hidden_size": 32, "image_size": 16}},
            {**_QWEN_IMAGES, "image_processor_type": images}, {}, "<|vision_start|><|image_pad|><|vision_end|>",
            {"image_token": "<|image_pad|>"},
        )
        for kind, images in (("glm4v", "Glm4vImageProcessor"), ("glm46v", "Glm46VImageProcessor"))
    },
    "qwen2_5_omni_thinker": (
        {"text_config": {**_TEXT, "rope_parameters": _ROPE},
         "vision_config": {**_QWEN_TOWER, "hidden_size": 16, "out_hidden_size": 32, "window_size": 16},
         "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
                          "output_dim": 32, "num_mel_bins": 16, "n_window": 10, "max_source_positions": 300}},
        _QWEN_IMAGES, {}, "<|vision_start|><|image_pad|><|vision_end|>", _OMNI_TOKENS,
    ),
    "qwen3_omni_moe_thinker": (
        {"text_config": {**_TEXT, **_EXPERTS, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
         "vision_config": {**_QWEN3_TOWER, "deepstack_visual_indexes": [0]},
         "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
                          "output_dim": 32, "num_mel_bins": 16, "n_window_infer": 200,
                          "downsample_hidden_size": 4, "max_source_positions": 300}},
        _QWEN_IMAGES, {}, "<|vision_start|><|image_pad|><|vision_end|>", _OMNI_TOKENS,
    ),
    "paddleocr_vl": (
        {"text_config": {**_TEXT, "rope_parameters": _ROPE, "tie_word_embeddings": False}, "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4}},
        {"image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 4, "merge_size": 2,
         "temporal_patch_size": 1, "size": {"shortest_edge": 64, "longest_edge": 64 * 16}}, {},
        "<|vision_start|><|image_pad|><|vision_end|>", {"image_token": "<|image_pad|>"},
    ),
    "gemma3": (
        {"text_config": {**_TEXT, "num_key_value_heads": 1}, "mm_tokens_per_image": 4, "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 7}},
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        {"image_seq_length": 4}, "<start_of_image>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "gemma4": (
        {"text_config": {**_TEXT, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 16,
                         "layer_types": ["sliding_attention", "full_attention"],
                         "use_bidirectional_attention": "vision"},
         "audio_config": None, "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8, "patch_size": 7, "pooling_kernel_size": 2,
            "position_embedding_size": 64}},
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 7, "pooling_kernel_size": 2,
         "max_soft_tokens": 70},
        {}, "<image_soft_token>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
         "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "mistral3": (
        {"text_config": {**_TEXT, "model_type": "mistral"}, "vision_config": {
            "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "head_dim": 8, "image_size": 56, "patch_size": 7}},
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 56},
         "patch_size": {"height": 7, "width": 7}},
        {"patch_size": 7, "spatial_merge_size": 2}, "[IMG]", {"image_token": "[IMG]"},
    ),
    "llava": (
        {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "vision_feature_layer": -1},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
         "crop_size": {"height": 28, "width": 28}},
        _LLAVA, "<image>", {"image_token": "<image>"},
    ),
    "llava_next": (
        {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "vision_feature_layer": -1,
         "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
         "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        _LLAVA, "<image>", {"image_token": "<image>"},
    ),
    **{
        kind: (
            {"text_config": {**_TEXT, "model_type": "llama"}, "scale_factor": 2, "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 7, "max_image_size": {"longest_edge": 28}}},
            {"image_processor_type": images, "size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
            {"image_seq_len": 4}, "<image>", {"image_token": "<image>"},
        )
        for kind, images in (("idefics3", "Idefics3ImageProcessor"), ("smolvlm", "SmolVLMImageProcessor"))
    },
    "internvl": (
        {"text_config": {**_TEXT, "model_type": "qwen2"}, "image_seq_length": 1, "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": [28, 28], "patch_size": [14, 14]}},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28},
         "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        {"image_seq_length": 1}, "<IMG_CONTEXT>",
        {"image_token": "<IMG_CONTEXT>", "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
         "end_image_token": "</img>", "video_token": "<|video_pad|>"},
    ),
    "gemma4_unified": (
        {"text_config": {**_TEXT, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"],
                         "use_bidirectional_attention": "vision"},
         "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 64,
                           "output_proj_dims": 16},
         "audio_config": {"audio_embed_dim": 320}},
        {"image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "pooling_kernel_size": 2,
         "max_soft_tokens": 70},
        {}, "<image_soft_token>",
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
         "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
    ),
    "llama4": (
        {"text_config": {**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 4, "no_rope_layers": [1, 0],
                         "attention_chunk_size": 32},
         "vision_config": {
            "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 7, "projector_input_dim": 24, "projector_output_dim": 24,
            "vision_output_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}},
        {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 28, "width": 28}, "max_patches": 4},
        {"patch_size": 7}, "<|image|>", {"image_token": "<|patch|>"},
    ),
    "lfm2_vl": (
        {"text_config": {**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
         "projector_hidden_size": 24, "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_patches": 16, "patch_size": 7}},
        {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 7, "tile_size": 28,
         "min_image_tokens": 2, "max_image_tokens": 5, "max_tiles": 4},
        {}, "<image>",
        {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
         "image_thumbnail_token": "<|img_thumbnail|>"},
    ),
}  # fmt: skip
_SPECIAL = (
    "<|pad|>", "<s>", "<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>", "<start_of_image>",
    "<end_of_image>", "<image_soft_token>", "<image>",
    "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<IMG_CONTEXT>", "<img>", "</img>",
    *(f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)), "[IMG]", "[IMG_BREAK]", "[IMG_END]",
    "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
    *(f"<|img_row_{i + 1}_col_{j + 1}|>" for i in range(4) for j in range(4)),
)  # fmt: skip
_IDS = {
    "image_token_id": "image_token", "image_token_index": "image_token", "boi_token_index": "boi_token",
    "eoi_token_index": "eoi_token", "audio_token_id": "audio_token", "audio_start_token_id": "audio_bos_token",
    "audio_end_token_id": "audio_eos_token",
}  # fmt: skip


_TORCHVISION = {kind for kind, family in IMAGE_FAMILIES.items() if family.torchvision}


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(_SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["What is in the picture? A red square and a blue circle.\n\n"] * 3, trainer)
    return tokenizer.to_str()


def image_model(folder: Path, kind: str, **more: Any) -> Path:
    """Writes a random fp32 model of a type of ``KINDS``, with its tokenizer, chat template and processor.

    ``more``: of its config.
    """
    if kind in _TORCHVISION:
        pytest.importorskip("torchvision")
    options, images, processor, placeholder, named = KINDS[kind]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), pad_token="<|pad|>", bos_token="<s>", eos_token="<|im_end|>",
        extra_special_tokens=named, chat_template=_CHATML.replace("IMAGE", placeholder),
    )  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(named[token]) for name, token in _IDS.items() if token in named}
    for name in ("vision_start", "vision_end"):
        ids[f"{name}_token_id"] = tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        ids[f"{name.replace('vision', 'image')}_token_id"] = ids[f"{name}_token_id"]
    ids["video_token_id"] = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    config = AutoConfig.for_model(kind, **{**options, **more}, **ids)
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def write_image(path: Path, width: int, height: int) -> Path:
    """Writes a PNG of random pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes ``rows.jsonl``, and the images that its columns name: ``images/<width>x<height>.png``."""
    for row in rows:
        for name in row.get("images", ()):
            width, height = Path(name).stem.split("-")[0].split("x")
            write_image(folder / name, int(width), int(height))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(*questions: str, images: tuple[str, ...] = ()) -> dict[str, Any]:
    """A row of questions, each answered, and its images."""
    turns = [turn for text in questions for turn in ({"role": "user", "content": text}, ANSWER)]
    return {"messages": turns, "images": list(images)}


ANSWER = {"role": "assistant", "content": "A red square."}
ROWS = [
    asked("<image>What is in the picture?", "And <image> here?", images=("images/60x40.png", "images/24x80.png")),
    asked("What is this?\n<image>", images=("images/33x47.png",)),
    asked("What is red?"),
]
