"""Builds the builtin models: real architectures, seeded random weights, a tokenizer trained on Python's sources."""

from __future__ import annotations

import json
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    GenerationConfig,
    Qwen2Tokenizer,
)

from halftune.config.builtin_models import (
    AUDIO_TOKENS,
    BUILTIN_MODELS,
    END_TOKEN,
    IMAGE_TOKENS,
    PAD_TOKEN,
    START_TOKEN,
    VOCAB_SIZE,
)
from halftune.config.facts.media import AUDIO_FAMILIES, IMAGE_FAMILIES
from halftune.core.atomic import is_full, whole_folder
from halftune.core.errors import ModelError, TrainingError
from halftune.core.files import cache_dir
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, seal
from halftune.core.table import did_you_mean
from halftune.model.files.architectures import no_progress_bars, own_architectures

log = get_logger(__name__)

FORMAT_VERSION = 6  # increase when the same name yields different files
SEED = 20240607
_compared: set[Path] = set()  # folders whose checksums this process has verified
CORPUS_BYTES = 1_500_000
MACHINE_MADE = ("_sysconfigdata", "sitecustomize", "usercustomize")  # they contain local paths
CALL_TOKENS = ("<tool_call>", "</tool_call>")  # single tokens that are not special: answers may show them
# Pre-tokenizer pattern of Qwen2; transformers rebuilds the tokenizer with it on load.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chatml_template() -> str:
    """The ChatML template (Jinja) with tools, tool calls and tool results, without a default system prompt."""
    return (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8").rstrip("\n")


def materialize(name: str) -> Path:
    """Build a builtin model and return its folder: config, fp32 safetensors, tokenizer, chat template.

    Built on first use (some seconds) and cached; checksums are verified once per process. The same Python version
    yields the same bytes. Concurrent processes wait for the one that builds it.

    Args:
        name: a key of ``BUILTIN_MODELS``, without ``builtin:``.

    Raises:
        ModelError: unknown name.
        TrainingError: the cache cannot be written.
    """
    if name not in BUILTIN_MODELS:
        what = f"no builtin model {name!r}"
        raise ModelError(what, remedy=did_you_mean(name, BUILTIN_MODELS), code="core.unknown_builtin")
    # torch draws normal numbers with the CPU's vector instructions, whose last bits differ
    version = f"v{FORMAT_VERSION}-py{platform.python_version()}-{torch.backends.cpu.get_cpu_capability().lower()}"
    root = cache_dir() / "models"
    target, tokenizer = root / f"{name}-{version}", root / f"tokenizer-{version}"
    if _intact(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{version}.lock"):
            if not _intact(tokenizer):
                log.info("training the builtin tokenizer on Python's standard library (once)")
                with whole_folder(tokenizer) as folder:
                    write_tokenizer(folder)
                    seal(folder, MANIFEST)
            if not _intact(target):
                if target.is_dir():
                    log.warning("corrupt builtin model %s: rebuilding", target)
                log.info("building builtin:%s in %s (once)", name, root)
                with whole_folder(target) as folder:
                    _write_model(name, folder, tokenizer)
                    seal(folder, MANIFEST)
    except Exception as error:
        if not isinstance(error, OSError | SafetensorError) and not is_full(error):
            raise  # safetensors and tokenizers report a full disk as an error of their own
        raise TrainingError(
            f"cannot write builtin:{name}: {error}",
            where=str(root),
            remedy="set HALFTUNE_CACHE to a writable folder with free space",
            code="core.cache_not_writable",
        ) from error
    return target


def _intact(folder: Path) -> bool:
    """Whether a cached folder exists and its checksums match."""
    if folder not in _compared and not damage(folder, thorough=True, marker=MANIFEST):
        _compared.add(folder)
    return folder in _compared and folder.is_dir()


def _write_model(name: str, folder: Path, tokenizer: Path) -> None:
    raw = BUILTIN_MODELS[name]
    with own_architectures():
        config = AutoConfig.for_model(**raw)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        kind = AutoModelForMultimodalLM if raw.keys() & _TOWERS.keys() else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=[raw["eos_token_id"], raw["pad_token_id"]], pad_token_id=raw["pad_token_id"], do_sample=False
    )
    with no_progress_bars():
        model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    if raw.keys() & _TOWERS.keys():
        _add_media(folder, raw)


def _add_media(folder: Path, raw: Mapping[str, Any]) -> None:
    """The tokens, the chat template and the processor of a model that sees or hears."""
    tokens: dict[str, str] = {}
    text = written = "{{- part.text -}}"
    processor = {"processor_class": (AUDIO_FAMILIES | IMAGE_FAMILIES)[raw["model_type"]].processor}
    for section, (kinds, names, extractor) in _TOWERS.items():
        if section in raw:
            tokens |= names
            first, last = list(names.values())[:2]
            for kind in kinds:
                medium = f'{{%- if part.type == "{kind}" -%}}{{{{- "{first}{names[f"{kind}_token"]}{last}" -}}}}'
                written = f"{medium}{{%- else -%}}{written}{{%- endif -%}}"
            processor |= extractor(raw[section])
    tokenizer = Qwen2Tokenizer.from_pretrained(folder, extra_special_tokens=tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": [START_TOKEN]})  # pyright: ignore
    tokenizer.chat_template = chatml_template().replace(text, written)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))


