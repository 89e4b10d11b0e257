"""The contract of every way to train some of the weights: train, resume exactly, save, load elsewhere, merge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from process_group import apart, curve, in_processes, train_all
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halftune.cli import main
from halftune.core.errors import ConfigError, HalftuneError, ModelError, PlanError
from halftune.model.adapters import ADAPTERS, attach_adapter, initial, load_adapter
from halftune.model.load.load import load_model
from halftune.model.result.merge import fp32_plan
from halftune.plan.weights import targets
from halftune.plan.weights.adapter_types import ADAPTER_TYPES
from halftune.precision.dtypes import autocast
from halftune.precision.report import check_dtypes
from halftune.train.checkpoint.checkpoint import first_weights, load_weights
from halftune.train.trainer import train

STEPS = (
    "training.max_steps=2",
    "training.save_steps=1",
    "data.max_length=64",
    "training.per_device_train_batch_size=2",
)
PARTS = {
    "names": ("{type: none, train_only: [q_proj, 'norm.weight$']}", {"q_proj", "norm"}),
    "last layer": ("{type: none, train_layers: 1}", {"layers.1."}),
    "spread layers": ("{type: none, train_layers: 1, spread_layers: true}", {"layers.1."}),
    "first layer and head": ("{type: none, train_layers: -1, train_only: lm_head}", {"layers.0.", "embed_tokens"}),
}


def exported(run: Path, output: Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["export", str(run), "--output", str(output)])
    return int(end.value.code or 0)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_train_and_resume_exactly(recipe, small_model: Path, tmp_path: Path, name: str, compute: str) -> None:
    asked, trained = PARTS[name]
    steps = (*STEPS, f"adapter={asked}", f"precision={compute}")
    loaded, plan = recipe(*steps, f"training.output_dir={tmp_path / 'whole'}", machine="cpu-amx")
    model = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    check_dtypes(model, plan.precision)
    chosen = {key: one for key, one in model.named_parameters() if one.requires_grad}
    assert plan.num_trainable.value == sum(one.numel() for one in chosen.values())
    assert plan.memory.weights == sum(one.nbytes for one in model.parameters())
    assert {one.dtype for one in chosen.values()} == {torch.float32}
    train(loaded, plan)
    rest = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    train(*recipe(*steps, *rest, machine="cpu-amx"))
    one, other = (load_file(tmp_path / place / "final" / "model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    base = load_file(small_model / "model.safetensors")
    moved = {key for key, tensor in one.items() if not torch.equal(tensor, base[key].to(tensor.dtype))}
    expected = {key for key in one if any(part in key for part in trained)}
    assert moved == expected or (compute == "bf16" and moved and moved < expected)  # rounded away when saved
    assert exported(tmp_path / "whole" / "checkpoint-2", tmp_path / "exported") == 0
    again = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(one[key], again[key]) for key in one)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("{type: none, train_only: [q_porj]}", "config.bad_target_modules"),
        ("{type: none, train_layers: 3}", "config.out_of_range"),
        ("{type: none, train_layers: 0}", "config.out_of_range"),
    ],
)
def test_parts_that_do_not_exist_are_refused_in_the_plan(recipe, asked: str, code: str) -> None:
    with pytest.raises(PlanError) as refused:
        recipe(f"adapter={asked}")
    assert refused.value.code == code


@pytest.fixture
def first(recipe, tmp_path: Path) -> Path:
    """A trained adapter of rank 3."""
    place = f"training.output_dir={tmp_path / 'first'}"
    train(*recipe(*STEPS, place, "adapter={type: lora, rank: 3, alpha: 5, target_modules: [q_proj, down_proj]}"))
    return tmp_path / "first" / "final"


def test_training_starts_from_an_adapter_and_resumes_exactly(recipe, first: Path, tmp_path: Path) -> None:
    steps = (*STEPS, f"adapter={{type: lora, name_or_path: {first}}}")
    loaded, plan = recipe(*steps, f"training.output_dir={tmp_path / 'whole'}")
    section = loaded.run.adapter
    assert (section.rank, section.alpha, section.target_modules) == (3, 5, ("down_proj", "q_proj"))
    assert loaded.origins["adapter.rank"] == loaded.origins["adapter.name_or_path"]
    model, start = load_model(loaded.run.model, plan), load_file(first / "adapter_model.safetensors")
    fresh = get_peft_model_state_dict(attach_adapter(model, section, plan, 0), save_embedding_layers=False)
    assert start.keys() == fresh.keys()
    assert all(torch.equal(start[key], fresh[key]) for key in start)
    train(loaded, plan)
    train(*recipe(*steps, f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1"))
    one, other = (load_file(tmp_path / place / "final" / "adapter_model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert not any(torch.equal(one[key], start[key]) for key in one)


def test_a_changed_start_is_refused_at_resume(recipe, first: Path, tmp_path: Path) -> None:
    asked = (*STEPS, f"adapter={{type: lora, name_or_path: {first}}}", f"training.output_dir={tmp_path / 'run'}")
    train(*recipe(*asked))
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    shutil.rmtree(tmp_path / "run" / "final")
    (tmp_path / "run" / "finished.json").unlink()
    weights = load_file(first / "adapter_model.safetensors")
    save_file({key: tensor + 1 for key, tensor in weights.items()}, first / "adapter_model.safetensors")
    with pytest.raises(ConfigError) as refused:
        train(*recipe(*asked))
    assert refused.value.code == "train.run_changed"
    train(*recipe(*asked, "training.allow_changes=[adapter]"))


@pytest.mark.parametrize(
    ("keys", "settings", "code"),
    [
        ("rank: 4", {}, "config.keys_conflict"),
        ("target_modules: [q_proj]", {}, "config.keys_conflict"),
        ("target_modules: all-linear", {}, "model.adapter_mismatch"),
        ("rank: 3", {"rank_pattern": {"q_proj": 2}}, "model.adapter_unsupported"),
        ("rank: 3", {"use_qalora": True}, "model.adapter_unsupported"),
        ("rank: 3", {"an_option_of_a_later_peft": 0.5}, "model.adapter_unsupported"),
        ("rank: 3", {"peft_type": "OFT"}, "model.adapter_unsupported"),
        ("rank: 3", {"exclude_modules": ["q_proj"]}, "model.adapter_unsupported"),
        ("rank: 3", {"exclude_modules": r".*\.0\..*"}, "model.adapter_unsupported"),
        ("rank: 3", {"target_parameters": ["q_proj.weight"]}, "model.adapter_unsupported"),
        ("rank: 3", {"target_parameters": 3}, "model.adapter_unsupported"),
        ("rank: 3", {"layers_pattern": "layers"}, "model.adapter_unsupported"),
        ("rank: 3", {"task_type": "FOO"}, "model.adapter_unsupported"),
        ("rank: 3", {"lora_dropout": 2}, "model.adapter_unsupported"),
        ("rank: 3", {"init_lora_weights": "pissa"}, "model.adapter_unsupported"),
        ("rank: 3", {"target_modules": ["q_proj", "up_proj"]}, "model.adapter_mismatch"),
    ],
)
def test_another_start_than_the_recipes_or_the_models_is_refused(
    recipe, first: Path, keys: str, settings: dict[str, object], code: str
) -> None:
    file = first / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    def start() -> None:
        loaded, plan = recipe(*STEPS, f"adapter={{type: lora, name_or_path: {first}, {keys}}}")
        attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)

    with pytest.raises(HalftuneError) as refused:
        start()
    problems = refused.value.problems if isinstance(refused.value, ConfigError) else [refused.value]
    assert [problem.code for problem in problems] == [code]


def test_a_start_that_excludes_what_nobody_adapts_is_accepted(recipe, first: Path) -> None:
    file = first / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "exclude_modules": ["lm_head"], "lora_dropout": 0.5}))
    loaded, plan = recipe(*STEPS, f"adapter={{type: lora, name_or_path: {first}}}")
    attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)


def test_an_expression_of_a_received_adapter_has_a_time_limit(
    recipe, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_EXPRESSION_SECONDS", 0.2)
    file = first / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "target_modules": "(([a-z_.0-9]+)+)+!"}))
    loaded, plan = recipe(*STEPS)
    with pytest.raises(ModelError) as refused:
        load_adapter(load_model(loaded.run.model, plan, for_training=False), first, plan)
    assert refused.value.code == "model.adapter_mismatch"


def test_a_start_of_another_base_is_refused(recipe, first: Path, tmp_path: Path, small_model: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(small_model, other)
    weights = load_file(other / "model.safetensors")
    save_file({key: tensor * 2 for key, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    asked = (*STEPS, f"model.name_or_path={other}", f"adapter={{type: lora, name_or_path: {first}}}")
    with pytest.raises(ModelError) as refused:
        train(*recipe(*asked))
    assert refused.value.code == "model.base_changed"


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("init", ["olora", "pissa", "pissa_niter_4"])
def test_parts_of_the_base_train_resume_exactly_and_load_on_the_base(
    recipe, small_model: Path, tmp_path: Path, init: str, compute: str
) -> None:
    """The SVD of a resumed run is not asked for: its first A and B are those of the checkpoint."""
    steps = (*STEPS, f"adapter={{type: lora, rank: 4, init: {init}, use_rslora: true}}", f"precision={compute}")
    loaded, plan = recipe(*steps, f"training.output_dir={tmp_path / 'whole'}", machine="cpu-amx")
    fresh = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    check_dtypes(fresh, plan.precision)
    base = load_file(small_model / "model.safetensors")
    for name, layer in fresh.named_modules():
        if name.endswith("_proj"):
            whole = layer.base_layer.weight.float() + layer.scaling["default"] * (
                layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            )
            weight = base[f"{name.removeprefix('base_model.model.')}.weight"]
            rest = layer.base_layer.weight.float()
            assert (whole - weight).norm() < (1e-6 if compute == "fp32" else 4e-3) * max(weight.norm(), rest.norm())
            assert init == "olora" or rest.norm() < weight.norm(), name
    train(loaded, plan)
    resume = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "_decompose", None)
        train(*recipe(*steps, *resume, machine="cpu-amx"))
    one, other = (load_file(tmp_path / place / "final" / "adapter_model.safetensors") for place in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    ids_BT = torch.arange(12).reshape(1, 12)
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    plain = PeftModel.from_pretrained(model, tmp_path / "whole" / "final").eval()
    last, section = tmp_path / "whole" / "checkpoint-2", loaded.run.adapter
    trained = attach_adapter(load_model(loaded.run.model, plan), section, plan, 0, initial=first_weights(last, section))
    load_weights(last, trained)
    with torch.no_grad(), autocast(plan.precision, torch.device("cpu")):
        expected = trained.eval()(ids_BT).logits.float()
    with torch.no_grad():
        error = (plain(ids_BT).logits - expected).norm() / expected.norm()
        with plain.disable_adapter():
            moved = (plain(ids_BT).logits - expected).norm()
    assert error < (1e-5 if compute == "fp32" else 0.1)  # OLoRA makes the base larger, and rounds it more
    assert compute == "bf16" or moved > 1e3 * error * expected.norm()
    assert exported(tmp_path / "whole", tmp_path / "merged") == 0


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (("adapter={type: lora, init: pissa, use_dora: true}",), "config.keys_conflict"),
        (("adapter={type: lora, init: olora}", "model.quantization=nf4"), "config.keys_conflict"),
        (("adapter={type: lora, init: pissa}", "method={type: dpo, reference: adapter_off}"), "config.keys_conflict"),
    ],
)
def test_options_that_need_the_base_as_it_is(recipe, asked: tuple[str, ...], code: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(*asked)
    assert code in [problem.code for problem in refused.value.problems]


TYPES = {
    "lora": "{type: lora, rank: 4}",
    "oft": "{type: oft, block_size: 10, modules_to_save: [norm]}",
    "vera": "{type: vera, rank: 24, target_modules: [q_proj, down_proj]}",
    "ia3": "{type: ia3, target_modules: '.*(k|v|down)_proj'}",
    "loha": "{type: loha, rank: 3}",
    "lokr": "{type: lokr, rank: 2, factor: 4}",
}


def test_every_type_has_a_row_and_a_contract() -> None:
    assert set(ADAPTERS) == {"none", *TYPES}
    assert set(ADAPTER_TYPES) == set(TYPES) - {"lora"}


@pytest.mark.parametrize("compute", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TYPES)
def test_types_train_resume_exactly_load_by_peft_and_merge(
    recipe, small_model: Path, tmp_path: Path, name: str, compute: str
) -> None:
    steps = (*STEPS, f"adapter={TYPES[name]}", f"precision={compute}", "training.learning_rate=1e-2")
    loaded, plan = recipe(*steps, f"training.output_dir={tmp_path / 'whole'}", machine="cpu-amx")
    fresh = attach_adapter(load_model(loaded.run.model, plan), loaded.run.adapter, plan, 0)
    check_dtypes(fresh, plan.precision)
    assert plan.num_trainable.value == sum(one.numel() for one in fresh.parameters() if one.requires_grad)
    train(loaded, plan)
    resume = (f"training.output_dir={tmp_path / 'rest'}", f"training.resume={tmp_path}/whole/checkpoint-1")
    train(*recipe(*steps, *resume, machine="cpu-amx"))
    final, file = tmp_path / "whole" / "final", "adapter_model.safetensors"
    one, other = load_file(final / file), load_file(tmp_path / "rest" / "final" / file)
    assert all(torch.equal(one[key], other[key]) for key in one)
    if name == "vera":  # a tower's q_proj would widen its matrices where peft loads the whole checkpoint
        targets = json.loads((final / "adapter_config.json").read_text())["target_modules"]
        assert all(one.startswith("model.layers.") for one in targets)
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    plain = PeftModel.from_pretrained(model, final).eval()
    exact = fp32_plan(plan, "fp32")
    ours = load_adapter(load_model(loaded.run.model, exact, for_training=False), final, exact)
    ids_BT = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids_BT).logits, plain(ids_BT).logits, rtol=1e-5, atol=1e-5)
        with plain.disable_adapter():
            assert not torch.allclose(ours(ids_BT).logits, plain(ids_BT).logits, rtol=1e-3, atol=1e-3)
    assert exported(tmp_path / "whole", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(merged(ids_BT).logits, plain(ids_BT).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ADAPTER_TYPES)
def test_bases_that_a_type_does_not_support_are_refused_in_the_plan(recipe, name: str) -> None:
    with pytest.raises(PlanError) as refused:
        recipe(f"adapter={name}", "model.quantization=nf4")
    assert refused.value.code == "plan.adapter_unavailable"


KINDS = {**{name: asked for name, (asked, _) in PARTS.items()}, **TYPES, "pissa": "{type: lora, rank: 4, init: pissa}"}
SHARDED = ("lora", "pissa")
COPIED = ("lora", "first layer and head", "oft", "vera")  # plain, in parts, with a module of its own, shared parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"), [*((name, "ddp") for name in COPIED), *((name, "fsdp2") for name in SHARDED)]
)
def test_two_processes_train_the_same_and_resume_exactly(recipe, tmp_path: Path, name: str, strategy: str) -> None:
    base = ("precision=bf16", "data.max_length=64", "training.max_steps=2", "training.save_steps=1")
    base += (f"adapter={KINDS[name]}",)
    rows, shared = "training.per_device_train_batch_size=2", f"distributed.strategy={strategy}"
    whole, rest, alone = (f"training.output_dir={tmp_path / one}" for one in ("whole", "rest", "alone"))
    for where in ((whole,), (rest, f"training.resume={tmp_path}/whole/checkpoint-1")):
        assert in_processes(2, train_all([recipe(*base, rows, shared, *where, machine="cpu-amx", world_size=2)])) == [
            0,
            0,
        ]
    assert curve(tmp_path / "whole")[1:] == curve(tmp_path / "rest")
    one, other = (load_file(next((tmp_path / run / "final").glob("*.safetensors"))) for run in ("whole", "rest"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    train(*recipe(*base, alone, "training.per_device_train_batch_size=4", machine="cpu-amx"))
    assert apart(curve(tmp_path / "whole"), curve(tmp_path / "alone")) < 1e-3


@pytest.mark.parametrize("name", sorted(KINDS.keys() - SHARDED))
def test_what_cannot_be_sharded_is_refused_in_the_plan(recipe, name: str) -> None:
    with pytest.raises(PlanError) as refused:
        recipe(f"adapter={KINDS[name]}", "distributed.strategy=fsdp2", world_size=2)
    assert refused.value.code == "plan.strategy_unavailable"


@pytest.mark.parametrize(("rate", "warned"), [("1e-2", False), ("1e-12", True)])
def test_an_adapter_that_changes_nothing_is_named(
    recipe, caplog: pytest.LogCaptureFixture, rate: str, warned: bool
) -> None:
    caplog.set_level("INFO", "halftune.train.callbacks.adapter_effect")
    train(*recipe(*STEPS, "precision=bf16", f"training.learning_rate={rate}", machine="cpu-amx"))
    said = [one for one in caplog.records if one.name == "halftune.train.callbacks.adapter_effect"]
    assert [one.levelname == "WARNING" for one in said] == [warned]
