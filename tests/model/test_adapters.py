"""Adapters: on the right modules, in the right dtypes, the same for the same seed."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_model import checkpoint, plan, section

from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.core.errors import ConfigError, ModelError
from halftune.model.adapters import attach_adapter, load_adapter
from halftune.model.load.load import load_model
from halftune.precision.dtypes import autocast
from halftune.precision.report import check_dtypes

IDS = torch.arange(20).reshape(2, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "qwen2")


def attached(folder: Path, adapter: LoraAdapter | NoAdapter, made=None, seed: int = 0):
    made = made or plan()
    model = attach_adapter(load_model(section(folder), made), adapter, made, seed)
    check_dtypes(model, made.precision)
    return model


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_full_trains_everything_in_the_trainable_dtype(folder: Path) -> None:
    model = attached(folder, NoAdapter(type="none"), plan("bf16", "fp32"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the head is tied still"


@pytest.mark.parametrize("trainable", ["fp32", "bf16"])
def test_lora_freezes_the_base_and_trains_adapters(folder: Path, trainable: str) -> None:
    model = attached(folder, LoraAdapter(rank=4), plan("bf16", trainable))
    names = trained(model)
    assert all(".lora_" in name for name in names)
    assert not any("lm_head" in name for name in names)
    assert len(names) == 2 * 7 * 2, "A and B of seven linear layers in each of two blocks"
    assert {str(tensor.dtype) for tensor in names.values()} == {
        "torch.float32" if trainable == "fp32" else "torch.bfloat16"
    }


def test_same_seed_same_weights_and_the_global_state_stays(folder: Path) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, again = trained(attached(folder, LoraAdapter())), trained(attached(folder, LoraAdapter()))
    other = trained(attached(folder, LoraAdapter(), seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_targets_by_ending_and_by_expression(folder: Path) -> None:
    by_list = trained(attached(folder, LoraAdapter(target_modules=("q_proj", "v_proj"))))
    by_expression = trained(attached(folder, LoraAdapter(target_modules=r".*\.layers\.1\..*(q|v)_proj")))
    assert len(by_list) == 8
    assert len(by_expression) == 4
    assert all(".layers.1." in name for name in by_expression)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "k_porj"), r"no module is called 'k_porj' · did you mean k_proj\? this model has: .*down_proj"),
        (("W_pack",), r"no module is called 'W_pack' · this model has: "),
        ("q_proj", r"matches no module · write it as a list: \[q_proj\]"),
        (r"layers\.9\..*", "matches no module · it must match full names"),
        ("(q_proj", "not a regular expression"),
    ],
)
def test_targets_that_do_not_exist(folder: Path, targets: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attached(folder, LoraAdapter(target_modules=targets))


def test_modules_to_save(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no module is called 'embed_token' · did you mean embed_tokens"):
        attached(folder, LoraAdapter(modules_to_save=("embed_token",)))
    model = attached(folder, LoraAdapter(modules_to_save=("embed_tokens",)), plan("bf16", "fp32"))
    names = [name for name in trained(model) if "modules_to_save" in name]
    assert any("embed_tokens" in name for name in names)
    causal = model.get_base_model()
    head, embedding = causal.lm_head.weight, causal.model.embed_tokens.modules_to_save["default"].weight
    assert head is embedding or head.data_ptr() == embedding.data_ptr(), "a tied head follows the trained embedding"


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_a_fresh_adapter_changes_nothing(folder: Path, storage: str, kind: dict[str, bool]) -> None:
    made = plan(storage, "fp32")
    base = load_model(section(folder), made, for_training=False)
    model = attached(folder, LoraAdapter(rank=4, **kind), made).eval()
    with torch.inference_mode(), autocast(made.precision, torch.device("cpu")):
        expected = torch.nn.functional.log_softmax(base(IDS).logits.float(), -1)
        actual = torch.nn.functional.log_softmax(model(IDS).logits.float(), -1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_dora_magnitudes_are_norms_in_fp32(folder: Path) -> None:
    model = attached(folder, LoraAdapter(rank=4, use_dora=True), plan("bf16", "fp32"))
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.double().norm(dim=1)
    assert layer.lora_magnitude_vector["default"].weight.dtype == torch.float32
    torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight.double(), exact, rtol=1e-6, atol=0)


def test_rslora_scales_by_the_root_of_the_rank(folder: Path) -> None:
    model = attached(folder, LoraAdapter(rank=16, alpha=8, use_rslora=True))
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"] == 2.0


def test_loading_what_is_no_adapter_or_another_models(folder: Path, tmp_path: Path) -> None:
    from halftune.model.result.save import save_final
    from halftune.model.tokenizer.tokenizer import load_tokenizer

    made = plan()
    with pytest.raises(ModelError, match="no adapter found"):
        load_adapter(load_model(section(folder), made, for_training=False), tmp_path, made)
    tokenizer = load_tokenizer(section("builtin:qwen2-tiny"))
    save_final(attached(folder, LoraAdapter(rank=4)), tokenizer, made, tmp_path / "final")
    with safe_open(tmp_path / "final" / "adapter_model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    (tmp_path / "nan").mkdir()
    shutil.copy(tmp_path / "final" / "adapter_config.json", tmp_path / "nan")
    save_file(
        {**weights, min(weights): weights[min(weights)] * math.nan}, tmp_path / "nan" / "adapter_model.safetensors"
    )
    with pytest.raises(ModelError) as refused:
        load_adapter(load_model(section(folder), made, for_training=False), tmp_path / "nan", made)
    assert refused.value.code == "core.file_damaged"
    assert min(weights) in refused.value.what
    wider = checkpoint(tmp_path / "wider", hidden_size=64)
    with pytest.raises(ModelError, match="base model"):
        load_adapter(load_model(section(wider), made, for_training=False), tmp_path / "final", made)