def _images(tower: Mapping[str, int]) -> dict[str, Any]:
    pixels = (tower["patch_size"] * tower["spatial_merge_size"]) ** 2
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "temporal_patch_size": tower["temporal_patch_size"],
        "size": {"shortest_edge": 4 * pixels, "longest_edge": 256 * pixels},
        "patch_size": tower["patch_size"],
        "merge_size": tower["spatial_merge_size"],
    }


def _sounds(tower: Mapping[str, int]) -> dict[str, Any]:
    rate, hop = 16_000, 160
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": tower["num_mel_bins"],
        "sampling_rate": rate,
        "hop_length": hop,
        "n_fft": 400,
        "chunk_length": 2 * tower["max_source_positions"] * hop // rate,  # in seconds; a position is of two frames
        "padding_value": 0.0,
        "return_attention_mask": True,
    }


# The kinds of content parts, the added tokens and the extractor's settings of each tower's section in config.json.
_TOWERS: dict[str, tuple[tuple[str, ...], dict[str, str], Callable[[Mapping[str, int]], dict[str, Any]]]] = {
    "vision_config": (("image", "video"), IMAGE_TOKENS, _images),
    "audio_config": (("audio",), AUDIO_TOKENS, _sounds),
}


def write_tokenizer(folder: Path) -> None:
    """Train the byte-level BPE tokenizer and save it in Hugging Face format (5 to 8 CPU seconds)."""
    raw = Tokenizer(models.BPE())
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CALL_TOKENS),
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_corpus(), trainer)
    learned = json.loads(raw.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],  # pyright: ignore[reportArgumentType]
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=None,  # pyright: ignore[reportArgumentType]
        extra_special_tokens=[START_TOKEN],
        model_max_length=4096,
    )
    for token in CALL_TOKENS:
        tokenizer.add_tokens(AddedToken(token, special=False, normalized=False))
    tokenizer.chat_template = chatml_template()
    assert len(tokenizer) == VOCAB_SIZE, f"{len(tokenizer)} tokens"
    tokenizer.save_pretrained(folder)


def _corpus() -> Iterator[str]:
    """Top-level modules of the standard library in name order, up to CORPUS_BYTES, without generated ones."""
    folder, taken = Path(sysconfig.get_paths()["stdlib"]), 0
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(MACHINE_MADE):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        taken += len(text)
        if taken >= CORPUS_BYTES:
            return
    if taken < CORPUS_BYTES // 3:
        raise ModelError(
            f"only {taken:,} characters of standard-library sources to train the builtin tokenizer",
            where=str(folder),
            remedy="install Python with standard-library sources",
            code="core.python_sources_missing",
        )
