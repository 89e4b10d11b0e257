"""The certificate of sound models of eight kinds, and of models that are broken on purpose."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from standins import broken_qwen3
from standins.remote_code_models import stranger
from transformers import CONFIG_MAPPING

from halftune.certify.certificate import Certificate, Line
from halftune.certify.certify import _counted, _small, certify
from halftune.certify.conversations import conversations
from halftune.certify.numbers import same_numbers
from halftune.certify.runs import methods, resumed
from halftune.certify.small_model import default_config, small_config
from halftune.certify.workbench import TOKENIZER, Workbench
from halftune.cli import main
from halftune.config.facts.model import read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.hardware.catalogue import lookup
from halftune.model.files.locate import locate
from halftune.train.callbacks.loss_plot import LossPlot

pytestmark = pytest.mark.usefixtures("own_module_cache")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},  # positions are learned, layers are Conv1D
    "qwen3_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16},  # fused experts
    "gpt_oss": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},  # sinks
    "gemma3_text": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},  # windows
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 16},
}
BUILTIN = ("qwen2-tiny", "qwen3_5-tiny", "qwen2_5_vl-tiny")  # dense, with linear attention, with a tower
REFUSED = {
    "gpt2": {"adapter oft", "adapter loha", "adapter lokr"},
    "gpt_oss": {"flash attention"},  # sinks
    "mamba2": {"method reward", "flash attention"},
    "qwen2_5_vl-tiny": {"method reward", "weights nf4", "weights nf4_single", "weights int8"},
}


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossPlot, "_draw", lambda *_: None)


def certified(name: str | Path, **keys: Any) -> Certificate:
    return certify(ModelSection(name_or_path=str(name), **keys), lookup("a100"), kill=False)


def lines(found: Certificate, check: str, verdict: str) -> list[Line]:
    return [line for line in found.lines if line.check.startswith(check) and line.verdict == verdict]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *BUILTIN])
def test_a_sound_model_is_certified(tmp_path: Path, kind: str) -> None:
    name = f"builtin:{kind}"
    if kind in KINDS:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG_MAPPING[kind](**KINDS[kind]).to_dict()}))
        name = str(tmp_path)
    found = certified(name)
    assert found.failed == ()
    assert {line.check for line in lines(found, "", "refused")} == REFUSED.get(kind, set())
    whole = {line.check for line in found.lines if line.verdict == "yes"} | REFUSED.get(kind, set())
    expected = {
        "parameters",
        "dtypes bf16",
        "dtypes fp16",
        "padded rows",
        "left padding",
        "train mode",
        "gradient checkpointing",
        "generation",
        "flash attention",
        "packing",
        "resume",
    }
    expected |= {f"adapter {one}" for one in ("lora", "oft", "vera", "ia3", "loha", "lokr")}
    expected |= {f"method {one}" for one in ("sft", "dpo", "kto", "reward", "grpo", "distill")}
    assert expected <= whole
    assert bool(lines(found, "images", "yes")) == (kind == "qwen2_5_vl-tiny")
    assert bool(lines(found, "template", "yes")) == (kind in BUILTIN)


SECOND_SYSTEM_IS_LOST = (
    "{%- for m in messages %}{%- if m.role != 'user' or loop.index > messages | length - 3 %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_a_template_that_loses_a_turn_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halftune.certify.certify._small", no_copy)
    (tmp_path / "t.jinja").write_text(SECOND_SYSTEM_IS_LOST)
    found = certified("builtin:qwen2-tiny", chat_template=str(tmp_path / "t.jinja"))
    (line,) = lines(found, "template", "no")
    assert "six turns" in line.evidence
    assert "one turn" not in line.evidence


def no_copy(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("only what needs no copy is looked at")


def test_a_forward_that_promotes_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halftune.certify.certify._small", no_copy)
    lines_of_code = (
        "q = q.float()  # promotes q",
        "from flash_attn import flash_attn_func",
        "out = flash_attn_func(q, k, v, causal=True).to(x.dtype)",
    )
    made = stranger(tmp_path / "model", "\n".join(lines_of_code), vocab_size=64)
    found = certified(made.folder, trust_remote_code=True)
    named = lines(found, "dtypes bf16", "no")
    assert named
    assert all(made.marks["q"].rpartition("/")[2] in line.evidence for line in named)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("afmoe", {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16}),  # keeps weights in fp32
        ("axk2", {"moe_intermediate_size": 16}),  # its indexer reads the mask
        ("gemma3", {}),  # its towers look at values while they are made
    ],
)
def test_what_the_doctor_took_for_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, Any]
) -> None:
    monkeypatch.setattr("halftune.certify.certify._small", no_copy)
    config = CONFIG_MAPPING[kind](**{**SIZES, **sizes} if sizes else {})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = certified(tmp_path)
    assert {line.check for line in lines(found, "dtypes", "yes")} == {"dtypes bf16", "dtypes fp16"}


IGNORES_POSITIONS = """
from transformers import GPT2Config, GPT2LMHeadModel

