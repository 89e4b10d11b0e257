"""Every model type of the installed transformers, by its default config: planned on an H100, or refused rightly."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from halftune.config.facts.families import family_of
from halftune.config.facts.model import read_model_facts
from halftune.config.run import RunConfig
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError
from halftune.hardware.catalogue import lookup
from halftune.model.attention.packing_check import REFUSALS
from halftune.plan import resolve

IMAGES, TEXT = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PARTS = 5


def count(config: PreTrainedConfig, whole: bool) -> int | None:
    """Weights of the class that transformers builds; None where it cannot."""
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return sum(one.numel() for one in auto.from_config(config).parameters())
    except REFUSALS:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_type_is_planned_and_counted_exactly(part: int, tmp_path: Path) -> None:
    wrong: dict[str, str] = {}
    recipe = {"data": {"train": ["rows.jsonl"]}, "training": {"output_dir": str(tmp_path / "run")}}
    for kind in sorted({*TEXT, *IMAGES})[part::PARTS]:
        try:
            config = CONFIG_MAPPING[kind]()
        except StrictDataclassError:  # the assistants of Gemma 4 have no default
            continue
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        model = ModelSection(name_or_path=str(tmp_path))
        try:
            facts = read_model_facts(model)
        except ModelError as refusal:
            if family_of(kind).kind == "decoder" and not config.to_dict().get("is_encoder_decoder"):
                wrong[kind] = f"refused: {refusal.what}"
            continue
        try:
            resolve(RunConfig.model_validate({**recipe, "model": model}), lookup("h100"), facts)
        except (*REFUSALS, ArithmeticError) as error:
            wrong[kind] = f"not planned: {error!r}"
        built = count(config, bool(facts.multimodal))
        if built is not None and (facts.num_parameters + facts.tower_parameters != built):
            wrong[kind] = f"{facts.num_parameters:,} and {facts.tower_parameters:,} of towers, not {built:,}"
        if facts.num_parameters_exact is (built is None):
            wrong[kind] = f"exact: {facts.num_parameters_exact}"
    gc.collect()
    assert not wrong
