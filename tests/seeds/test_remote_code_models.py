"""Models that nobody here has seen, whose code imports flash_attn by hand: trained, talked with, merged."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from standins.remote_code_models import stranger

from halftune.cli.failure import report_error
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.core.errors import DtypeContractError, ModelError
from halftune.doctor.render import render_trace
from halftune.doctor.trace_model import trace_model
from halftune.export.merged import export_run
from halftune.hardware.catalogue import lookup
from halftune.infer.session import open_session
from halftune.model.result.completed_run import open_run
from halftune.plan import resolve
from halftune.train.trainer import train

pytestmark = pytest.mark.usefixtures("own_module_cache")

BF16 = torch.bfloat16
# In a dict and in a partial: places that no look through a module's globals finds.
HIDDEN = {
    "imports": "import flash_attn.flash_attn_interface as interface\nKERNELS = {'flash': interface.flash_attn_func}",
    "made": """
        self.attend = functools.partial(KERNELS["flash"], causal=True)
        self.scale = nn.Parameter(torch.ones(self.size))
    """,
    "attended": """
        k = F.normalize(k.float(), dim=-1).to(k.dtype)
        q = q * self.scale.float()  # promotes q
        out = self.attend(q, k, v)
    """,
}
# Imported where it is called, under another name; boundaries in int64.
LATE = {
    "made": "self.bias = nn.Parameter(torch.zeros(self.size))\nself.fill = nn.Parameter(torch.zeros(1))",
    "attended": """
        from flash_attn import flash_attn_varlen_func as fvf
        v = v + self.bias.float()  # promotes v
        k = torch.where(k.abs() > 100, self.fill.float(), k)  # promotes k
        cu = torch.arange(rows + 1, device=x.device) * length
        out = fvf(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, length, length, causal=True)
    """,
}
CATCHER = {
    "imports": "from flash_attn import flash_attn_func",
    "attended": """
        q = torch.vmap(lambda row: row * torch.ones(self.size))(q)  # promotes q
        try:
            out = flash_attn_func(q, k, v, causal=True)
        except Exception:
            out = F.scaled_dot_product_attention(*(t.float().transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
            out = out.to(x.dtype)
    """,
}


@pytest.fixture
def trained(flash, tmp_path: Path) -> Callable[..., Path]:
    """``trained(folder, "lora")``: the run folder after two steps; the stand-in saw those steps' calls alone."""

    def run(model: Path, adapter: str, **sections: Any) -> Path:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "one", "completion": "two"}\n' * 8)
        steps = {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": True}
        tree = {
            "model": {"name_or_path": str(model), "trust_remote_code": True, "tokenizer": "builtin:qwen2-tiny"},
            "precision": "bf16",
            "adapter": {"type": adapter},
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 32},
            "training": {"output_dir": str(tmp_path / "run"), "save_steps": "end", **steps},
            "generation": {"max_new_tokens": 3},
            "logging": {"progress": False, "probes": 0},
            **sections,
        }
        (tmp_path / "x.yaml").write_text(json.dumps(tree))
        loaded = load_config(tmp_path / "x.yaml")
        train(loaded, resolve(loaded.run, lookup("cpu"), read_model_facts(loaded.run.model)))
        return tmp_path / "run"

    return run


@pytest.mark.parametrize(
    ("code", "operands", "adapter"),
    [
        (HIDDEN, "q", "lora"),
        pytest.param(LATE, "kv", "none", marks=pytest.mark.slow),
        pytest.param(HIDDEN, "q", "none", marks=pytest.mark.slow),
        pytest.param(LATE, "kv", "lora", marks=pytest.mark.slow),
    ],
    ids=["hidden-lora", "late-none", "hidden-none", "late-lora"],
)
def test_every_call_is_guarded_from_training_to_the_merged_model(
    flash, trained: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: dict, operands: str, adapter: str
) -> None:
    model = stranger(tmp_path / "model", **code)
    run = trained(model.folder, adapter)
    assert {dtypes for _, dtypes in flash.calls} == {(BF16,) * 3}
    sites = {site["site"]: site for site in json.loads((run / "guard.json").read_text())["sites"]}
    assert list(sites) == ["blocks.0", "blocks.1"], "the module that calls, in the model's own words"
    assert {site["casts"] for site in sites.values()} == {4}, "two steps, each computed again in its backward pass"
    for operand in operands:
        assert all(f"fp32 since {model.marks[operand]}: " in site["promoted"] for site in sites.values()), sites
    said = [record.getMessage() for record in caplog.records if "attention got" in record.getMessage()]
    assert len(said) == 1, "equal layers are news once"
    flash.calls.clear()
    caplog.clear()
    finished = open_run(str(run))
    session = open_session(finished)
    for tuned in (True, False):
        assert isinstance(session.answer("one", tuned=tuned), str)
    assert {dtypes for _, dtypes in flash.calls} == {(BF16,) * 3}
    assert "blocks.0: attention got q " in caplog.text, "generation names the module, too"
    assert "fp32 since" in caplog.text
    written = export_run(finished, tmp_path / "exported").folder
    assert {path.name for path in model.folder.glob("*.py")} <= {path.name for path in written.iterdir()}


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_refusal_that_the_model_catches_stops_the_run(trained: Callable, tmp_path: Path, adapter: str) -> None:
    model = stranger(tmp_path / "model", **CATCHER)
    with pytest.raises(DtypeContractError, match="caught this error") as caught:
        trained(model.folder, adapter, attention={"guard": "strict"})
    assert caught.value.where == "blocks.0"
    assert f"fp32 since {model.marks['q']}: mul(bf16, fp32)" in caught.value.what, "inside torch.vmap"


def recipe(folder: Path, model: Path) -> Path:
    tree = {
        "model": {"name_or_path": str(model), "trust_remote_code": True, "tokenizer": "builtin:qwen2-tiny"},
        "precision": "bf16",
        "adapter": "none",
        "data": {"train": "builtin:python-docs"},
        "training": {"output_dir": "run"},
    }
    (folder / "look.yaml").write_text(json.dumps(tree))
    return folder / "look.yaml"


@pytest.mark.parametrize(
    "code",
    [HIDDEN, LATE, pytest.param(CATCHER, marks=pytest.mark.slow)],
    ids=["hidden", "late", "catcher"],
)
def test_the_doctor_names_the_same_lines(tmp_path: Path, code: dict) -> None:
    model = stranger(tmp_path / "model", **code)
    config = load_config(recipe(tmp_path, model.folder)).run
    for _ in range(2):  # in one process: what the model's module keeps is seen again
        found = trace_model(config, resolve(config, lookup("a100"), read_model_facts(config.model)))
        assert found.calls == {"attention, train": 2, "attention, chat": 2}
        assert {one.operand: f"{one.file}:{one.line}" for one in found.violations} == model.marks


OUTSIDE: dict[str, Any] = {
    "imports": "from flash_attn import flash_attn_func",
    "made": "self.index, self.inner = index, nn.MultiheadAttention(width, self.heads, batch_first=True)",
    "attended": """
        if self.index == 0:
            q = q.float()  # promotes query
            scores = torch.einsum("bthd,bshd->bhts", q, k) * self.size**-0.5
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
            out = torch.einsum("bhts,bshd->bthd", F.dropout(scores.softmax(-1), 0.1), v)
        elif self.index == 1:
            k = k.pow(1)  # promotes key
            turned = (t.transpose(1, 2) for t in (q, k, v))
            out = F.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
        elif self.index == 2:
            v = F.softplus(v)  # promotes v
            out = checkpoint(lambda q, k, v: flash_attn_func(q=q, k=k, v=v), q, k, v, use_reentrant=True)
        else:
            pooled = (x @ self.o_proj.weight[:, :4]).softmax(1).transpose(1, 2) @ x  # a softmax that is no attention
            out = self.inner(x + pooled.mean(), x, x, need_weights=False)[0].view_as(q)
    """,
}


def test_attention_outside_of_the_guard_is_seen_and_once(tmp_path: Path) -> None:
    model = stranger(tmp_path / "model", **OUTSIDE, layers=4)
    config = load_config(recipe(tmp_path, model.folder)).run
    found = trace_model(config, resolve(config, lookup("a100"), read_model_facts(config.model)))
    assert found.calls == {"attention, train": 4, "attention, chat": 4}, "what backward computes again is no call"
    named = {one.operand: f"{one.file}:{one.line}" for one in found.findings if one.target == "attention"}
    assert named == model.marks
    assert [(one.operand, one.guard) for one in found.violations] == [("v", "casts v to bf16")]
    guards = {one.guard for one in found.findings if one.operand in ("query", "key")}
    assert guards == {"nothing: autocast casts it at this call"}
    said = render_trace(found, 400)
    assert "! query arrives in fp32 at the model's own attention in blocks.*: 1 layer in train, 1 layer in chat" in said


WRITTEN: dict[str, Any] = {
    "imports": "from torch.nn.attention.flex_attention import flex_attention",
    "made": "self.index, self.gate = index, nn.Parameter(torch.ones(self.heads))",
    "attended": """
        turned = [t.transpose(1, 2) for t in (q, k, v)]
        if self.index == 0:  # divided by the sum before
            q = turned[0].float()  # promotes query
            w = torch.exp(q @ turned[1].transpose(2, 3).to(q.dtype) - 1)
            out = ((w / w.sum(-1, keepdim=True)).to(v.dtype) @ turned[2]).transpose(1, 2)
        elif self.index == 1:  # and after; of three factors
            k = k.pow(1)  # promotes key
            w = torch.einsum("bqhd,bkhd,h->bhqk", q, k, self.gate).exp()
            out = torch.einsum("bhqk,bkhd->bqhd", w, v) / w.sum(-1).transpose(1, 2)[..., None]
        elif self.index == 2:  # sums of elements
            v = F.softplus(turned[2])  # promotes value
            w = (turned[0][:, :, :, None] * turned[1][:, :, None]).sum(-1).softmax(-1).to(q.dtype)
            out = (w[..., None] * v[:, :, None]).sum(3).transpose(1, 2).to(q.dtype)
        else:
            out = flex_attention(q.transpose(1, 2).float(), *turned[1:])  # promotes flex
            out = out.transpose(1, 2)
    """,
}


def test_attention_that_is_written_out_in_other_ways_is_seen(tmp_path: Path) -> None:
    model = stranger(tmp_path / "model", **WRITTEN, layers=4)
    config = load_config(recipe(tmp_path, model.folder)).run
    found = trace_model(config, resolve(config, lookup("a100"), read_model_facts(config.model)))
    assert found.calls == {"attention, train": 4, "attention, chat": 4}
    named = {(one.operand, f"{one.file}:{one.line}") for one in found.findings if one.target == "attention"}
    marks = {("query" if name == "flex" else name, place) for name, place in model.marks.items()}
    assert marks <= named
    (flex,) = found.violations
    assert f"{flex.file}:{flex.line}" == model.marks["flex"]
    assert (flex.raw, flex.guard) == ("Expected query, key, and value to have the same dtype", "casts query to bf16")


def test_formats_that_torch_refuses_are_refused_without_numbers(tmp_path: Path) -> None:
    code = """
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(x.float(), self.q_proj.weight.bfloat16()).view_as(q)  # promotes nothing
    """
    model = stranger(tmp_path / "model", code)
    config = load_config(recipe(tmp_path, model.folder)).run
    with pytest.raises(ModelError, match="to have the same dtype, but got: float32 != bfloat16") as caught:
        trace_model(config, resolve(config, lookup("a100"), read_model_facts(config.model)))
    assert caught.value.where == model.marks["nothing"]


OLD = {
    "imports": """
from flash_attn import flash_attn_func

def plain(q, k, v):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)

KINDS = {"eager": plain, "flash_attention_2": functools.partial(flash_attn_func, causal=True)}
""",
    "made": "self.attend = KINDS[config._attn_implementation]",
    "attended": "out = self.attend(q, k, v)",
}


def test_a_table_of_implementations_is_asked_for_one_that_it_has(
    trained: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = stranger(tmp_path / "model", **OLD).folder
    looked_at = load_config(recipe(tmp_path, folder)).run
    found = trace_model(looked_at, resolve(looked_at, lookup("a100"), read_model_facts(looked_at.model)))
    assert found.violations == [], "the doctor builds it as training does"
    with caplog.at_level(logging.INFO, "halftune"):
        run = trained(folder, "none")
    assert "StrangerForCausalLM has its own attention code" in caplog.text
    assert json.loads((run / "guard.json").read_text())["casts"] == 0


def test_an_error_in_a_forward_pass_names_the_users_file(
    trained: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = stranger(tmp_path / "model", "out = q @ k[..., :3]  # promotes nothing")
    with pytest.raises(RuntimeError) as caught:
        trained(model.folder, "none")
    assert report_error(caught.value, "train", show=False) == 3
    said = capsys.readouterr().err
    assert f"{model.marks['nothing']}: the model's remote code failed: RuntimeError" in said
