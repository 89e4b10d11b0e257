"""What may be loaded from a model's folder: safetensors and JSON. Pickles and unpinned code are refused."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from halftune.config.facts.safetensors_headers import read_header, read_headers
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.core.files import MOST_JSON, read_limited

COMMIT = re.compile(r"[0-9a-f]{40}")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Files that hold a vocabulary, in every format that transformers reads.
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json", "sentencepiece*")
CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")

# Files beside the weights that libraries read whole.
_SMALL = (
    *(*VOCABULARIES, *CONFIGS, "merges.txt", "generation_config.json", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.*", "additional_chat_templates/*"),
)


def _check_sizes(folder: Path) -> None:
    """Makes sure that no small file of a checkpoint fills the memory.

    Raises:
        ModelError: one is larger than any real one.
    """
    for path in (path for pattern in _SMALL for path in folder.glob(pattern)):
        if path.is_file() and (size := path.stat().st_size) > MOST_JSON:
            what = f"has {size:,} bytes, at most {MOST_JSON:,} are accepted"
            raise ModelError(what, where=str(path), remedy="the file is damaged: copy or download it again")


def check_weights(folder: Path) -> None:
    """Makes sure that a folder holds a whole checkpoint in safetensors.

    Raises:
        ModelError: it does not; the message says what is missing, and for pickles the command that converts them.
    """
    where = str(folder)
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            remedy = "name its base model; `halftune export` merges an adapter into one"
            raise ModelError("this folder holds an adapter, not a model", where=where, remedy=remedy)
        raise ModelError("the folder has no config.json", where=where, remedy="name the folder of a model")
    if (folder / "adapter_config.json").is_file():
        what = "holds an adapter beside the model, and transformers would load the base model that the adapter names"
        remedy = "move adapter_config.json elsewhere, or name the folder of the model alone"
        raise ModelError(what, where=where, remedy=remedy)
    _check_sizes(folder)
    if read_headers(folder):
        return
    if pickles := pickles_in(folder):
        what = f"the weights are pickles ({pickles[0]}), which can run code when they are loaded"
        raise ModelError(what, where=where, remedy=f"if you trust them: {model_command(folder)}")
    if (single := folder / "model.safetensors").is_symlink() and not single.exists():
        what = f"is a link to {single.readlink()}, which is not there"
        raise ModelError(what, where=str(single), remedy="mend the link, or copy the file itself")
    if single.is_file():
        raise ModelError("it holds no weight", where=f"{folder}/model.safetensors", remedy="copy or download it again")
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    what = f"no weights in model.safetensors{f' (there is {others[0]})' if others else ''}, nor in files of an index"
    raise ModelError(what, where=where, remedy="copy or download the model again")


def check_adapter(folder: Path) -> None:
    """Makes sure that a folder holds an adapter in safetensors.

    Raises:
        ModelError: its config or its weights are missing or damaged, or are a pickle.
    """
    read_json(folder / "adapter_config.json")
    weights = folder / "adapter_model.safetensors"
    if weights.is_file():
        read_header(weights)
        return
    if (folder / "adapter_model.bin").is_file():
        what = "the adapter is a pickle (adapter_model.bin), which can run code when it is loaded"
        raise ModelError(what, where=str(folder), remedy=f"if you trust it: {adapter_command(folder)}")
    raise ModelError("the adapter has no adapter_model.safetensors", where=str(folder), remedy="copy it whole")


def pickles_in(folder: Path) -> list[str]:
    """Names of the files in a folder that are, or may hold, Python pickles."""
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))


def model_command(folder: Path) -> str:
    """The shell command that writes a pickled checkpoint, with its tokenizer, as safetensors beside it."""
    source, target = json.dumps(str(folder)), json.dumps(f"{folder}-safetensors")
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f'M.from_pretrained({source}, dtype="auto").save_pretrained({target}); '
        f"T.from_pretrained({source}).save_pretrained({target})"
    )
    return f"python -c {shlex.quote(code)}"


def adapter_command(folder: Path) -> str:
    """The shell command that writes a pickled adapter as safetensors into the same folder."""
    source, target = (json.dumps(str(folder / f"adapter_model.{ending}")) for ending in ("bin", "safetensors"))
    code = (
        "import torch; from safetensors.torch import save_file; "
        f"save_file({{k: v.contiguous() for k, v in torch.load({source}, weights_only=True).items()}}, {target})"
    )
    return f"python -c {shlex.quote(code)}"


def check_tokenizer(folder: Path) -> None:
    """Makes sure that a folder holds a tokenizer: transformers would make an empty one, without a word.

    Raises:
        ModelError: it holds none, or its JSON is damaged.
    """
    if not any(path for pattern in VOCABULARIES for path in folder.glob(pattern)):
        remedy = "copy the tokenizer's files there, or name another one in model.tokenizer"
        raise ModelError("the folder has no tokenizer", where=str(folder), remedy=remedy)
    _check_sizes(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)


def has_chat_template(folder: Path) -> bool:
    """Whether a tokenizer's folder holds a chat template; also where a tokenizer may have one in its code."""
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and read_json(settings).get("chat_template"):
        return True
    patterns = ("chat_template.*", "additional_chat_templates/*", "tekken.json", "*.py")
    return any(path for pattern in patterns for path in folder.glob(pattern))


def check_code(folder: Path, model: ModelSection) -> list[str]:
    """What Python of a checkpoint would run, one line a file, after making sure that it cannot change.

    Returns:
        ``file (sha256 …)`` of every Python file in the folder where the config trusts them; empty where it does not.

    Raises:
        ModelError: a config in the folder fetches its code from another repository, which no revision pins.
    """
    if not model.trust_remote_code:
        return []
    for name in CONFIGS:
        path = folder / name
        if not path.is_file():
            continue
        for entry in _code_of(read_json(path)):
            repository, dashes, _ = entry.partition("--")
            if dashes:
                what = f"takes its Python code from another repository, {repository}, which nothing pins ({entry})"
                remedy = f"copy that code into the folder, and take '{repository}--' out of auto_map"
                raise ModelError(what, where=str(path), remedy=remedy)
    files = sorted(folder.rglob("*.py"))
    return [f"{path.relative_to(folder)} (sha256 {_digest(path)[:12]})" for path in files]


def _code_of(raw: Any) -> list[str]:
    """Every class or module that ``auto_map`` names, also of the parts of a config."""
    if not isinstance(raw, dict):
        return []
    found = [entry for value in raw.values() if isinstance(value, dict) for entry in _code_of(value)]
    mapped = raw.get("auto_map")
    for value in mapped.values() if isinstance(mapped, dict) else [mapped]:
        found += [entry for entry in (value if isinstance(value, list | tuple) else [value]) if isinstance(entry, str)]
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a checkpoint that holds an object.

    Raises:
        ModelError: it cannot be read, or holds something else; with the line.
    """
    remedy = "the file is damaged: copy or download it again"
    try:
        raw = json.loads(read_limited(path).decode())
    except json.JSONDecodeError as error:
        what = f"not valid JSON: {error.msg}"
        raise ModelError(what, where=f"{path}:{error.lineno}", remedy=remedy) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, a number too long, nested too deeply
        raise ModelError(f"not valid JSON: {error}", where=str(path), remedy=remedy) from error
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
    if not isinstance(raw, dict):
        raise ModelError("should be a JSON object", where=str(path), remedy=remedy)
    return raw
