"""Tiny models that hear: random weights, a feature extractor, a tokenizer, and sounds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_images import _CHATML, _TEXT, _trained, image_model
from tiny_tekken import AUDIO, write_tekken
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast

from halftune.config.facts.media import AUDIO_FAMILIES
from halftune.data.media.audio import AudioProcessor
from halftune.model.files.architectures import multimodal_auto, no_progress_bars

EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "sampling_rate": 16_000,
    "hop_length": 160, "n_fft": 400, "chunk_length": 2, "padding_value": 0.0, "return_attention_mask": True,
}  # fmt: skip
_AUDIO = "{% if p.type == 'audio' %}SOUND{% elif p.type == 'image' %}"
_WHISPER = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "num_mel_bins": 16,
}  # fmt: skip
_GEMMA = {
    "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
_CONFORMER = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [16, 4],
    "output_proj_dims": 32,
}  # fmt: skip
_SPEECH = {"audio_token": "<|audio|>", "audio_bos_token": "<|audio>", "audio_eos_token": "<audio|>"}
# Of models without images. kind: config, processor, named tokens
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "qwen2_audio": (
        {"text_config": {**_TEXT, "model_type": "qwen2"},
         "audio_config": {**_WHISPER, "model_type": "qwen2_audio_encoder", "max_source_positions": 100}},
        {}, {"audio_token": "<|audio|>"},
    ),
    "qwen3_asr": (
        {"text_config": {**_TEXT, "model_type": "qwen3"},
         "audio_config": {**_WHISPER, "model_type": "qwen3_asr_encoder", "output_dim": 32, "n_window_infer": 200,
                          "downsample_hidden_size": 4}},
        {}, _SPEECH,
    ),
    **{
        kind: (
            {"text_config": {**_TEXT, "model_type": "qwen2"}, "rope_parameters": rope,
             "audio_config": {**_WHISPER, "model_type": "audioflamingo3_encoder", "max_source_positions": 100}},
            {"audio_token": "<|audio|>", "audio_bos_token": "<|audio>", "audio_eos_token": "<audio|>",
             "max_audio_len": 7},
            _SPEECH,
        )
        for kind, rope in (("audioflamingo3", None), ("musicflamingo", {
            "rope_type": "default", "rope_theta": 1200, "partial_rotary_factor": 0.5}))
    },
    "glmasr": (
        {"text_config": {**_TEXT, "model_type": "llama"},
         "audio_config": {"model_type": "glmasr_encoder", "hidden_size": 16, "intermediate_size": 64,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 16}},
        {"audio_token": "<|audio|>", "max_audio_len": 7}, {"audio_token": "<|audio|>"},
    ),
    "voxtral": (
        {"text_config": {**_TEXT, "model_type": "llama"},
         "audio_config": {"model_type": "voxtral_encoder", "hidden_size": 16, "intermediate_size": 64,
                          "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 16,
                          "max_source_positions": 100}},
        {}, {},
    ),
    "gemma4_unified": (
        {"text_config": {**_TEXT, "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
         "vision_config": {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 64},
         "audio_config": {"audio_embed_dim": 320}},
        {}, _GEMMA,
    ),
}  # fmt: skip
# What Voxtral's tekken.json says of sounds, in windows of ``EXTRACTOR``
TEKKEN_AUDIO = {
    "sampling_rate": 16_000, "frame_rate": 12.5, "chunk_length_s": 2.0,
    "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
}  # fmt: skip
SINGLE = {kind for kind, family in AUDIO_FAMILIES.items() if family.single}
KINDS = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "gemma4", *MODELS)
# A chunk of 100 frames lasts 0.25 s, less than the shortest sound: see docs/reference/multimodal.md, limits.
_CHUNKS = {"hop_length": 40, "n_fft": 100}
OTHER = {
    "qwen3_omni_moe_thinker": _CHUNKS,
    "qwen3_asr": {**_CHUNKS, "feature_extractor_type": "Qwen3ASRFeatureExtractor", "min_length": 4000},
    "gemma4": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    "gemma4_unified": {
        "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor", "feature_size": 320,
        "audio_samples_per_token": 320,
    },
}  # fmt: skip


def audio_model(folder: Path, kind: str, *, images: bool = False) -> Path:
    """Writes a random fp32 model of a type of ``KINDS``, with its tokenizer, chat template and processor.

    ``images``: it also sees.
    """
    extractor = {**EXTRACTOR, **OTHER.get(kind, {})}
    if kind in MODELS and not images:
        _without_images(folder, kind)
    else:
        image_model(folder, kind, **({"audio_config": _CONFORMER} if kind == "gemma4" else {}))
        extractor = {**json.loads((folder / "preprocessor_config.json").read_text()), **extractor}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    sound = "<|audio|>" if AUDIO_FAMILIES[kind].bounds else "<|audio><|audio|><audio|>"
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        file = folder / name
        if file.exists():
            text = file.read_text().replace("{% if p.type == 'image' %}", _AUDIO.replace("SOUND", sound))
            file.write_text(text)
    return folder


def _without_images(folder: Path, kind: str) -> None:
    options, processor, named = MODELS[kind]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), pad_token="<|pad|>", bos_token="<s>", eos_token="<|im_end|>",
        extra_special_tokens=named, chat_template=_CHATML,
    )  # fmt: skip
    mistral = kind == "voxtral"
    place = AUDIO.index("[AUDIO]") if mistral else tokenizer.convert_tokens_to_ids("<|audio|>")
    config = AutoConfig.for_model(kind, **options, audio_token_id=place, audio_token_index=place)
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        model = multimodal_auto(config).from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
    if mistral:
        write_tekken(folder, AUDIO, "v7", audio=TEKKEN_AUDIO)
    else:
        tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(processor))


def write_sound(path: Path, seconds: float, rate: int = 16_000, channels: int = 1, seed: int = 0) -> Path:
    """Writes a WAV file of noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(-20_000, 20_000, (int(seconds * rate), channels), dtype=np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(values.tobytes())
    return path


ANSWER = {"role": "assistant", "content": "A red square."}


def heard(text: str, *sounds: str) -> dict[str, Any]:
    """A row of a question, its answer and its sounds, named by their seconds."""
    return {"messages": [{"role": "user", "content": text}, ANSWER], "audios": list(sounds)}


ROWS = [
    heard("<audio>What is it, and <audio> here?", "0.9.wav", "0.31.wav"),
    heard("What is this?\n<audio>", "0.6.wav"),
    heard("What is red?"),
]


def rows_of(kind: str) -> list[dict[str, Any]]:
    """``ROWS``, with one sound in a row, longer than a window, for processors that take one."""
    return [heard("<audio>What is it?", "2.3.wav"), *ROWS[1:]] if kind in SINGLE else ROWS


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes ``rows.jsonl`` and the sounds that its columns name."""
    for row in rows:
        for name in row["audios"]:
            write_sound(folder / name, float(Path(name).stem), seed=len(name))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole_windows(length: int) -> str:
    """What mistral-common writes for a sound of Voxtral: 25 tokens for each window of 2 s that it starts."""
    return "[BEGIN_AUDIO]" + "[AUDIO]" * (25 * -(-length // 32_000))


def processed(audio: AudioProcessor, text: str, waves: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Token ids and features of a rendered conversation by the model's processor."""
    own: Any = audio._own
    if audio._family.mask:
        return dict(own(text=[text], audio=waves, sampling_rate=16_000, return_tensors="pt"))
    # Voxtral's takes no text with sounds
    pieces = text.split("[AUDIO]")
    text = pieces[0] + "".join(whole_windows(len(one)) + piece for one, piece in zip(waves, pieces[1:], strict=True))
    size = {"padding": True, "truncation": False, "pad_to_multiple_of": 32_000, "max_source_positions": 200}
    made = own._retrieve_input_features(waves, **size, sampling_rate=16_000, return_tensors="pt")
    ids = own.tokenizer(text, return_tensors="pt", add_special_tokens=False)
    return {**ids, "input_features": made}
