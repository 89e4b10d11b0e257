"""``halftune doctor`` as its user runs it: clean models, foreign models, impossible wishes, broken code."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import dynamic_module_utils

from halftune.cli import main
from halftune.config.facts.model import read_model_facts
from halftune.config.load import load_config
from halftune.doctor import inputs
from halftune.doctor.trace_model import trace_model
from halftune.hardware.catalogue import lookup
from halftune.plan import resolve

pytestmark = pytest.mark.usefixtures("own_module_cache")

NUMBERS = itertools.count()
CONFIGURATION = """
from transformers import PretrainedConfig

class StrangerConfig(PretrainedConfig):
    model_type = "stranger"

    def __init__(self, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=64, **rest):
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_attention_heads, self.vocab_size = num_attention_heads, vocab_size
        super().__init__(**rest)
"""
MODELING = """
import torch
from flash_attn import flash_attn_func as attend
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_stranger import StrangerConfig


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        {q}
        return self.o_proj(attend(q, k, v, causal=True).flatten(2))


class StrangerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = StrangerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Attention(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids=None, use_cache=None, past_key_values=None, **rest):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return CausalLMOutputWithPast(logits=self.head(x))
"""


def recipe(folder: Path, model: str | dict[str, Any] = "builtin:qwen2-tiny", **sections: Any) -> str:
    file = folder / "x.yaml"
    content = {
        "model": {"name_or_path": model} if isinstance(model, str) else model,
        "precision": "bf16",
        "adapter": {"type": "none"},
        "data": {"train": "builtin:python-docs", "max_length": 512},
        "training": {"output_dir": str(folder.with_name(f"{folder.name}-run")), "per_device_train_batch_size": 3},
        **sections,
    }
    file.write_text(json.dumps(content))
    return str(file)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["doctor", *arguments])
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def traced(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = doctor(capsys, *arguments, "--json")
    assert out, err
    return code, json.loads(out)["trace"]


def stranger(folder: Path, q: str = "q = nn.functional.layer_norm(q, q.shape[-1:])", layers: int = 3) -> Path:
    folder.mkdir()
    classes = {
        "AutoConfig": "configuration_stranger.StrangerConfig",
        "AutoModelForCausalLM": "modeling_stranger.StrangerForCausalLM",
    }
    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": 4096}
    kind = f"stranger{next(NUMBERS)}"  # a process keeps the first class that it saw for a type
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": classes, **sizes}))
    (folder / "configuration_stranger.py").write_text(CONFIGURATION.replace('"stranger"', f'"{kind}"'))
    (folder / "modeling_stranger.py").write_text(MODELING.replace("{q}", q))
    return folder


def code_of(folder: Path) -> dict[str, Any]:
    return {"name_or_path": str(folder), "trust_remote_code": True, "tokenizer": "builtin:qwen2-tiny"}


def test_without_a_recipe_it_looks_at_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = doctor(capsys)
    assert code == 0
    for name in ("python", "device", "torch", "flash-attn", "disk", "hub"):
        assert f"\n {name} " in out
    assert "pip install flash-attn --no-build-isolation" in " ".join(out.split())
    assert "Dtype trace" not in out


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CLEAN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "full_attention"], **HYBRID},
}


PLAIN = [("qwen2", "lora"), ("llama", "none"), ("gemma3_text", "none"), ("qwen3_5_text", "none")]
OTHER = {"none": "lora", "lora": "none"}
SLOW = [pytest.param(kind, OTHER[adapter], marks=pytest.mark.slow) for kind, adapter in PLAIN]


@pytest.mark.parametrize(("kind", "adapter"), [*PLAIN, *SLOW])
def test_clean_models_raise_no_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, adapter: str
) -> None:
    sizes = {**SMALL, "num_hidden_layers": 3, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **CLEAN[kind]}))
    model = {"name_or_path": str(tmp_path), "tokenizer": "builtin:qwen2-tiny"}
    code, trace = traced(capsys, "--config", recipe(tmp_path, model, adapter={"type": adapter}), "--hardware", "a100")
    assert code == 0
    assert trace["contract_holds"]
    assert [finding for finding in trace["findings"] if finding["breaks"]] == []
    assert (trace["rules"], trace["tensors"], trace["compute"]) == ("CUDA", "without weights", "bf16")
    assert trace["calls"]["attention, train"] + trace["calls"].get("linear attention, train", 0) == 3


ROTATED = "torch.view_as_real(torch.view_as_complex(q.float().unflatten(-1, (-1, 2))) * 1j).flatten(-2)"
TABLE = "torch.outer(torch.arange(q.shape[1]).float(), torch.ones(8).bfloat16()).sin()[:, None]"
PRECISE = "nn.functional.linear(x.float(), self.o_proj.weight.float()).view_as(q)"


LINES = [
    ("q = nn.functional.layer_norm(q, q.shape[-1:])", "layer_norm(bf16)", "autocast's fp32 list"),
    ("q = q * self.scale", "mul(bf16, fp32)", "type promotion, fp32 from parameter layers.1.scale"),
    ("q = q.float()", "float(bf16)", "asked for"),
    ("q = q / q.norm(dim=-1, keepdim=True)", "norm(bf16)", "autocast's fp32 list"),
    (f"q = {ROTATED}", "float(bf16)", "asked for"),
    ("q = torch.compile(lambda x: x.float() * 2)(q)", "float(bf16)", "asked for"),
    (f"q = q * {TABLE}", "mul(bf16, fp32)", "type promotion, fp32 from index at modeling_stranger.py:"),
    (f"with torch.autocast('cpu', enabled=False): q = {PRECISE}", "linear(fp32, fp32)", "the model's code switches"),
]


@pytest.fixture(scope="module")
def found_in_lines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A foreign model with another of ``LINES`` in each layer, and what breaks there."""
    root = tmp_path_factory.mktemp("lines")
    cases = "\n        ".join(f"if self.index == {at}:\n            {q}" for at, (q, _, _) in enumerate(LINES))
    folder = stranger(root / "stranger", cases, layers=len(LINES))
    code = folder / "modeling_stranger.py"
    text = code.read_text().replace("Attention(config) for _ in", "Attention(config, at) for at in")
    indexed = "def __init__(self, config, index):\n        super().__init__()\n        self.index = index"
    code.write_text(text.replace("def __init__(self, config):\n        super().__init__()", indexed, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(root / "modules"))
        patch.syspath_prepend(str(root / "modules"))
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)  # another test's folder
        run = load_config(recipe(root, model=code_of(folder))).run
        found = trace_model(run, resolve(run, lookup("a100"), read_model_facts(run.model)))
    return code, [one.to_dict() for one in found.violations]


