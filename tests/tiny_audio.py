"""Tiny models that hear: random weights, a feature extractor, a tokenizer, and sounds."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_images import _CHATML, _TEXT, _trained, image_model
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from halftune.model.files.architectures import no_progress_bars

EXTRACTOR = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "sampling_rate": 16_000,
    "hop_length": 160, "n_fft": 400, "chunk_length": 2, "padding_value": 0.0, "return_attention_mask": True,
}  # fmt: skip
_AUDIO = "{% if p.type == 'audio' %}<|audio>SOUND<audio|>{% elif p.type == 'image' %}"
KINDS = ("qwen2_5_omni_thinker", "qwen2_audio", "qwen3_omni_moe_thinker")
# A chunk of 100 frames lasts 0.25 s, less than the shortest sound: see docs/reference/multimodal.md, limits.
OTHER = {"qwen3_omni_moe_thinker": {"hop_length": 40, "n_fft": 100}}


def audio_model(folder: Path, kind: str) -> Path:
    """Writes a random fp32 model of a type of ``KINDS``, with its tokenizer, chat template and processor."""
    if kind == "qwen2_audio":
        _qwen2_audio(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    else:
        image_model(folder, kind)
        images = json.loads((folder / "preprocessor_config.json").read_text())
        (folder / "preprocessor_config.json").write_text(json.dumps({**images, **EXTRACTOR, **OTHER.get(kind, {})}))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        file = folder / name
        if file.exists():
            text = file.read_text().replace("{% if p.type == 'image' %}", _AUDIO.replace("SOUND", "<|audio|>"))
            file.write_text(text)
    return folder


def _qwen2_audio(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), pad_token="<|pad|>", bos_token="<s>", eos_token="<|im_end|>",
        extra_special_tokens={"audio_token": "<|audio|>"}, chat_template=_CHATML,
    )  # fmt: skip
    config = Qwen2AudioConfig(
        text_config={**_TEXT, "model_type": "qwen2"},
        audio_config={"model_type": "qwen2_audio_encoder", "d_model": 16, "encoder_layers": 1, "num_mel_bins": 16,
                      "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "max_source_positions": 100},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|audio|>"),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(0)
        model = Qwen2AudioForConditionalGeneration._from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text("{}")


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


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes ``rows.jsonl`` and the sounds that its columns name."""
    for row in rows:
        for name in row["audios"]:
            write_sound(folder / name, float(Path(name).stem), seed=len(name))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
