"""Ten bugs that trainers had in 2026 without an error, each a test here: from a row to a gradient or a saved file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from tiny_model import a_model, checkpoint, finished_run, nll_sum, plan, section
from transformers import AutoModelForCausalLM, AutoTokenizer

from halftune.config.load import load_config
from halftune.config.sections.method import GrpoMethod
from halftune.config.sections.model import TokensSection
from halftune.data.batch import collate
from halftune.data.pipeline import prepare
from halftune.data.store import NO_LABEL, Example, Segment
from halftune.export.merged import export_run
from halftune.methods import AdapterOff, Loss
from halftune.methods.grpo import ADVANTAGES, Grpo
from halftune.model.files.builtin import materialize
from halftune.model.load.load import load_model
from halftune.model.policy.policy import PolicyModel
from halftune.model.result.completed_run import open_run
from halftune.model.tokenizer.tokenizer import load_tokenizer

CONSTANT = 1e-5


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert float((ours[name] - one).norm() / one.norm().clamp(min=1e-6)) < CONSTANT, name


def sequences(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(3, 37, (1, length)) for length in lengths]


def one(ids: torch.Tensor) -> Example:
    return Example((Segment(ids[0].numpy().astype(np.int32), np.ones(ids.shape[1], dtype=bool)),))


def alone(model: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """The sum over rows by transformers' own loss, a mean over all but the first token."""
    return sum((model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) for ids in rows), torch.zeros(()))


def test_a_tied_head_gets_its_gradient_once() -> None:
    """The loss of chunks of rows, where head and embedding are one weight that is trained."""
    model, rows = a_model(tie_word_embeddings=True), sequences(9)
    ours = gradients(model, nll_sum(model, {"input_ids": rows[0], "labels": rows[0]}))
    assert_same(ours, gradients(model, alone(model, rows)))


def prepared(tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"name_or_path": "builtin:qwen2-tiny", **more.pop("model", {})},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, **more},
        "training": {"output_dir": str(tmp_path / "run"), "max_steps": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    run = load_config(tmp_path / "recipe.yaml").run
    tokenizer = load_tokenizer(run.model)
    return prepare(run, tokenizer).train, tokenizer


def test_a_template_and_a_tokenizer_that_both_write_bos_give_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    source = materialize("llama-tiny")
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    tokenizer.add_bos_token = True
    turn = "<{{ m.role }}>{{ m.content }}{{ eos_token }}"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}" + turn + "{% endfor %}"
    tokenizer.save_pretrained(folder)
    row = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}
    made, ours = prepared(tmp_path, [row], model={"name_or_path": str(folder)})
    ids = made.example(0).segments[0].input_ids.tolist()
    first = tokenizer.convert_tokens_to_ids(ours.bos_token)
    assert ids[0] == first
    assert ids[1] != first


def test_the_first_tokens_of_packed_samples_are_left_out_once() -> None:
    """What the loss is divided by: labels, without the first token of each sample."""
    rows = sequences(5, 9, 2)
    batch = collate([one(ids) for ids in rows], 0, packed=True)
    labels = batch.tokens["labels"]
    assert int((labels != NO_LABEL).sum()) == sum(ids.shape[1] - 1 for ids in rows)
    model = a_model()
    summed = PolicyModel(model).nll_sum(batch)
    assert float(summed) == pytest.approx(float(alone(model, rows)), rel=CONSTANT)


