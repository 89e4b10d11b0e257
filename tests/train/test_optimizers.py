"""The contract of every row of the table of optimizers: a new row is tested by being there."""

from __future__ import annotations

import importlib
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
import torch
from live_state import live_state
from process_group import curve, in_processes, train_all
from safetensors.torch import load_file, save_file
from tiny_model import checkpoint, plan, section
from torch import nn

from halftune.config.optimizers import OPTIMIZERS, Optim
from halftune.config.sections.model import LoraAdapter, NoAdapter
from halftune.config.sections.training import TrainingSection
from halftune.core.errors import ConfigError, PlanError, TrainingError
from halftune.core.optional import version_of
from halftune.model.adapters import attach_adapter
from halftune.model.files.target import RESOLVED
from halftune.model.load.load import load_model
from halftune.optim import BUILDERS, make_optimizer, show_average
from halftune.optim.device_side import skipping
from halftune.train.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from halftune.train.schedule import make_schedule
from halftune.train.state import TrainState
from halftune.train.trainer import train

ADAPTERS = {
    "full": NoAdapter(type="none"),
    "lora": LoraAdapter(rank=4, modules_to_save=("lm_head",)),
    "lora+": LoraAdapter(rank=4, target_modules=("q_proj", "embed_tokens"), lora_plus_ratio=16.0),
    "dora on embeddings": LoraAdapter(rank=4, target_modules=("q_proj", "embed_tokens"), use_dora=True),
}
FULL, CONSTANT = "adapter=none", "training.lr_scheduler_type=constant"
POSITION = {"rows_per_step": 1, "data": "", "order": "", "steps_in_epoch": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("tiny") / "model", tie_word_embeddings=False)


def training(name: str) -> TrainingSection:
    return TrainingSection(
        output_dir="x", optim=cast("Optim", name), weight_decay=0.1, learning_rate=1e-2, lr_scheduler_type="constant"
    )


def check_installed(name: str) -> None:
    """Skip the test of a row whose package is not there."""
    package = OPTIMIZERS[cast("Optim", name)].package
    if package and version_of(package) is None:
        pytest.skip(f"{package} is not installed")


def trained(folder: Path, name: str, dtype: str, adapter: Any = ADAPTERS["full"], seed: int = 0) -> TrainState:
    check_installed(name)
    planned, options = plan(dtype, dtype), training(name)
    model = attach_adapter(load_model(section(folder), planned), adapter, planned, seed)
    optimizer = make_optimizer(model, options, planned.precision, adapter)
    return live_state(
        config=SimpleNamespace(training=options),
        plan=planned,
        folder=folder.parent,
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(options, optimizer, 9),
        scaler=torch.amp.GradScaler(enabled=False),
        feed=SimpleNamespace(batch=planned.batch),
        micro_batch=planned.batch.micro_batch,
        position=POSITION,
    )


def save(one: TrainState, folder: Path, step: int) -> Path:
    (folder / RESOLVED).touch()
    one.folder, one.step = folder, step
    saved = save_checkpoint(one, [], {})
    assert saved is not None
    return saved