@pytest.mark.parametrize("index", range(len(LINES)))
def test_a_foreign_model_is_named_by_line(found_in_lines: tuple[Path, list[dict[str, Any]]], index: int) -> None:
    code, broken = found_in_lines
    assert len(broken) == len(LINES)
    q, op, cause = LINES[index]
    (number,) = [at for at, line in enumerate(code.read_text().splitlines(), 1) if line.strip() == q]
    (finding,) = [one for one in broken if one["line"] == number]
    assert finding["file"] == str(code)
    assert (finding["operand"], finding["op"], finding["becomes"]) == ("q", op, "fp32")
    assert finding["cause"].startswith(cause)
    assert finding["layers"] == {"train": 1, "chat": 1}
    assert list(finding["passes"]) == ["forward", "backward"]
    assert finding["raw"] == "FlashAttention only support fp16 and bf16 data type"
    assert finding["guard"] == "casts q to bf16"
    per_token = 32 * (2 + 4)  # channels × (bf16 copy forward + fp32 gradient back)
    assert finding["bytes_per_step"] == per_token * 3 * 512


def test_the_function_with_a_cache_and_flash_attn_3_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = "flash_attn_with_kvcache(q, k.float(), v)"
    folder = stranger(tmp_path / "stranger", f"q = attend_3(q.float(), k, v) if self.training else {cached}")
    code = folder / "modeling_stranger.py"
    imports = (
        "_attn_func as attend, flash_attn_with_kvcache\nfrom flash_attn_interface import flash_attn_func as attend_3"
    )
    code.write_text(code.read_text().replace("_attn_func as attend", imports))
    exit_code, trace = traced(capsys, "--config", recipe(tmp_path, model=code_of(folder)), "--hardware", "a100")
    found = [(one["operand"], one["op"], list(one["layers"]), one["guard"][:12]) for one in trace["findings"]]
    assert found == [
        ("q", "float(bf16)", ["train"], "casts q to b"),
        ("k_cache", "float(bf16)", ["chat"], "raises: the "),
    ]
    assert exit_code == 1


def test_a_scripted_function_is_named_by_its_own_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stranger(tmp_path / "stranger", "q = widened(q)")
    scripted = "\n\n@torch.jit.script\ndef widened(x):\n    return x.float() * 2\n\n\nclass Attention"
    text = (folder / "modeling_stranger.py").read_text().replace("\n\nclass Attention", scripted)
    (folder / "modeling_stranger.py").write_text(text)
    code, trace = traced(capsys, "--config", recipe(tmp_path, model=code_of(folder)), "--hardware", "a100")
    (finding,) = [one for one in trace["findings"] if one["breaks"]]
    assert (code, finding["op"], finding["source"]) == (1, "float(bf16)", "return x.float() * 2")


def test_the_page_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, model=code_of(stranger(tmp_path / "stranger")))
    code, out, _ = doctor(capsys, "--config", file, "--hardware", "a100")
    said = " ".join(out.split())
    assert code == 1
    assert "q arrives in fp32 at attention of layers.*: 3 layers in train, 3 layers in chat" in said
    assert "layer_norm(bf16) → fp32 at" in said
    assert "unguarded: 'FlashAttention only support fp16 and bf16 data type'" in said
    assert "1 place; attention.guard: cast" in said
    assert max(map(len, out.splitlines())) <= 120


