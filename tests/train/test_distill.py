"""Distillation: equal to TRL in loss and gradients, for every split of the work; teachers that do not fit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, get_peft_model
from process_group import curve
from safetensors.torch import load_file, save_file
from tiny_model import TOKENS, a_model
from torch.nn import functional as F

from halftune.cli.preflight import check_inputs
from halftune.config.recipe_facts import run_facts
from halftune.config.sections.method import DistillMethod
from halftune.core.errors import ConfigError, ModelError, PlanError, TrainingError
from halftune.data.batch import collate
from halftune.data.store import Example, Segment
from halftune.methods.distill import Distill
from halftune.model.policy import divergence
from halftune.model.policy.head import HeadRows
from halftune.model.policy.policy import PolicyModel
from halftune.train.rollouts.distill import DistillRollouts
from halftune.train.trainer import train

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.gkd.gkd_trainer import GKDTrainer

PAD = 0
SETTINGS = [(0.0, 1.0), (1.0, 1.0), (0.5, 0.9), (0.2, 3.0)]


class AsIs:
    """A teacher that is a model."""

    def __init__(self, model: Any) -> None:
        self.policy = PolicyModel(model)

    @torch.no_grad()
    def head_rows(self, batch: Any) -> HeadRows:
        return self.policy.head_rows(batch)


def examples(count: int = 5) -> list[Example]:
    made = []
    for _ in range(count):
        size = int(torch.randint(4, 14, ()))
        ids = torch.randint(3, TOKENS, (size,), dtype=torch.int32).numpy()
        made.append(Example((Segment(ids, torch.arange(size).numpy() >= size // 3),)))
    return made


def method(**settings: Any) -> Distill:
    return Distill(DistillMethod(type="distill", teacher="builtin:qwen2-small", **settings))  # pyright: ignore[reportArgumentType]


def relative(ours: Any, theirs: Any) -> float:
    norm = torch.stack([one.norm() for one in theirs]).norm()
    return float(torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm() / norm)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("beta", "temperature"), SETTINGS)
def test_loss_and_gradients_are_those_of_trl(beta: float, temperature: float, packed: bool) -> None:
    teacher = a_model(hidden_size=48, num_attention_heads=4, num_hidden_layers=3).eval()
    student: Any = get_peft_model(a_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    weights = [one for one in student.parameters() if one.requires_grad]
    asked = method(beta=beta, temperature=temperature, sft_weight=0.4)
    for seed in range(3):
        torch.manual_seed(seed)
        made = examples()
        mine = asked.loss(PolicyModel(student), collate(made, PAD, packed=packed), AsIs(teacher))  # pyright: ignore[reportArgumentType]
        ours = torch.autograd.grad(mine.total, weights)

        padded = collate(made, PAD, packed=False)
        own, known = (model(**padded.inputs).logits[:, :-1] for model in (student, teacher))
        labels = padded.tokens["labels"][:, 1:]
        wanted = GKDTrainer.generalized_jsd_loss(own, known.detach(), labels, beta, temperature, reduction="sum")
        plain = F.cross_entropy(own.flatten(0, 1), labels.flatten(), reduction="sum")
        theirs = torch.autograd.grad(wanted + 0.4 * plain, weights)
        torch.testing.assert_close(mine.total, wanted + 0.4 * plain, rtol=1e-5, atol=0, check_dtype=False)
        assert relative(ours, theirs) < 1e-5
        means = {name: float(total / count) for name, (total, count) in mine.metrics.items()}
        count = sum(asked.weight(one) for one in made)
        assert means == pytest.approx(
            {"divergence": wanted.item() / count, "cross_entropy": plain.item() / count}, rel=1e-5
        )


def test_a_model_anchored_at_itself_is_asft() -> None:
    """LLaMA-Factory's ``_asft_cross_entropy``: dynamic fine-tuning, and a share of KL(before ‖ now)."""
    before = a_model().eval()
    now = a_model()
    weights = list(now.parameters())
    made = examples()
    asked = method(divergence_weight=0.3, sft_weight=1.0, sft_loss="dft")
    mine = asked.loss(PolicyModel(now), collate(made, PAD, packed=True), AsIs(before))  # pyright: ignore[reportArgumentType]
    padded = collate(made, PAD, packed=False)
    labels = padded.tokens["labels"][:, 1:].flatten()
    kept = labels >= 0
    own, known = (one(**padded.inputs).logits[:, :-1].flatten(0, 1)[kept] for one in (now, before))
    nll = F.cross_entropy(own, labels[kept], reduction="none")
    divergence = F.kl_div(own.log_softmax(-1), known.detach().softmax(-1), reduction="sum")
    wanted = (nll * (-nll.detach()).exp()).sum() + 0.3 * divergence
    torch.testing.assert_close(mine.total, wanted, rtol=1e-5, atol=0, check_dtype=False)
    assert relative(torch.autograd.grad(mine.total, weights), torch.autograd.grad(wanted, weights)) < 1e-5


