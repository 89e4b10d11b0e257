"""Makes the builtin models: real architectures, weights from a seed, a tokenizer trained on Python's own sources."""

from __future__ import annotations

import json
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AddedToken, AutoConfig, AutoModelForCausalLM, GenerationConfig, Qwen2Tokenizer

from halftune.config.builtin_models import BUILTIN_MODELS, END_TOKEN, PAD_TOKEN, START_TOKEN, VOCAB_SIZE
from halftune.core.atomic import whole_folder
from halftune.core.errors import ModelError, TrainingError
from halftune.core.log import get_logger
from halftune.core.manifest import MANIFEST, damage, seal
from halftune.core.paths import cache_dir
from halftune.core.table import did_you_mean
from halftune.model.architectures import own_architectures
from halftune.model.quiet import quiet

log = get_logger(__name__)

FORMAT_VERSION = 3  # raise it when the same name would give other files
SEED = 20240607
_compared: set[Path] = set()  # folders that this process has found to be what was written
CORPUS_BYTES = 1_500_000
MACHINE_MADE = ("_sysconfigdata", "sitecustomize", "usercustomize")  # they name folders of the machine
CALL_TOKENS = ("<tool_call>", "</tool_call>")  # single tokens, but text, not control: an answer may show them
# How Qwen2's tokenizer splits text before BPE; transformers rebuilds that tokenizer with this expression on load.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chatml_template() -> str:
    """The ChatML template (Jinja) with tools, tool calls and tool results, and no system prompt of its own."""
    return (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8").rstrip("\n")


def materialize(name: str) -> Path:
    """Folder of a builtin model: config, weights (safetensors, fp32), generation config, tokenizer, chat template.

    Made on first use (some seconds), then found in the user's cache folder and compared with its checksums, once in a
    process. The same Python version makes the same bytes; processes that ask at once wait for the one that makes it.

    Args:
        name: a key of ``BUILTIN_MODELS``, without ``builtin:``.

    Raises:
        ModelError: there is no such model.
        TrainingError: it cannot be written.
    """
    if name not in BUILTIN_MODELS:
        raise ModelError(f"no builtin model {name!r}", remedy=did_you_mean(name, BUILTIN_MODELS))
    version = f"v{FORMAT_VERSION}-py{platform.python_version()}"
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
                    log.warning("%s is damaged and made anew", target)
                log.info("making builtin:%s in %s (once)", name, root)
                with whole_folder(target) as folder:
                    _write_model(name, folder, tokenizer)
                    seal(folder, MANIFEST)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        raise TrainingError(
            f"cannot write builtin:{name}: {error}",
            where=str(root),
            remedy="set HALFTUNE_CACHE to a folder with space that you may write to",
        ) from error
    return target


def _intact(folder: Path) -> bool:
    """Whether a folder of the cache is there, with every byte that was written."""
    if folder not in _compared and not damage(folder, thorough=True, marker=MANIFEST):
        _compared.add(folder)
    return folder in _compared and folder.is_dir()


def _write_model(name: str, folder: Path, tokenizer: Path) -> None:
    raw = BUILTIN_MODELS[name]
    with own_architectures():
        config = AutoConfig.for_model(**raw)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=[raw["eos_token_id"], raw["pad_token_id"]], pad_token_id=raw["pad_token_id"], do_sample=False
    )
    with quiet():
        model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)


def write_tokenizer(folder: Path) -> None:
    """Trains the byte-level BPE tokenizer and writes it in Hugging Face's format (5 to 8 CPU-seconds)."""
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
    """The standard library's top-level modules in name order, until CORPUS_BYTES; none that a build or site writes."""
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
            f"only {taken:,} characters of Python sources to train the builtin tokenizer on",
            where=str(folder),
            remedy="install Python with its standard library as .py files",
        )