def test_square_experts_are_not_turned_by_a_merge(tmp_path: Path) -> None:
    """Gate and up as wide as the model: a weight that is transposed keeps its shape."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "hidden_size": 32}
    torch.manual_seed(0)
    base = a_model("qwen3_moe", **sizes, vocab_size=4096, head_dim=8)
    assert base.model.layers[0].mlp.experts.gate_up_proj.shape[1:] == (32, 32)
    base.save_pretrained(tmp_path / "base")
    adapter = {"type": "lora", "rank": 4, "target_parameters": ["experts.gate_up_proj"], "target_modules": ["q_proj"]}
    run = finished_run(tmp_path / "run", tmp_path / "base", adapter={**adapter})
    export_run(open_run(str(run)), tmp_path / "merged", "fp32")
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        before = plain(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(plain, str(run / "final"))(input_ids=ids).logits
    assert float((merged - adapted).norm() / adapted.norm()) < CONSTANT
    assert float((before - adapted).norm() / adapted.norm()) > 1e-3


def test_rope_scaling_under_its_old_name_is_kept(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    made = checkpoint(tmp_path / "model")
    raw = json.loads((made / "config.json").read_text())
    raw.pop("rope_parameters", None)
    raw |= {"rope_scaling": scaling, "rope_theta": 10000.0}
    (made / "config.json").write_text(json.dumps(raw))
    ours = load_model(section(made), plan())
    (made / "config.json").write_text(json.dumps({**raw, "rope_scaling": None}))
    without = load_model(section(made), plan())
    kept = ours.config.rope_parameters
    assert (kept["rope_type"], kept["factor"]) == ("yarn", 4.0)
    ids = torch.arange(3, 103)[None] % 250
    with torch.no_grad():
        assert float((ours(input_ids=ids).logits - without(input_ids=ids).logits).norm()) > 1e-3


def test_every_projections_adapter_is_found_by_its_consumer(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "base")
    adapter = {"type": "lora", "rank": 2, "target_modules": "all-linear"}
    run = finished_run(tmp_path / "run", made, adapter=adapter)
    saved = load_file(run / "final" / "adapter_model.safetensors")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made), str(run / "final"))
    live = {name.replace(".default", ""): x for name, x in adapted.named_parameters() if ".lora_" in name}
    assert live.keys() == saved.keys()
    assert len(saved) == 2 * 7 * 2  # A and B of seven projections in two layers
    for name, x in saved.items():
        assert torch.equal(live[name], x), name


def test_gradients_of_the_delta_rule_beyond_the_first_row() -> None:
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    more = {**linear, "linear_num_value_heads": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    model, rows = a_model("qwen3_5_text", **more), sequences(11, 11, 11)
    theirs = gradients(model, alone(model, rows))
    batch = collate([one(ids) for ids in rows], 0, packed=False)
    assert_same(gradients(model, PolicyModel(model).nll_sum(batch)), theirs)


def test_passes_are_summed_and_divided_once() -> None:
    """Gradients of a global batch are those of its mean over tokens, however many passes it takes."""
    model, rows = a_model(), sequences(4, 12, 7, 3)
    tokens = sum(ids.shape[1] - 1 for ids in rows)
    whole = gradients(model, alone(model, rows) / tokens)
    model.zero_grad()
    for part in (rows[:1], rows[1:3], rows[3:]):
        batch = collate([one(ids) for ids in part], 0, packed=True)
        (PolicyModel(model).nll_sum(batch) / tokens).backward()
    assert_same({name: x.grad for name, x in model.named_parameters() if x.grad is not None}, whole)


def test_the_kl_divergence_is_added_once() -> None:
    rows, advantage = sequences(8, 6), torch.tensor([0.5, -0.5])
    examples = [Example((Segment(ids[0].numpy().astype(np.int32), np.arange(ids.shape[1]) > 2),)) for ids in rows]

    def loss(beta: float) -> Loss:
        settings: dict[str, Any] = {"type": "grpo", "rewards": ("exact_answer",), "num_generations": 2}
        method = Grpo(GrpoMethod(**settings, max_completion_length=8, beta=beta, loss="dapo"))
        batch = replace(collate(examples, 0, packed=True), examples=(0,))
        batch.columns.update({ADVANTAGES: advantage, "weight": torch.ones(2)})
        policy = PolicyModel(moved)
        return method.loss(policy, batch, Known(policy))

    class Known(AdapterOff):
        def token_logprobs(self, batch: Any, temperature: float = 1.0) -> torch.Tensor:
            with torch.no_grad():
                return PolicyModel(base).token_logprobs(batch, temperature)

    base, moved = a_model(), a_model()
    with torch.no_grad():
        for x in moved.parameters():
            x.add_(0.02 * torch.randn_like(x))
    plain, once, twice = (float(loss(beta).total.detach()) for beta in (0.0, 0.1, 0.2))
    batch = collate(examples, 0, packed=True)
    with torch.no_grad():
        apart = PolicyModel(base).token_logprobs(batch) - PolicyModel(moved).token_logprobs(batch)
    assert once - plain == pytest.approx(0.1 * float((apart.exp() - apart - 1).sum()), rel=1e-4)
    assert twice - plain == pytest.approx(2 * (once - plain), rel=1e-4)


def test_added_tokens_leave_a_padded_vocabulary_as_it_is(tmp_path: Path) -> None:
    """The embedding has more rows than the tokenizer has tokens: new tokens take free rows, and old ones stay."""
    made = checkpoint(tmp_path / "model", vocab_size=4160, tie_word_embeddings=False)
    tokens = TokensSection(add=("<|note|>", "<|end_note|>"))
    asked = section(made, tokenizer="builtin:qwen2-tiny", tokens=tokens)
    size = len(load_tokenizer(section(made, tokenizer="builtin:qwen2-tiny")))
    assert load_tokenizer(asked).convert_tokens_to_ids(["<|note|>", "<|end_note|>"]) == [size, size + 1]
    saved, model = load_file(made / "model.safetensors"), load_model(asked, plan())
    for name, layer in (("model.embed_tokens", "input"), ("lm_head", "output")):
        weight = getattr(model, f"get_{layer}_embeddings")().weight
        assert torch.equal(weight[:size], saved[f"{name}.weight"][:size])
        assert weight.shape == saved[f"{name}.weight"].shape
