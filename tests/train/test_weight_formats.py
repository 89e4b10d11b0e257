"""The contract of every row of the table of weight formats: a new row is tested by being there."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from process_group import in_processes, train_all
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from halftune.cli import main
from halftune.config.facts.model import read_model_facts
from halftune.config.weight_formats import WEIGHT_FORMATS, OnLoad
from halftune.core.errors import PlanError
from halftune.core.optional import version_of
from halftune.hardware.catalogue import lookup
from halftune.hardware.memory import weight_bytes
from halftune.model.adapters import attach_adapter, load_adapter
from halftune.model.load.load import load_model
from halftune.plan import WeightsPlan, resolve
from halftune.precision.report import check_dtypes
from halftune.train.trainer import train

STORED_BY_BITSANDBYTES = [name for name, row in WEIGHT_FORMATS.items() if row.package and not row.on_load]
ON_LOAD = [name for name, row in WEIGHT_FORMATS.items() if row.on_load]
STEPS = (
    "training.max_steps=2",
    "training.save_steps=1",
    "data.max_length=64",
    "training.per_device_train_batch_size=2",
)


@pytest.fixture
def installed(name: str) -> None:
    package = WEIGHT_FORMATS[name].package
    if package and version_of(package) is None:
        pytest.skip(f"{package} is not installed")


def test_each_word_of_the_option_has_a_row() -> None:
    assert set(get_args(OnLoad)) == {"none", *ON_LOAD}


def quantised(folder: Path, output: Path, name: str) -> str:
    """A checkpoint in a format of bitsandbytes, as transformers saves it."""
    config = BitsAndBytesConfig(load_in_4bit=name.endswith("4bit"), load_in_8bit=name.endswith("8bit"))
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder).save_pretrained(output)
    return f"model.name_or_path={output}"


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", [*get_args(OnLoad), *STORED_BY_BITSANDBYTES])
def test_load_train_save_resume_and_merge(recipe, tmp_path: Path, small_model: Path, name: str) -> None:
    row = WEIGHT_FORMATS[name]
    stored = name in STORED_BY_BITSANDBYTES
    more = quantised(small_model, tmp_path / "quantised", name) if stored else f"model.quantization={name}"
    asked = (*STEPS, more)
    loaded, plan = recipe(*asked, f"training.output_dir={tmp_path / 'whole'}")
    assert (plan.weights.format.value, plan.weights.origin) == (name, "on_load" if row.on_load else "checkpoint")
    train(loaded, plan)
    train(*recipe(*asked, f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1"))
    one, other = (load_file(tmp_path / place / "final" / "adapter_model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert any(tensor.any() for key, tensor in one.items() if "lora_B" in key), "something was learned"
    output = tmp_path / "merged"
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "whole"), "--output", str(output), "--dtype", "fp32"])
    assert end.value.code == 0
    assert "quantization_config" not in json.loads((output / "config.json").read_text())
    assert all(tensor.is_floating_point() for tensor in load_file(output / "model.safetensors").values())
    if name not in ("int8", "bitsandbytes_8bit"):  # which rounds activations, too
        ids_BT = torch.arange(12).reshape(1, 12)
        whole = load_model(loaded.run.model.model_copy(update={"name_or_path": str(output), "quantization": "none"}),
                           replace(plan, weights=WeightsPlan()), for_training=False)  # fmt: skip
        apart = load_adapter(load_model(loaded.run.model, plan, for_training=False), tmp_path / "whole/final", plan)
        with torch.no_grad():
            torch.testing.assert_close(whole(ids_BT).logits, apart(ids_BT).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", get_args(OnLoad))
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_weights_take_the_bytes_that_the_plan_says(recipe, name: str, compute: str) -> None:
    loaded, plan = recipe(f"model.quantization={name}", f"precision={compute}", machine="cpu-amx")
    model = load_model(loaded.run.model, plan)
    check_dtypes(attach_adapter(copy.deepcopy(model), loaded.run.adapter, plan, 0), plan.precision)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert not WEIGHT_FORMATS[name].on_load or any(type(layer) is not nn.Linear for layer in layers)
    assert type(model.lm_head) is nn.Linear
    measured = sum(_bytes(parameter) for parameter in model.parameters())
    storage = 4 if compute == "fp32" else 2
    declared = weight_bytes(read_model_facts(loaded.run.model), name, storage)
    assert measured == pytest.approx(declared, rel=0.02)
    assert plan.memory.weights == declared + 4 * plan.num_trainable.value


def _bytes(parameter: torch.Tensor) -> int:
    """Of a weight with its scales; the tables of levels have one size (1 KiB) for any weight, and are not counted."""
    state, scales = vars(parameter).get("quant_state"), vars(parameter).get("SCB")
    held = {} if state is None else state.as_dict(packed=True)
    kept = sum(tensor.nbytes for key, tensor in held.items() if key.endswith("absmax"))
    return parameter.nbytes + kept + (0 if scales is None else scales.nbytes)


@pytest.mark.parametrize("name", ON_LOAD)
def test_what_is_not_possible_is_refused_in_the_plan(recipe, tmp_path: Path, name: str) -> None:
    asked = f"model.quantization={name}"
    with pytest.raises(PlanError, match=name) as refused:
        recipe(asked, "adapter=none")
    assert "model.quantization: none" in str(refused.value.remedy)
    with pytest.raises(PlanError, match=name):
        recipe(asked, "distributed.strategy=fsdp2", world_size=2)
    assert recipe(asked, world_size=2)[1].distribution.value == "ddp"
    loaded, _ = recipe(asked)
    with pytest.raises(PlanError, match="mps"):
        resolve(loaded.run, lookup("m2"), read_model_facts(loaded.run.model))
    folder = Path(loaded.run.model.name_or_path)
    raw = json.loads((folder / "config.json").read_text())
    stored = {**raw, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(PlanError, match="already") as refused:
        recipe(asked, f"model.name_or_path={tmp_path}")
    assert refused.value.remedy == "model.quantization: none"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["nf4"])
def test_dora_begins_with_the_norms_of_dequantised_weights(recipe, name: str) -> None:
    loaded, plan = recipe(f"model.quantization={name}", "adapter={type: lora, rank: 4, use_dora: true}")
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    ids_BT = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        adapted = model(ids_BT).logits
        with model.disable_adapter():
            torch.testing.assert_close(adapted, model(ids_BT).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["nf4"])
def test_two_processes_train_quantised_weights(recipe, tmp_path: Path, name: str) -> None:
    place = (f"training.output_dir={tmp_path / 'run'}", f"model.quantization={name}")
    assert in_processes(2, train_all([recipe(*STEPS, *place, world_size=2)])) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4"])
def test_packages_of_formats_are_imported_for_those_only(tmp_path: Path, installed: None) -> None:
    recipe = Path(__file__).resolve().parents[2] / "configs" / "qwen_qlora.yaml"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n')
    code = (
        "import sys; from halftune.cli import main\n"
        "for format in ('none', 'nf4'):\n"
        f"    try: main(['train', '--config', {str(recipe)!r}, 'model.name_or_path=builtin:qwen2-tiny',\n"
        "        'training.max_steps=1', 'data.train=rows.jsonl', 'data.max_length=32',\n"
        "        f'training.output_dir={format}', f'model.quantization={format}'])\n"
        "    except SystemExit as end: print(end.code or 0, *(n in sys.modules for n in ('bitsandbytes', 'torchao')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("0 ")] == ["0 False False", "0 True False"], (
        done.stderr
    )