class HeedlessConfig(GPT2Config):
    model_type = "heedless"

class HeedlessForCausalLM(GPT2LMHeadModel):
    config_class = HeedlessConfig

    def forward(self, input_ids=None, position_ids=None, **rest):
        return super().forward(input_ids=input_ids, **rest)
"""


@pytest.mark.slow
def test_positions_that_are_ignored_in_packed_rows_are_named(tmp_path: Path) -> None:
    (tmp_path / "modeling_heedless.py").write_text(IGNORES_POSITIONS)
    classes = {
        "AutoConfig": "modeling_heedless.HeedlessConfig",
        "AutoModelForCausalLM": "modeling_heedless.HeedlessForCausalLM",
    }
    raw = {**CONFIG_MAPPING["gpt2"](**KINDS["gpt2"]).to_dict(), "model_type": "heedless", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["HeedlessForCausalLM"]}))
    found = certified(tmp_path, trust_remote_code=True)
    assert {line.check for line in found.failed} == {"packing", "left padding", "generation", "method grpo"}


BROKEN = {
    "left padding": """
    def forward(self, input_ids=None, attention_mask=None, **rest):
        return super().forward(input_ids=input_ids, **rest)
""",
    "gradients": """
    def __init__(self, config):
        super().__init__(config)
        self.transformer.h[0].register_forward_hook(lambda module, given, out: out.detach())
""",
    "train mode": """
    def forward(self, input_ids=None, position_ids=None, **rest):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **rest)
        out.logits = out.logits * 2 if self.training else out.logits
        return out