def step(one: TrainState, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in one.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    one.optimizer.step()
    one.schedule.step()


def everything(one: TrainState) -> list[torch.Tensor]:
    state = one.optimizer.state_dict()["state"]
    moments = [value for index in sorted(state) for _, value in sorted(state[index].items()) if torch.is_tensor(value)]
    return [*(p.detach() for p in one.model.parameters() if p.requires_grad), *moments]


def test_each_name_has_a_row_and_a_builder() -> None:
    assert set(get_args(Optim)) == set(OPTIMIZERS) == set(BUILDERS)


def test_a_checkpoint_from_another_device_does_not_say_how_to_compute(tmp_path: Path, folder: Path) -> None:
    one, other = trained(folder, "adamw", "fp32"), trained(folder, "adamw", "fp32")
    for group in one.optimizer.param_groups:
        group["fused"] = None  # as on MPS
    step(one, 1)
    load_checkpoint(save(one, tmp_path, 1), other)
    assert all(group["fused"] for group in other.optimizer.param_groups)
    with skipping(other.optimizer, torch.tensor(True)):
        step(other, 2)
    assert all(torch.equal(a, b) for a, b in zip(everything(one), everything(other), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_another_shape_is_refused(tmp_path: Path, folder: Path, name: str) -> None:
    """As a stranger's checkpoint may have it; kernels would read beyond it."""
    one = trained(folder, name, "fp32")
    step(one, 1)
    saved = save(one, tmp_path, 1)
    state = load_file(saved / "optimizer.safetensors")
    other = trained(folder, name, "fp32")
    for key in {key.partition(".")[2]: key for key in state}.values():
        if key.endswith(("_codes", "_scale")):
            continue  # copied into tensors of the right shape
        for wrong in (state[key].new_ones(3, 5), state[key].new_ones(2)):
            save_file({**state, key: wrong}, saved / "optimizer.safetensors")
            with pytest.raises(TrainingError) as error:
                load_checkpoint(saved, other)
            assert error.value.code == "train.checkpoint_damaged"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_after_save_and_load_is_bit_identical(tmp_path: Path, folder: Path, name: str, dtype: str) -> None:
    one, other = trained(folder, name, dtype), trained(folder, name, dtype)
    step(one, 1)
    step(one, 2)
    load_checkpoint(save(one, tmp_path, 2), other)
    step(one, 3)
    step(other, 3)
    ours, theirs = everything(one), everything(other)
    assert len(ours) == len(theirs)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_hold_every_trained_weight_once_and_its_state_is_as_declared(
    folder: Path, name: str, adapter: str
) -> None:
    from halftune.config.facts.model import read_model_facts
    from halftune.plan.weights.trainable import count_trainable

    one, spec = trained(folder, name, "fp32", ADAPTERS[adapter]), OPTIMIZERS[name]
    grouped = [id(p) for group in one.optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in one.model.parameters() if p.requires_grad)
    step(one, 1)
    state = one.optimizer.state_dict()["state"].values()
    measured = sum(v.nbytes for entry in state for v in entry.values() if torch.is_tensor(v) and v.ndim)
    declared = count_trainable(read_model_facts(section(folder)), ADAPTERS[adapter])
    assert declared.count.value == sum(p.numel() for p in one.model.parameters() if p.requires_grad)
    assert measured == declared.state_bytes(spec, width=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_of_zero_moves_nothing_without_decay(folder: Path, name: str) -> None:
    """As the first batches of GRPO give it, with equal rewards."""
    one = trained(folder, name, "fp32")
    for group in one.optimizer.param_groups:
        group["weight_decay"] = 0.0
    before = [p.detach().clone() for p in one.model.parameters()]
    for _ in range(3):
        for parameter in one.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        one.optimizer.step()
        one.schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(before, one.model.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_and_biases_have_no_weight_decay(folder: Path, name: str) -> None:
    one = trained(folder, name, "fp32")
    decay = {id(p): group["weight_decay"] for group in one.optimizer.param_groups for p in group["params"]}
    exempt = {key for key, p in one.model.named_parameters() if decay[id(p)] == 0}
    assert exempt == {key for key, _ in one.model.named_parameters() if "norm" in key or key.endswith(".bias")}
    assert exempt
    assert {decay[id(p)] for key, p in one.model.named_parameters() if key not in exempt} == {0.1}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_weight_decays_on_request(folder: Path, name: str) -> None:
    options = training(name).model_copy(update={"weight_decay_on": "all"})
    model = load_model(section(folder), plan("fp32", "fp32"))
    optimizer = make_optimizer(model, options, plan("fp32", "fp32").precision)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1}


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_torch_8bit"])
def test_8bit_adamw_follows_adamw(name: str) -> None:
    check_installed(name)
    start, target = torch.randn(64, 64), torch.randn(64, 64)
    ours, plain = (after_20_steps(partial(built, name=optim), start, target) for optim in (name, "adamw"))
    assert 0 < (ours - plain).norm() < 0.05 * (plain - start).norm()


@pytest.mark.parametrize(("name", "kind"), [("adamw_torch_8bit", "AdamW8bit"), ("adamw_torch_4bit", "AdamW4bit")])
def test_it_is_torchaos(name: str, kind: str) -> None:
    check_installed(name)
    start, target = torch.randn(64, 64), torch.randn(64, 64)
    with torch.compiler.set_stance("force_eager"):
        build = partial(torchao_kind(kind), lr=1e-2, weight_decay=0.1)
        theirs = after_20_steps(lambda model: build(model.parameters()), start, target)
    assert torch.equal(after_20_steps(partial(built, name=name), start, target), theirs)


def torchao_kind(name: str) -> Any:
    import torchao.optim

    return getattr(torchao.optim, name)


def built(model: nn.Module, name: str) -> torch.optim.Optimizer:
    return make_optimizer(model, training(name), plan("fp32", "fp32").precision)


def after_20_steps(build: Any, start: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    model = nn.Linear(64, 64, bias=False)
    model.weight.data.copy_(start)
    optimizer = build(model)
    for _ in range(20):
        model.weight.grad = model.weight.detach() - target
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lora_plus_raises_the_rate_of_b_and_resumes_exactly(tmp_path: Path, folder: Path, name: str) -> None:
    one, other = (trained(folder, name, "fp32", ADAPTERS["lora+"]) for _ in range(2))
    names = {id(p): key for key, p in one.model.named_parameters()}
    rates = {names[id(p)]: group["lr"] for group in one.optimizer.param_groups for p in group["params"]}
    assert {rate for key, rate in rates.items() if ".lora_B." in key} == {16e-2}
    assert {rate for key, rate in rates.items() if ".lora_B." not in key} == {1e-2}
    step(one, 1)
    load_checkpoint(save(one, tmp_path, 1), other)
    step(one, 2)
    step(other, 2)
    assert all(torch.equal(a, b) for a, b in zip(everything(one), everything(other), strict=True))


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if "mps" not in spec.devices])
def test_a_device_that_does_not_run_an_optimizer_is_refused(recipe, name: str) -> None:
    with pytest.raises(PlanError) as refused:
        recipe(f"training.optim={name}", CONSTANT, machine="m2")
    assert refused.value.code == "plan.optimizer_unavailable"


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.state_format])
def test_a_fixed_format_of_state_is_planned_and_no_other_accepted(recipe, name: str) -> None:
    _, planned = recipe(f"training.optim={name}", machine="h100")
    assert planned.precision.optimizer_state.value == OPTIMIZERS[name].state_format
    with pytest.raises(PlanError) as refused:
        recipe(f"training.optim={name}", "precision.optimizer_state=bf16", machine="h100")
    assert refused.value.code == "precision.optimizer_state_conflict"


def test_muon_updates_hidden_matrices_only(folder: Path) -> None:
    one = trained(folder, "muon", "fp32")
    names = {id(p): name for name, p in one.model.named_parameters()}
    by = {kind: [g for g in one.optimizer.param_groups if g["muon"] is kind] for kind in (True, False)}
    muon, adamw = ({names[id(p)] for group in groups for p in group["params"]} for groups in by.values())
    assert {name.rpartition("_proj")[1] for name in muon} == {"_proj"}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= adamw
    assert not any(name.endswith("_proj.weight") for name in adamw)
    reference = torch.optim.Muon(
        [torch.nn.Parameter(p.detach().clone()) for group in by[True] for p in group["params"]],
        lr=1e-2, weight_decay=0.1, momentum=0.95, ns_steps=5, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    step(one, 1)
    for ours, theirs in zip(by[True][0]["params"], reference.param_groups[0]["params"], strict=True):
        theirs.grad = ours.grad
    reference.step()
    for ours, theirs in zip(by[True][0]["params"], reference.param_groups[0]["params"], strict=True):
        assert torch.equal(ours, theirs)


class Composite(torch.optim.Optimizer):
    """Two optimizers behind one ``step``, whose state nobody saves."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.parts = [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class WithObjects(torch.optim.SGD):
    """State that is neither a tensor nor a number."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = SimpleNamespace()


@pytest.mark.parametrize("kind", [Composite, WithObjects])
def test_a_checkpoint_refuses_an_optimizer_whose_state_it_cannot_hold(tmp_path: Path, folder: Path, kind: Any) -> None:
    one = trained(folder, "sgd", "fp32")
    one.optimizer = kind([p for p in one.model.parameters() if p.requires_grad])
    one.schedule = make_schedule(training("sgd"), one.optimizer, 9)
    step(one, 1)
    with pytest.raises(TrainingError, match=kind.__name__):
        save(one, tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [RESOLVED]


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, folder: Path) -> None:
    one = trained(folder, "adamw", "fp32")
    step(one, 1)
    saved = save(one, tmp_path, 1)
    with pytest.raises(TrainingError, match=r"adamw.*muon") as refused:
        load_checkpoint(saved, trained(folder, "muon", "fp32"))
    assert "training.optim: adamw" in str(refused.value.remedy)


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if spec.cannot_shard])
def test_an_optimizer_that_cannot_be_sharded_is_refused(recipe, name: str) -> None:
    with pytest.raises(PlanError) as refused:
        recipe(FULL, f"training.optim={name}", CONSTANT, "distributed.strategy=fsdp2", world_size=2)
    assert refused.value.code == "plan.strategy_unavailable"


