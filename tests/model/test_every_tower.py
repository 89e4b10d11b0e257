"""Every model type with towers, made small: a step of LoRA through the loader, and towers saved as they came."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tiny_model import plan, section
from tiny_towers import LARGE, NOT_SMALL, few_layers, random_checkpoint
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGES

from halftune.config.facts.families import family_of, multimodal_class
from halftune.config.facts.safetensors_headers import weight_files
from halftune.config.sections.model import LoraAdapter
from halftune.model.adapters import attach_adapter
from halftune.model.load import load
from halftune.model.load.load import load_model
from halftune.model.load.towers import towers_called_for_text, towers_of
from halftune.model.result.merge import merge_adapter
from halftune.model.result.save import save_final, write_model
from halftune.model.tokenizer.tokenizer import load_tokenizer

# Do not train on text yet.
FAILING = {
    "inkling2": "transformers' class has no sdpa, and the plan does not know it",
}


# Their small copy does not run: all their towers are loaded.
UNDECIDED = {"mistral4"}


def marked(kind: str) -> Any:
    marks = [pytest.mark.xfail(reason=FAILING[kind], strict=True)] if kind in FAILING else []
    return pytest.param(kind, marks=marks)


def has_towers(kind: str) -> bool:
    config = CONFIG_MAPPING[kind]()
    if family_of(kind).kind != "decoder" or config.to_dict().get("is_encoder_decoder"):
        return False
    raw = {**config.to_dict(), "model_type": kind, "architectures": [IMAGES[kind]]}
    return bool(multimodal_class(raw, "all", trust_remote_code=False, where=kind))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str] | None]:
    """Which towers text needs, once it is asked: for the model that is trained, not once more for the merged one."""
    found: list[frozenset[str] | None] = []

    def once(config: PreTrainedConfig) -> frozenset[str] | None:
        if not found:
            found.append(towers_called_for_text(config))
        return found[0]

    monkeypatch.setattr(load, "towers_called_for_text", once)
    return found


def bits(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, not a mapping
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [marked(kind) for kind in sorted(IMAGES.keys() - NOT_SMALL - LARGE)])
@pytest.mark.filterwarnings("ignore")
def test_text_is_trained_and_towers_stay(kind: str, tmp_path: Path, called: list[frozenset[str] | None]) -> None:
    if not has_towers(kind):
        pytest.skip("no towers, or not trained on text")
    base, made, ids = random_checkpoint(tmp_path / "base", few_layers(kind)), plan(), torch.arange(3, 7)[None]
    model = attach_adapter(load_model(section(base), made), LoraAdapter(rank=2), made, 0)
    base_model: Any = model.get_base_model()  # type: ignore[operator]
    towers = towers_of(base_model)
    assert (called == [None]) == (kind in UNDECIDED)
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [one for one in model.parameters() if one.requires_grad]
    idle = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    assert not [name for name in idle if "expert" not in name and "indexer" not in name], "they take part in no loss"
    assert len(idle) < len(trained)
    torch.optim.Adam(trained, lr=0.05, eps=1e-30).step()  # some gradients are tiny
    save_final(model, load_tokenizer(section("builtin:qwen2-tiny")), made, tmp_path / "final")
    del model, base_model
    merged = merge_adapter(section(base), tmp_path / "final", made, "bf16").model
    (tmp_path / "merged").mkdir()
    write_model(merged, "bf16", (), tmp_path / "merged")
    del merged
    before, after = bits(base), bits(tmp_path / "merged")
    assert before.keys() == after.keys()
    changed = {name for name, one in before.items() if not torch.equal(one, after[name])}
    assert changed
    assert not changed & set(towers.tensors if towers is not None else ())
    gc.collect()
