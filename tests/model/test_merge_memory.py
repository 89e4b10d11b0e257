"""A checkpoint of 3 GB is merged in less than 600 MB of memory that is not a file's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_model import plan, section
from transformers import AutoConfig, AutoModelForCausalLM

from halftune.config.builtin_models import BUILTIN_MODELS
from halftune.config.sections.model import LoraAdapter
from halftune.model.adapters import attach_adapter
from halftune.model.load.lazy_weights import LazyWeights
from halftune.model.load.load import load_model
from halftune.model.load.zero_weights import insert_zero_weights
from halftune.model.result.save import save_final
from halftune.model.tokenizer.tokenizer import load_tokenizer

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 136, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 16, "vocab_size": 32000, "tie_word_embeddings": False}
MERGE = """
import sys, threading
from pathlib import Path

sys.path.insert(0, sys.argv[4])
from halftune.core.optional import quick_imports

with quick_imports():
    from tiny_model import plan, section
    from halftune.model.result.merge_by_layer import merge_by_layer

peak, done = 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.01):
        status = Path("/proc/self/status").read_text()
        peak = max(peak, int(status.partition("RssAnon:")[2].split()[0]))

thread = threading.Thread(target=watch)
thread.start()
try:
    base, final, out = map(Path, sys.argv[1:4])
    merge = merge_by_layer(section(base), final, plan("bf16", "fp32"), "bf16", out, limit=3 * 10**7)
finally:
    done.set()
    thread.join()
print(peak * 1024, merge.forward_error, merge.bound)
"""


def large_checkpoint(folder: Path) -> Path:
    """Random weights, written layer by layer."""
    folder.mkdir()
    config = AutoConfig.for_model(**{**BUILTIN_MODELS["llama-tiny"], **SIZES})
    config.dtype = torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: one.shape for name, one in AutoModelForCausalLM.from_config(config).state_dict().items()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        files.setdefault(".".join(name.split(".")[:3]), []).append(name)
    places = {}
    for number, names in enumerate(files.values()):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        made = {name: torch.randn(shapes[name]).mul(0.02).bfloat16() for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_three_gigabytes_in_six_hundred_megabytes(tmp_path: Path) -> None:
    base, made = large_checkpoint(tmp_path / "base"), plan("bf16", "fp32")
    assert sum(file.stat().st_size for file in base.glob("*.safetensors")) > 3 * 10**9
    model = load_model(section(base), made, lazy=LazyWeights())
    insert_zero_weights(model)
    adapted = attach_adapter(model, LoraAdapter(rank=2), made, 0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.01 * torch.randn(parameter.shape)
    save_final(adapted, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    (tmp_path / "out").mkdir()
    places = [str(tmp_path / name) for name in ("base", "final", "out")]
    command = [sys.executable, "-c", MERGE, *places, str(Path(__file__).parent.parent)]
    peak, error, bound = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert int(peak) < 600 * 10**6
    assert 0 < float(error) <= float(bound)
    sizes = [sum(file.stat().st_size for file in (tmp_path / one).glob("*.safetensors")) for one in ("base", "out")]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)
    shutil.rmtree(tmp_path)  # pytest keeps the folders of three runs
