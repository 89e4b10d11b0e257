"""Tiny models that see videos, videos, and transformers' own video processors on a stand-in for torchvision."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_images import image_model
from transformers import AutoTokenizer, image_processing_backends, video_processing_utils

from halftune.data.media.processor import MediaProcessor

KINDS = {  # and the module of their video processor
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "qwen2_5_omni_thinker": "qwen2_vl",
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen3_vl"),
    "glm4v": "glm4v", "glm46v": "glm46v",
}  # fmt: skip
_GLM = ("<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_image|>", "<|end_of_image|>")
PIXELS = {"video_min_pixels": 64, "video_max_pixels": 512}  # the class of Qwen2.5-Omni asks for 100,352
ANSWER = {"role": "assistant", "content": "A red square."}


def video_model(folder: Path, kind: str) -> Path:
    """Writes a random fp32 model of a type of ``KINDS``, with its tokenizer, chat template and processors."""
    return with_video(image_model(folder, kind), kind)


def with_video(folder: Path, kind: str) -> Path:
    """Gives a model that sees images a video processor and a chat template with videos."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = "<|vision_start|><|video_pad|><|vision_end|>"
    if kind.startswith("glm"):
        tokenizer.add_special_tokens({"additional_special_tokens": list(_GLM)})
        written = "<|begin_of_video|><|video|><|end_of_video|>"
    image = "if p.type == 'image' %}"
    video = f"if p.type == 'video' %}}{written}{{% elif {image[3:]}"
    tokenizer.chat_template = tokenizer.chat_template.replace(image, video)
    tokenizer.save_pretrained(folder)
    given = json.loads((folder / "preprocessor_config.json").read_text())
    sizes = {"shortest_edge": 256, "longest_edge": 512 if KINDS[kind] == "qwen2_vl" else 4096}
    settings = {name: value for name, value in given.items() if name != "image_processor_type"} | {"size": sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def write_video(path: Path, frames: int = 12, size: tuple[int, int] = (40, 24), fps: int = 8, seed: int = 0) -> Path:
    """Writes a video of coloured noise as a GIF, which is read as it was written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chance = np.random.default_rng(seed + frames)
    made = chance.integers(0, 256, (frames, size[1], size[0]), dtype=np.uint8)
    pages = [Image.fromarray(one).quantize(256) for one in made]
    palette = chance.permutation(256 * 3).astype(np.uint8).tolist()
    for one in pages:
        one.putpalette(palette)
    pages[0].save(path, save_all=True, append_images=pages[1:], duration=1000 // fps, optimize=False, disposal=1)
    return path


def seen(*questions: str, videos: tuple[str, ...] = (), images: tuple[str, ...] = ()) -> dict[str, Any]:
    """A row of questions, each answered, and its videos and images."""
    turns = [turn for text in questions for turn in ({"role": "user", "content": text}, ANSWER)]
    return {"messages": turns, "videos": list(videos), "images": list(images)}


ROWS = [
    seen("<video>What is in it?", "And <video> here?", videos=("videos/12-40x24.gif", "videos/5-33x47.gif")),
    seen("What is this?\n<video>", videos=("videos/30-24x64.gif",)),
    seen("What is red?"),
]


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes ``rows.jsonl``, and the videos that its columns name: ``videos/<frames>-<width>x<height>.gif``."""
    for row in rows:
        for name in row["videos"]:
            frames, _, size = Path(name).stem.partition("-")
            width, height = map(int, size.split("x"))
            write_video(folder / name, int(frames), (width, height))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _resize(image: torch.Tensor, size: Any, interpolation: str, antialias: bool = True) -> torch.Tensor:
    """As ``torchvision.transforms.v2.functional.resize`` on a CPU: uint8 is scaled as uint8."""
    if list(image.shape[-2:]) == list(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    made = torch.nn.functional.interpolate(flat, list(size), mode=interpolation, antialias=antialias)
    return made.reshape(*image.shape[:-2], *size)


def _normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(one)[:, None, None] for one in (mean, std))
    return (image - mean) / std


def own_processor(kind: str, media: MediaProcessor, patch: pytest.MonkeyPatch) -> Any:
    """The model's processor of transformers with its own video processor, on a stand-in for torchvision's functions."""
    functions = SimpleNamespace(
        resize=_resize, normalize=_normalize, grayscale_to_rgb=lambda image: image,
        InterpolationMode=SimpleNamespace(LANCZOS="lanczos", BILINEAR="bilinear", BICUBIC="bicubic"),
    )  # fmt: skip
    for module in (image_processing_backends, video_processing_utils):
        patch.setattr(module, "tvF", functions, raising=False)
    modes = {2: "bilinear", 3: "bicubic"}
    patch.setattr(image_processing_backends, "pil_torch_interpolation_mapping", modes, raising=False)
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchvision.transforms.v2"].functional = functions  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "torchvision.transforms.v2.functional", functions)  # type: ignore[arg-type]
    name = f"transformers.models.{KINDS[kind]}.video_processing_{KINDS[kind]}"
    file = Path(transformers.__file__).parent / "models" / KINDS[kind] / f"video_processing_{KINDS[kind]}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    patch.setitem(sys.modules, name, module := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    files = [Path(media.settings.model) / f"{name}preprocessor_config.json" for name in ("video_", "")]
    given = json.loads(next(file for file in files if file.exists()).read_text())
    given.pop("processor_class", None)
    given.pop("image_processor_type", None)
    own = media._own
    own.video_processor = getattr(module, module.__all__[0])(**given)
    return own