""",
}


FOLLOWS = {"left padding": ["generation"]}


@pytest.mark.parametrize("check", BROKEN)
def test_a_forward_that_is_broken_is_named(tmp_path: Path, check: str) -> None:
    head, _, _ = IGNORES_POSITIONS.partition("    def forward")
    (tmp_path / "modeling_heedless.py").write_text(head + BROKEN[check])
    classes = {
        "AutoConfig": "modeling_heedless.HeedlessConfig",
        "AutoModelForCausalLM": "modeling_heedless.HeedlessForCausalLM",
    }
    raw = {**CONFIG_MAPPING["gpt2"](**KINDS["gpt2"]).to_dict(), "model_type": "heedless", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": ["HeedlessForCausalLM"]}))
    section = ModelSection(name_or_path=str(tmp_path), trust_remote_code=True)
    small = _small(Workbench(tmp_path, section, section))
    assert {line.check for line in same_numbers(small) if line.verdict == "no"} == {check, *FOLLOWS.get(check, [])}


WINDOWED = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
# defect → values of config.json, and the checks that say no
DEFECTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "none": (broken_qwen3.SOUND, {}, set()),
    "none, with windows": (broken_qwen3.SOUND, WINDOWED, set()),
    "none, tied": (broken_qwen3.SOUND, {"tie_word_embeddings": True}, set()),
    "positions stay at the prompt": (broken_qwen3.POSITIONS_STAY, {}, {"generation"}),
    "cache wrong from the second token": (broken_qwen3.SECOND_TOKEN_IS_WRONG, {}, {"generation"}),
    "mask dropped while decoding": (broken_qwen3.MASK_IS_DROPPED, {}, {"generation"}),
    "keys detached": (broken_qwen3.DETACHED.format(layer=1, name="k"), {}, {"gradients"}),
    "values detached in the last layer": (broken_qwen3.DETACHED.format(layer=3, name="v"), {}, {"gradients"}),
    "head not tied": (broken_qwen3.UNTIED, {"tie_word_embeddings": True}, {"tied head"}),
    "another layer's mask": (
        broken_qwen3.LATE.format(layer=5),
        {"num_hidden_layers": 6},
        {"padded rows", "left padding", "generation", "flash attention"},
    ),
    "another loss under checkpointing": (broken_qwen3.RECOMPUTED.format(factor=1.1), {}, {"gradient checkpointing"}),
    "another gradient under checkpointing": (broken_qwen3.RECOMPUTED_GRADIENT, {}, {"gradient checkpointing"}),
    "dropout in eval": (broken_qwen3.DROPOUT, {}, {"eval mode"}),
    "rotary tables in fp32": (broken_qwen3.ROTARY_IN_FP32, {}, set()),
    "window in the mask only": (broken_qwen3.WINDOW_IN_MASK_ONLY, WINDOWED, {"packing", "flash attention"}),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_copy_of_qwen3_with_one_defect_is_named(tmp_path: Path, defect: str) -> None:
    code, values, named = DEFECTS[defect]
    folder = broken_qwen3.write(tmp_path / "model", code, **values)
    section = ModelSection(name_or_path=str(folder), trust_remote_code=True)
    found = list(same_numbers(_small(Workbench(tmp_path, section, section), first=16)))
    assert {line.check for line in found if line.verdict == "no"} == named
    healed = [line for line in found if line.check == "dtypes bf16"]
    assert [line.verdict for line in healed] == (["note"] if defect == "rotary tables in fp32" else [])


def test_methods_with_rollouts_follow_the_verdict_on_generation(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("halftune.certify.runs.train_losses", lambda *_: "")
    section = ModelSection(name_or_path="builtin:qwen2-tiny")
    bench = Workbench(tmp_path, section, section)
    for generates in (True, False):
        lines = methods(bench, lookup("a100"), read_model_facts(section), generates=generates)
        assert {line.check for line in lines if line.verdict == "no"} == (set() if generates else {"method grpo"})


def test_weights_of_a_checkpoints_own_code_are_counted_in_its_class(tmp_path: Path) -> None:
    folder = broken_qwen3.write(tmp_path / "model", broken_qwen3.UNTIED, tie_word_embeddings=True)
    section = ModelSection(name_or_path=str(folder), trust_remote_code=True)
    (line,) = _counted(Workbench(tmp_path, section, section))
    hidden, wide, heads = 64, 128, 2 * 4 * 16 + 2 * 2 * 16
    layer = hidden * (heads + 3 * wide + 2) + 2 * 16
    assert f"{4 * layer + hidden + 2 * 512 * hidden:,} " in line.evidence


@pytest.mark.slow
def test_positions_of_an_earlier_batch_are_no_fault_of_the_cache(tmp_path: Path) -> None:
    section = ModelSection(name_or_path="builtin:qwen2_5_omni-tiny")  # its class keeps the batch's offsets
    small = _small(Workbench(tmp_path, section, section))
    assert [line.verdict for line in same_numbers(small) if line.check == "generation"] == ["yes"]


def test_there_are_forty_different_conversations_of_eight_kinds() -> None:
    made = [(kind, json.dumps(row)) for kind, row in conversations()]
    assert len({row for _, row in made}) == 40
    assert len({kind for kind, _ in made}) == 8


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    """The run is a process of its own, and what it leaves is what a kill leaves."""
    folder = tmp_path / "model"
    shutil.copytree(locate(ModelSection(name_or_path=TOKENIZER)), folder)
    section = ModelSection(name_or_path=str(folder))
    (line,) = resumed(Workbench(tmp_path, section, section), kill=True)
    assert line.verdict == "yes"


def test_the_command_says_no_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("halftune.certify.certify._small", no_copy)
    with pytest.raises(SystemExit) as end:
        main(["certify", "builtin:llama-tiny", "--json", "--hardware", "t4"])
    assert end.value.code == 4
    told = json.loads(capsys.readouterr().out)
    assert told["certified"] is False
    assert [line["check"] for line in told["lines"] if line["verdict"] == "no"] == ["small copy"]
    assert {line["check"] for line in told["lines"] if line["verdict"] == "refused"} == {
        "precision bf16",
        "dtypes bf16",
    }
    with pytest.raises(SystemExit) as end:
        main(["certify", str(tmp_path), "--json"])
    assert end.value.code == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "model.config_missing"


@pytest.mark.parametrize("kind", ["voxtral", "glmasr"])
def test_positions_of_an_audio_token_stay_as_wide_as_the_feed_forward_layer(kind: str) -> None:
    """A shape of the encoder's output makes four positions one token."""
    audio = small_config(default_config(kind)).audio_config
    assert audio.intermediate_size == 4 * audio.hidden_size
    assert audio.num_hidden_layers == 1