@pytest.mark.parametrize(("beta", "temperature"), SETTINGS)
def test_the_gradient_is_that_of_finite_differences(beta: float, temperature: float) -> None:
    known = 2 * torch.randn(7, 30, dtype=torch.float64)
    logits = (2 * torch.randn(7, 30, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda one: divergence._Divergence.apply(one, known, beta, 1 / temperature), logits)


def test_chunks_and_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, known = torch.randn(23, 16).requires_grad_(), torch.randn(23, 24)
    head, other = torch.randn(16, 40), torch.randn(24, 44)  # vocabularies that are padded differently
    targets, places = torch.randint(40, (23,)), torch.arange(23)
    own = HeadRows(rows, lambda part: part @ head, 40, targets, places)
    teacher = HeadRows(known, lambda part: part @ other, 44, targets, places)
    found = []
    for chunk, block in ((23, 23), (5, 2)):
        monkeypatch.setattr(divergence, "scratch_rows", lambda _, block=block: block)
        values = divergence.divergences(own, teacher, 0.3, 2.0, chunk)
        found.append((values.detach(), *torch.autograd.grad(values.sum(), rows)))
    for one, same in zip(*found, strict=True):
        torch.testing.assert_close(one, same, rtol=1e-6, atol=1e-6)
    exact = [(logits.double() / 2).log_softmax(-1) for logits in (rows.detach() @ head, (known @ other)[:, :40])]
    wanted = GKDTrainer.generalized_jsd_loss(*(one * 2 for one in exact), beta=0.3, temperature=2.0, reduction="none")
    torch.testing.assert_close(found[0][0][0].double(), wanted.sum(-1), rtol=1e-5, atol=1e-7)


def test_a_batch_without_labels_has_a_graph_and_no_loss() -> None:
    student = a_model()
    blank = [Example((Segment(one.input_ids, one.loss_mask & False),)) for (one,) in (e.segments for e in examples(2))]
    found = method().loss(PolicyModel(student), collate(blank, PAD, packed=True), AsIs(a_model()))  # pyright: ignore[reportArgumentType]
    assert found.total == 0
    assert all(one is not None for one in torch.autograd.grad(found.total, list(student.parameters())))


DISTILL = ("method.type=distill", "adapter=none", "training.learning_rate=3e-3")


@pytest.mark.slow
def test_a_student_comes_close_to_its_teacher(recipe: Any, tmp_path: Path, small_model: Path) -> None:
    # the teacher: the same model after some training
    taught = ("adapter=none", "training.learning_rate=3e-3", "training.max_steps=20")
    train(*recipe(*taught, f"training.output_dir={tmp_path / 'teacher'}"))
    asked = (*DISTILL, f"method.teacher={tmp_path / 'teacher' / 'final'}", "training.max_steps=30", "method.beta=0.5")
    train(*recipe(*asked, "data.packing=true"))
    divergences = curve(tmp_path / "run", "divergence")
    assert divergences[-1] < 0.1 * divergences[0]
    assert curve(tmp_path / "run") == pytest.approx(divergences, rel=1e-6)


def test_another_teacher_is_another_run(recipe: Any, tmp_path: Path, small_model: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(small_model, teacher)
    asked = (*DISTILL, f"method.teacher={teacher}", "training.save_steps=2")
    train(*recipe(*asked, "training.max_steps=2"))
    weights = teacher / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ConfigError) as caught:
        train(*recipe(*asked, "training.max_steps=4"))
    assert caught.value.code == "train.run_changed"
    assert train(*recipe(*asked, "training.max_steps=4", "training.allow_changes=[teacher]")).step == 4


@pytest.mark.parametrize("fault", ["weights_missing", "pickle_refused", "tokenizer_missing"])
def test_plan_refuses_the_teachers_that_training_refuses(
    fault: str, recipe: Any, tmp_path: Path, small_model: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(small_model, teacher)
    for path in teacher.glob("tokenizer*" if fault == "tokenizer_missing" else "*.safetensors"):
        path.rename(path.with_name("pytorch_model.bin" if fault == "pickle_refused" else f"away-{path.name}.txt"))
    loaded, plan = recipe(*DISTILL, f"method.teacher={teacher}")
    for check in (lambda: check_inputs(loaded, run_facts(loaded.run)), lambda: train(loaded, plan)):
        with pytest.raises(ModelError) as caught:
            check()
        assert caught.value.code == f"model.{fault}"


def test_a_teacher_that_was_changed_after_its_training(recipe: Any, tmp_path: Path) -> None:
    train(*recipe("adapter=none", "training.max_steps=1", f"training.output_dir={tmp_path / 'taught'}"))
    loaded, _ = recipe(*DISTILL, f"method.teacher={tmp_path / 'taught' / 'final'}")
    check_inputs(loaded, run_facts(loaded.run), thorough=True)
    weights = tmp_path / "taught" / "final" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(ModelError) as caught:
        check_inputs(loaded, run_facts(loaded.run), thorough=True)
    assert caught.value.code == "model.result_damaged"


def test_a_nan_of_the_teacher_is_not_blamed_on_the_learning_rate(
    recipe: Any, tmp_path: Path, small_model: Path
) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(small_model, teacher)
    weights, name = load_file(teacher / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    weights[name][0, 0] = float("nan")
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TrainingError) as caught:
        train(*recipe(*DISTILL, f"method.teacher={teacher}"))
    assert caught.value.code == "train.non_finite"
    assert name in caught.value.remedy


def test_a_teacher_with_other_ids_is_refused(recipe: Any, tmp_path: Path, small_model: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(small_model, teacher)
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError) as caught:
        train(*recipe(*DISTILL, f"method.teacher={teacher}"))
    assert caught.value.code == "model.other_vocabulary"


def test_the_plan_counts_the_teacher_and_gives_it_formats_of_its_own(recipe: Any) -> None:
    _, alone = recipe("precision=auto", machine="h100")
    _, plan = recipe("precision=auto", *DISTILL[:1], "method.teacher=builtin:qwen2-small", machine="h100")
    assert plan.teacher is not None
    assert plan.teacher.precision.storage.value == "bf16"
    assert plan.memory.weights - alone.memory.weights == 2 * plan.teacher.num_parameters.value
    assert plan.method.reference.value == "teacher"
    small = "method.teacher={name_or_path: 'builtin:qwen2-small', quantization: nf4}"
    _, quantised = recipe("precision=auto", *DISTILL[:1], small, machine="h100")
    assert quantised.memory.weights < plan.memory.weights
    assert quantised.teacher.weights.format.value == "nf4"


def test_rows_are_packed_where_the_teacher_can_pack_them(recipe: Any, tmp_path: Path, small_model: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(small_model, teacher)
    config = json.loads((teacher / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}  # by the longest sample
    (teacher / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    for name, packed in (("builtin:qwen2-small", True), (teacher, False)):
        _, plan = recipe(*DISTILL[:1], "data.packing=auto", f"method.teacher={name}")
        assert plan.batch.packing.value is plan.teacher.batch.packing.value is packed
    with pytest.raises(PlanError) as caught:
        recipe(*DISTILL[:1], "data.packing=true", f"method.teacher={teacher}")
    assert caught.value.code == "attention.packing_unsupported"


@pytest.mark.parametrize(("share", "differs"), [(0.0, 0), (0.5, 1), (1.0, 1)])
def test_a_share_of_the_answers_is_the_models_own(share: float, differs: int, recipe: Any, tmp_path: Path) -> None:
    asked = (*DISTILL, "method.teacher=builtin:qwen2-small", "training.max_steps=2", "method.max_completion_length=4")
    for name, words in (("data", ()), ("own", (f"method.on_policy={share}",))):
        train(*recipe(*asked, *words, f"training.output_dir={tmp_path / name}", "training.logging_steps=1"))
    assert (curve(tmp_path / "own") != curve(tmp_path / "data")) == differs
    tokens = [sum(curve(tmp_path / name, "tokens_trained")) for name in ("own", "data")]
    if share == 1:
        assert tokens[0] <= 2 * 8 * 4  # steps, examples, tokens
    assert (tokens[0] < tokens[1]) == differs


def test_packed_rows_keep_room_for_the_models_answers(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()
    answered = DistillRollouts._answered

    def watched(self: DistillRollouts, batch: Any, feed: Any) -> Any:
        made = answered(self, batch, feed)
        rows.append(made.fed)
        return made

    monkeypatch.setattr(DistillRollouts, "_answered", watched)
    monkeypatch.setattr(
        "halftune.model.generate.until_end", lambda answer, _: answer.astype("int32")
    )  # as long as allowed
    asked = ("method.teacher=builtin:qwen2-small", "method.on_policy=1", "method.max_completion_length=30")
    asked += ("data.packing=true", "data.max_length=120", "training.per_device_train_batch_size=1")
    train(*recipe(*DISTILL, *asked, "training.max_steps=4"))
    assert 60 < max(rows) <= 120


@pytest.mark.parametrize(
    ("mask", "length"), [([0, 0, 1, 1], 2), ([0, 1, 0, 0, 1, 1, 0], 4), ([1, 1], 0), ([0, 0], 0), ([0, 1, 1, 0, 0], 1)]
)
def test_the_prompt_is_all_before_the_last_answer(mask: list[int], length: int) -> None:
    ids = torch.arange(len(mask), dtype=torch.int32).numpy()
    assert Segment(ids, torch.tensor(mask, dtype=torch.bool).numpy()).prompt.tolist() == list(range(length))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_nothing_is_learned_from_own_answers_but_the_divergence(
    share: float, loss: str, recipe: Any, tmp_path: Path, small_model: Path
) -> None:
    """A student of itself: the divergence is zero, and only answers of the data have a cross-entropy to learn."""
    method = {"type": "distill", "teacher": str(small_model), "beta": 0.5, "sft_weight": 1.0, "sft_loss": loss}
    method |= {"on_policy": share, "max_completion_length": 8}
    settings = ("training.max_steps=1", "training.max_grad_norm=0", f"method={json.dumps(method)}")
    train(*recipe(*settings, "adapter=none", f"training.output_dir={tmp_path}/run"))
    (norm,) = [json.loads(line)["grad_norm"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (norm < 1e-5) == (share == 1.0)