def test_the_cpus_own_rules_hide_it_and_numbers_show_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recipe(tmp_path, model=code_of(stranger(tmp_path / "stranger")))
    code, trace = traced(capsys, "--config", file, "--hardware", "cpu")
    assert (code, trace["rules"], trace["contract_holds"]) == (0, "CPU", True)


def test_real_tensors_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, trace = traced(capsys, "--config", recipe(tmp_path), "--hardware", "a100", "--real")
    assert (code, trace["tensors"], trace["contract_holds"]) == (0, "a small copy with numbers", True)


def test_a_model_that_looks_at_values_is_traced_on_a_small_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stranger(tmp_path / "stranger", "q = q.float() if q.sum().item() != 0.5 else q")
    code, trace = traced(capsys, "--config", recipe(tmp_path, model=code_of(folder)), "--hardware", "a100")
    assert (code, trace["tensors"]) == (1, "a small copy with numbers")
    (note,) = [note for note in trace["notes"] if "looks at values" in note]
    assert "modeling_stranger.py:21" in note
    (finding,) = [one for one in trace["findings"] if one["breaks"]]
    assert finding["line"] == 21


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            ("modeling_stranger.py", "class Attention", "class Attention("),
            "modeling_stranger.py:11: syntax error in the model's code: SyntaxError: invalid syntax · ",
        ),
        (("modeling_stranger.py", "import torch\n", "import torch\nimport no_such_package\n"), "cannot be imported"),
        (
            ("modeling_stranger.py", "super().__init__(config)\n", "super().__init__(config)\n        1 / 0\n"),
            "the model cannot be built: ZeroDivisionError: division",
        ),
        (
            ("modeling_stranger.py", "x = x + layer(x)", "x = x + layer(x)[:, :1, :5]"),
            "its forward pass fails in training: RuntimeError",
        ),
        (
            ("modeling_stranger.py", "x = x + layer(x)", "x = x + layer(x) if self.training else x.nothing"),
            "its forward pass fails in a conversation (it trains): AttributeError",
        ),
    ],
)
def test_broken_code_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: tuple, says: str) -> None:
    folder = stranger(tmp_path / "stranger", "q = q * 1")
    name, old, new = damage
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    code, _, err = doctor(capsys, "--config", recipe(tmp_path, model=code_of(folder)), "--hardware", "a100")
    assert code == 3
    assert says in err
    assert "stranger" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("sections", "machine", "exit_code", "says"),
    [
        ({"attention": {"backend": "sdpaa"}}, "a100", 2, "sdpaa"),
        ({"attention": {"backend": "fa2"}, "precision": "fp16"}, "t4", 2, "fa2 is unavailable"),
        ({}, "no-such-machine", 2, "no-such-machine"),
        ({"model": {"name_or_path": "/no/such/model"}}, "a100", 2, "/no/such/model"),
    ],
)
def test_what_went_wrong_is_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sections: dict, machine: str, exit_code: int, says: str
) -> None:
    file = recipe(tmp_path, **sections)
    code, out, err = doctor(capsys, "--config", file, "--hardware", machine, "--json")
    error = json.loads(out)["error"]
    assert (code, error["exit_code"]) == (exit_code, exit_code)
    assert says in str(error)
    assert says in err


@pytest.mark.parametrize("content", ['{"model_type": ', "[]", '"qwen2"'])
def test_a_config_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, err = doctor(capsys, "--config", recipe(tmp_path, str(tmp_path)), "--hardware", "a100")
    assert code in (2, 3)
    assert "config.json" in err


def test_fa2_where_it_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe(tmp_path, attention={"backend": "fa2"}, precision="fp16")
    code, _, err = doctor(capsys, "--config", file, "--hardware", "t4")
    assert code == 2
    assert "Tesla T4: 7.5" in err
    assert err.count("attention: ") >= 3, "what was asked, and ways out"
    assert "or a supported device" in err


def test_experts_with_fp32_weights_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, **heads, **experts}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **sizes}))
    code, trace = traced(capsys, "--config", recipe(tmp_path, str(tmp_path)), "--hardware", "a100")
    assert (code, trace["tensors"], trace["calls"]["attention, train"]) == (0, "without weights", 2)


def test_a_model_without_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "TOKENS", 4)  # mamba's code goes from token to token
    folder = tmp_path / "mamba"
    folder.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 4, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", **sizes}))
    code, trace = traced(capsys, "--config", recipe(tmp_path, str(folder)), "--hardware", "a100")
    assert code == 0
    assert trace["calls"] == {}
    assert any("no call was seen" in note for note in trace["notes"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("flash_attention_2", "fa2"),
        ("flash-attn", "fa2"),
        ("FlashAttention", "fa2"),
        ("fa-3", "fa3"),
        ("xformers", "sdpa"),
        ("sdpaa", "sdpa"),
    ],
)
def test_another_tools_name_for_a_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], theirs: str, ours: str
) -> None:
    code, _, err = doctor(capsys, "--config", recipe(tmp_path, attention=theirs))
    assert code == 2
    assert f"did you mean {ours}?" in err