# One of each: a state per weight, none, factors, one with a second optimizer; bitsandbytes' and torchao's state.
SHARED = {
    "fp32": ("adamw", "sgd", "adafactor", "muon", "adamw_8bit", "adamw_torch_8bit"),
    "bf16": ("adamw", "muon", "adamw_8bit"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trainable", SHARED)
def test_two_processes_resume_exactly(recipe, tmp_path: Path, trainable: str) -> None:
    """With shards where the optimizer allows them, else with whole models."""
    steps = (FULL, "training.max_steps=2", "training.save_steps=1")
    rows = {"fp32": 2, "bf16": 1}[trainable]  # half precision is slow on CPUs
    formats = (f"precision={{compute: {trainable}, trainable: {trainable}}}", "data.max_length=64")
    formats += (f"training.per_device_train_batch_size={rows}",)
    made: dict[str, list[tuple[str, ...]]] = {"": [], "-resumed": []}
    for name, (ending, of) in product(SHARED[trainable], made.items()):
        strategy = "ddp" if OPTIMIZERS[name].cannot_shard else "fsdp2"
        resume = f"{tmp_path / name}/checkpoint-1" if ending else "never"
        where = (f"training.output_dir={tmp_path / (name + ending)}", f"training.resume={resume}")
        of.append((*steps, *formats, f"training.optim={name}", f"distributed.strategy={strategy}", *where))
    machine = "cpu" if trainable == "fp32" else "cpu-amx"
    for of in made.values():  # a checkpoint must be there before a recipe can name it
        assert in_processes(2, train_all([recipe(*one, machine=machine, world_size=2) for one in of])) == [0, 0]
    for name in SHARED[trainable]:
        assert curve(tmp_path / name)[1:] == curve(tmp_path / f"{name}-resumed"), name
        one, other = (
            load_file(next((tmp_path / place / "final").glob("*.safetensors"))) for place in (name, f"{name}-resumed")
        )
        assert all(torch.equal(one[key], other[key]) for key in one), name


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_projected_optimizers_are_their_packages(folder: Path, name: str) -> None:
    """Rank 6 of 32, and projections that are renewed: as the package's class by itself, on the same groups."""
    check_installed(name)
    package = importlib.import_module(f"{name}_torch")
    options = training(name).model_copy(update={"projection_rank": 6, "projection_interval": 2})
    models = [load_model(section(folder), plan("fp32", "fp32")) for _ in range(2)]
    ours = make_optimizer(models[0], options, plan("fp32", "fp32").precision)
    places = {id(one): index for index, one in enumerate(models[0].parameters())}
    same = list(models[1].parameters())
    groups = [{**one, "params": [same[places[id(p)]] for p in one["params"]]} for one in ours.param_groups]
    kind = package.GaLoreAdamW if name == "galore" else package.APOLLOAdamW
    theirs = kind(groups, lr=1e-2, no_deprecation_warning=True)
    assert sum("rank" in group for group in groups) == 1
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        for mine, other in zip(models[0].parameters(), same, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    for mine, other in zip(models[0].parameters(), same, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "kind"), [("stable_adamw", "StableAdamW"), ("adamw_schedule_free", "AdamWScheduleFree")]
)
def test_it_is_the_packages(folder: Path, name: str, kind: str) -> None:
    check_installed(name)
    package = importlib.import_module({"stable_adamw": "optimi"}.get(name, "schedulefree"))
    models = [load_model(section(folder), plan("fp32", "fp32")) for _ in range(2)]
    ours = make_optimizer(models[0], training(name), plan("fp32", "fp32").precision)
    same = dict(zip(map(id, models[0].parameters()), models[1].parameters(), strict=True))
    groups = [
        {"params": [same[id(p)] for p in group["params"]], "weight_decay": group["weight_decay"]}
        for group in ours.param_groups
    ]
    more = {"kahan_sum": False, "foreach": False, "triton": False} if name == "stable_adamw" else {}
    theirs = getattr(package, kind)(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, **more)
    if not more:
        theirs.train()
    for number in range(5):
        for one, model in zip((ours, theirs), models, strict=True):
            generator = torch.Generator().manual_seed(number)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator)
            one.step()
        show_average(ours, training(name), shown=True)  # and back, which changes nothing
        show_average(ours, training(name), shown=False)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))
    if not more:
        theirs.eval()
        show_average(ours, training(name), shown=True)
        assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def test_an_average_is_evaluated_saved_and_the_result(recipe, tmp_path: Path) -> None:
    """A run that goes on from the middle ends with the same bits, and other evaluations change nothing."""
    check_installed("adamw_schedule_free")
    optim = ("training.optim=adamw_schedule_free", CONSTANT, "training.max_steps=6", "training.save_steps=3")
    optim += ("training.save_total_limit=9",)
    whole, resumed, plain = (f"training.output_dir={tmp_path / name}" for name in ("whole", "resumed", "plain"))
    train(*recipe(*optim, whole, "data.eval_split=8", "training.eval_steps=2", "training.load_best=true"))
    kept = f"training.resume={tmp_path / 'whole' / 'checkpoint-3'}"
    train(*recipe(*optim, resumed, "data.eval_split=8", "training.eval_steps=3", kept))
    train(*recipe(*optim[:3], "training.save_steps=end", plain, "data.eval_split=8", "training.eval_steps=6"))
    results = [load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("resumed", "plain")]
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[1])
    assert curve(tmp_path / "whole")[3:] == curve(tmp_path / "resumed")
    assert curve(tmp_path / "whole") == curve(tmp_path / "plain")
    assert curve(tmp_path / "whole", "eval_loss")[-1] == curve(tmp_path / "plain", "eval_loss")[-1]
    saved = load_file(tmp_path / "resumed" / "checkpoint-6" / "trainable.safetensors")
    state = load_file(tmp_path / "resumed" / "checkpoint-6" / "optimizer.safetensors")
    points = [value for key, value in state.items() if key.endswith(".y")]
    assert len(points) == len(saved) == len(results[0])
    assert sorted(value.sum().item() for value in saved.values()) == sorted(v.sum().item() for v in results[0].values())
    assert sorted(value.sum().item() for value in saved.values()) != sorted(value.sum().item() for value in points)
    losses = curve(tmp_path / "whole", "eval_loss")
    best = load_file(tmp_path / "whole" / f"checkpoint-{2 * losses.index(min(losses)) + 2}" / "trainable.safetensors")
    final = load_file(tmp_path / "whole" / "final" / "adapter_model.safetensors")
    assert sorted(value.sum().item() for value in best.values()) == sorted(v.sum().item() for v in final.values())


@pytest.mark.parametrize(
    ("override", "code"),
    [("training.lr_scheduler_type=cosine", "config.keys_conflict"), ("training.adam_beta1=0", "config.out_of_range")],
)
def test_an_average_has_no_schedule(recipe, override: str, code: str) -> None:
    others = () if "scheduler" in override else (CONSTANT,)
    with pytest.raises(ConfigError) as refused:
        recipe("training.optim=adamw_schedule_free", *others, override)
    assert [problem.code for problem in refused.value.problems if "package" not in problem.code] == [code]
