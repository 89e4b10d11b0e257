"""Configs of other frameworks: recognised, converted, every key accounted for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from halftune import convert
from halftune.cli import main
from halftune.config.load import load_config
from halftune.config.optimizers import OPTIMIZERS
from halftune.config.prompts import find_prompt
from halftune.config.run import RunConfig
from halftune.convert import optimizers as convert_optimizers
from halftune.convert.convert import convert_file, report
from halftune.convert.draft import VALUES, Note, block_of_rules, tables
from halftune.core.errors import ConfigError

LLAMAFACTORY = """\
model_name_or_path: builtin:qwen2-tiny
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: q_proj,v_proj
quantization_bit: 4
dataset: mine,hub
template: qwen3_nothink
cutoff_len: 1024
max_samples: 1000
neat_packing: true
mask_history: true
output_dir: saves/x
save_steps: 500
plot_loss: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
warmup_ratio: 0.1
bf16: true
flash_attn: fa2
val_size: 0.1
eval_strategy: steps
eval_steps: 50
some_new_key: 3
"""
AXOLOTL = """\
base_model: builtin:qwen2-tiny
model_type: LlamaForCausalLM
load_in_8bit: false
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
  - path: a/chat
    type: chat_template
    split: train[:20%]
val_set_size: 0.05
output_dir: ./outputs/x
sequence_len: 4096
sample_packing: true
adapter: qlora
load_in_4bit: true
relora: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
wandb_project:
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
learning_rate: 0.0002
bf16: auto
fp16:
gradient_checkpointing: offload
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
special_tokens: {pad_token: <pad>}
"""
TRL = """\
model_name_or_path: builtin:qwen2-tiny
dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: trl-lib/Capybara
dataset_train_split: train
use_peft: true
lora_r: 8
lora_alpha: 16
lora_target_modules: all-linear
max_length: 512
packing: true
packing_strategy: wrapped
assistant_only_loss: true
output_dir: out
max_steps: 100
lr_scheduler_type: cosine_with_restarts
bf16: false
fp16: false
gradient_checkpointing: false
report_to: [wandb, mlflow]
eval_strategy: epoch
"""
OLD = {"LLaMA-Factory": LLAMAFACTORY, "axolotl": AXOLOTL, "TRL": TRL}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in OLD.items():
        Path(f"{name}.yaml").write_text(text)


@pytest.mark.parametrize("framework", OLD)
def test_recognised_and_offered(framework: str) -> None:
    with pytest.raises(ConfigError, match=f"config of {framework}") as caught:
        load_config(f"{framework}.yaml")
    assert f"halftune convert {framework}.yaml" in caught.value.remedy
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize("framework", OLD)
def test_every_key_is_accounted_for(framework: str) -> None:
    converted = convert_file(Path(f"{framework}.yaml"))
    assert converted.framework == framework
    told = {note.key for note in converted.notes}
    assert set(yaml.safe_load(OLD[framework])) <= told
    keys = [note.key for note in converted.notes if note.kind != "default"]
    assert len(keys) == len(set(keys)), "each key once"
    assert all(note.why for note in converted.notes if note.kind in ("changed", "none"))
    text = report(converted)
    assert all(key in text for key in told)


def values(framework: str) -> dict[str, Any]:
    converted = convert_file(Path(f"{framework}.yaml"))
    read = yaml.safe_load(converted.yaml)
    assert read == converted.values
    return read


def test_llamafactory() -> None:
    Path("data").mkdir()
    Path("data/mine.json").write_text("[]")
    info = {
        "mine": {"file_name": "mine.json", "columns": {"prompt": "frage", "response": "output"}},
        "hub": {"hf_hub_url": "org/set", "subset": "main", "split": "test"},
    }
    Path("data/dataset_info.json").write_text(json.dumps(info))
    new = values("LLaMA-Factory")
    first = {"samples": 1000, "sampling": "first"}
    assert new["data"]["train"] == [
        {"path": "data/mine.json", "format": "alpaca", "columns": {"instruction": "frage"}, **first},
        {"path": "org/set:main", "split": "test", "format": "alpaca", **first},
    ]
    assert new["adapter"] == {"type": "lora", "rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    assert new["precision"] == {"compute": "bf16"}
    assert new["attention"] == {"backend": "fa2"}
    assert new["data"]["packing"] is True
    assert (new["data"]["max_length"], new["data"]["overlong"]) == (1023, "proportional"), "packed rows have one less"
    assert new["method"] == {"type": "sft", "train_on": "last", "train_line_break": True}
    training = new["training"]
    assert (training["eval_steps"], training["save_steps"], training["learning_rate"]) == (50, 500, 1e-4)
    assert training["gradient_checkpointing"] is True, "on there by default"
    assert training["lr_scheduler_type"] == "linear", "their default, not ours"


def test_axolotl() -> None:
    new = values("axolotl")
    assert new["data"]["train"] == [
        {"path": "tatsu-lab/alpaca", "format": "alpaca", "prompt": "alpaca"},
        {"path": "a/chat", "split": "train[:20%]"},
    ]
    assert new["adapter"]["type"] == "lora"
    assert new["adapter"]["target_modules"] == "all-linear"
    assert new["precision"] == {"compute": "auto"}
    assert new["data"]["overlong"] == "drop", "axolotl drops what is too long"
    assert new["training"]["gradient_checkpointing"] is True
    changed = {note.key for note in convert_file(Path("axolotl.yaml")).notes if note.kind == "changed"}
    assert changed == {"warmup_ratio"}
    assert new["training"]["warmup_ratio"] == 0.03


def test_trl() -> None:
    new = values("TRL")
    assert new["precision"] == {"compute": "fp32"}
    assert new["attention"] == {"backend": "auto"}, "FlashAttention in fp32 is what crashes there"
    assert new["data"]["eval"] == [{"path": "trl-lib/Capybara", "split": "test"}]
    assert new["method"] == {"type": "sft", "train_on": "assistant"}
    assert new["logging"] == {"report_to": ["wandb", "mlflow"]}
    assert new["training"]["per_device_train_batch_size"] == 8
    assert "num_train_epochs" not in new["training"]
    changed = {note.key for note in convert_file(Path("TRL.yaml")).notes if note.kind == "changed"}
    assert changed == {"dtype", "attn_implementation", "packing_strategy"}


@pytest.mark.parametrize("framework", OLD)
def test_result_is_valid_but_for_files(framework: str) -> None:
    converted = convert_file(Path(f"{framework}.yaml"))
    Path("new.yaml").write_text(converted.yaml)
    load_config("new.yaml", look_at_files=False)


@pytest.mark.parametrize(
    ("framework", "change", "said"),
    [
        ("LLaMA-Factory", "stage: ppo", "not converted"),
        ("LLaMA-Factory", "finetuning_type: vera", "not converted"),
        ("LLaMA-Factory", "fp16: true", "bf16 is true as well"),
        ("LLaMA-Factory", "dataset: null", "nothing to train on"),
        ("axolotl", "rl: gdpo", "not converted"),
        ("axolotl", "datasets: []", "no data"),
        ("TRL", "beta: 0.1", "loss_type"),
    ],
)
def test_a_method_that_does_not_exist_here_is_refused(framework: str, change: str, said: str) -> None:
    key = change.split(":")[0]
    lines = [line for line in OLD[framework].split("\n") if not line.startswith(f"{key}:")]
    if change == "datasets: []":
        lines = [line for line in lines if not line.startswith(("  - ", "    "))]
    Path("old.yaml").write_text("\n".join([*lines, change]))
    converted = convert_file(Path("old.yaml"), accepted=[key])
    assert (converted.status, converted.yaml) == ("refused", "")
    (note,) = converted.of("refused")
    assert note.key == key
    assert said in note.why


@pytest.mark.parametrize(
    ("framework", "old", "method"),
    [
        ("axolotl", "rl: dpo\nrl_beta: 0.2\nprecompute_ref_log_probs: true", ("dpo", 0.2, "precomputed")),
        ("axolotl", "rl: kto\nkto_desirable_weight: 0.2", ("kto", 0.1, "auto")),
        ("axolotl", "reward_model: true\nnum_labels: 1", ("reward",)),
        ("LLaMA-Factory", "stage: dpo\npref_beta: 0.3\npref_loss: sigmoid", ("dpo", 0.3, "auto")),
        ("LLaMA-Factory", "stage: kto\nkto_chosen_weight: 0.2", ("kto", 0.1, "auto")),
        ("LLaMA-Factory", "stage: rm", ("reward",)),
        ("axolotl", "rl: ipo\nrl_beta: 0.2", ("dpo", 0.2, "auto")),
        ("TRL", "loss_type: [robust]\nlabel_smoothing: 0.1", ("dpo", 0.1, "auto")),
        ("TRL", "loss_type: sigmoid\nbeta: 0.05", ("dpo", 0.05, "auto")),
        ("TRL", "loss_type: kto\ndesirable_weight: 0.2", ("kto", 0.1, "auto")),
        ("TRL", "center_rewards_coefficient: 0.01", ("reward",)),
    ],
)
def test_preference_methods(framework: str, old: str, method: tuple[str, ...]) -> None:
    keys = {line.split(":")[0] for line in old.split("\n")}
    lines = [line for line in OLD[framework].split("\n") if line.split(":")[0] not in keys]
    Path("old.yaml").write_text("\n".join([*lines, old]))
    found = convert_file(Path("old.yaml"))
    found = convert_file(Path("old.yaml"), accepted=[note.key for note in found.of("refused")])
    Path("new.yaml").write_text(found.yaml)
    made = load_config("new.yaml", look_at_files=False).run.method
    assert (made.type, *((made.beta, made.reference) if made.type != "reward" else ())) == method
    assert getattr(made, "desirable_weight", 1.0) == (0.2 if made.type == "kto" else 1.0)
    assert not [note for note in found.of("refused") if note.key in keys]


@pytest.mark.parametrize(
    ("framework", "old", "key"),
    [
        ("axolotl", "rl: dpo\nlabel_smoothing: 0.1", "label_smoothing"),
        ("axolotl", "rl: ipo\nlabel_smoothing: 0.1", "label_smoothing"),
        ("TRL", "loss_type: robust\ndpo_label_smoothing: 0.1", "dpo_label_smoothing"),
    ],
)
def test_a_key_of_another_framework_is_not_taken_for_this_ones(framework: str, old: str, key: str) -> None:
    keys = {line.split(":")[0] for line in old.split("\n")}
    lines = [line for line in OLD[framework].split("\n") if line.split(":")[0] not in keys]
    Path("old.yaml").write_text("\n".join([*lines, old]))
    assert key in [note.key for note in convert_file(Path("old.yaml")).of("refused")]


@pytest.mark.parametrize(
    ("framework", "old"),
    [
        ("axolotl", "rl: dpo\ndpo_use_weighting: true"),
        ("LLaMA-Factory", "stage: dpo\npref_loss: kto_pair"),
        ("LLaMA-Factory", "stage: dpo\npref_loss: hinge\ndpo_label_smoothing: 0.1"),
        ("LLaMA-Factory", "stage: dpo\npref_loss: orpo\npref_ftx: 0.5"),
        ("TRL", "discopop_tau: 0.1\nloss_type: [sigmoid, aot]"),
    ],
)
def test_parts_of_a_loss_that_are_not_here_are_refused(framework: str, old: str) -> None:
    keys = [line.split(":")[0] for line in old.split("\n")]
    lines = [line for line in OLD[framework].split("\n") if line.split(":")[0] not in keys]
    Path("old.yaml").write_text("\n".join([*lines, old]))
    assert keys[-1] in {note.key for note in convert_file(Path("old.yaml")).of("refused")}


@pytest.mark.parametrize(
    ("framework", "old", "method"),
    [
        ("LLaMA-Factory", "stage: dpo\npref_loss: orpo\npref_beta: 0.2", {"type": "orpo", "beta": 0.2}),
        ("LLaMA-Factory", "stage: dpo\npref_loss: simpo", {"type": "simpo", "beta": 0.1, "gamma": 0.5}),
        (
            "LLaMA-Factory",
            "stage: dpo\npref_loss: sigmoid\npref_ftx: 0.5\ndpo_label_smoothing: 0.1",
            {"type": "dpo", "loss": "sigmoid", "sft_weight": 0.5, "label_smoothing": 0.1},
        ),
        ("axolotl", "rl: orpo\norpo_alpha: 0.2", {"type": "orpo", "beta": 0.2}),
        ("axolotl", "rl: dpo\nrpo_alpha: 0.5", {"type": "dpo", "sft_weight": 0.5}),
        ("axolotl", "rl: simpo\nsimpo_gamma: 0.7", {"type": "simpo", "beta": 0.1, "gamma": 0.7, "sft_weight": 1.0}),
        ("axolotl", "rl: dpo\ndpo_loss_type: [exo_pair]\ndpo_label_smoothing: 0.1",
         {"type": "dpo", "loss": "exo_pair", "label_smoothing": 0.1}),
        ("axolotl", "rl: dpo\ndpo_label_smoothing: 0.1", {"type": "dpo", "label_smoothing": 0.1}),
        ("axolotl", "rl: dpo\ndpo_loss_type: [sigmoid]\ndpo_label_smoothing: 0.1",
         {"type": "dpo", "loss": "sigmoid", "label_smoothing": 0.1}),
        ("TRL", "label_smoothing: 0.1\nloss_type: sigmoid", {"type": "dpo", "label_smoothing": 0.1}),
        ("TRL", "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.3]",
         {"type": "dpo", "loss": "sigmoid", "sft_weight": 0.3}),
    ],
)  # fmt: skip
def test_losses_on_pairs(framework: str, old: str, method: dict[str, Any]) -> None:
    keys = {line.split(":")[0] for line in old.split("\n")}
    lines = [line for line in OLD[framework].split("\n") if line.split(":")[0] not in keys]
    Path("old.yaml").write_text("\n".join([*lines, old]))
    found = convert_file(Path("old.yaml"))
    assert not keys & {note.key for note in found.of("refused")}
    found = convert_file(Path("old.yaml"), accepted=[note.key for note in found.of("refused")])
    assert found.values["method"].items() >= method.items()
    Path("new.yaml").write_text(found.yaml)
    load_config("new.yaml", look_at_files=False)


def test_evaluation_sets_keep_their_names() -> None:
    lines = [line for line in LLAMAFACTORY.split("\n") if not line.startswith(("val_size", "eval_dataset"))]
    asked = ["eval_dataset: code.v2,chat", "eval_on_each_dataset: true", "metric_for_best_model: eval_code.v2_loss"]
    lines.append("load_best_model_at_end: true")
    Path("old.yaml").write_text("\n".join([*lines, *asked]))
    values = convert_file(Path("old.yaml")).values
    assert [source["name"] for source in values["data"]["eval"]] == ["code_v2", "chat"]
    assert values["training"]["metric_for_best"] == "eval_loss_code_v2"
    Path("old.yaml").write_text("\n".join([*lines, asked[0], asked[2]]))
    converted = convert_file(Path("old.yaml"))
    assert "metric_for_best" not in converted.values["training"]
    assert [note.kind for note in converted.notes if note.key == "metric_for_best_model"] == ["changed"]


@pytest.mark.parametrize("framework", OLD)
def test_label_smoothing(framework: str) -> None:
    Path("old.yaml").write_text(f"{OLD[framework]}\nlabel_smoothing_factor: 0.1\n")
    assert convert_file(Path("old.yaml")).values["training"]["label_smoothing"] == 0.1


def test_a_period_that_is_a_share_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        LLAMAFACTORY.replace("eval_steps: 50", "eval_steps: 0.1").replace("save_steps: 500", "save_steps: 0.2")
    )
    converted = convert_file(path)
    assert (converted.values["training"]["eval_steps"], converted.values["training"]["save_steps"]) == (0.1, 0.2)
    assert not {"eval_steps", "save_steps"} & {note.key for note in converted.notes if note.kind == "changed"}


@pytest.mark.parametrize(
    ("epochs", "evals", "saves"), [(1, 0.25, "epoch"), (2, 0.125, "epoch"), (3, 1.0 / 12, "epoch")]
)
def test_times_per_epoch_are_the_share_that_axolotl_makes_of_them(epochs: int, evals: float, saves: str) -> None:
    text = SAME.replace("val_set_size: 0\n", "val_set_size: 0.1\n").replace("num_epochs: 1\n", "")
    more = f"num_epochs: {epochs}\nevals_per_epoch: 4\nsaves_per_epoch: 1\n"
    Path("old.yaml").write_text(text + more)
    converted = convert_file(Path("old.yaml"), "axolotl")
    assert converted.status == "same"
    training = converted.values["training"]
    assert (training["eval_steps"], training["save_steps"]) == (evals, saves)
    Path("new.yaml").write_text(converted.yaml)
    assert load_config("new.yaml", look_at_files=False).run.training.eval_steps == evals


def test_documents_and_conversations_in_one_axolotl_config_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    sets = "datasets:\n  - {path: a, type: alpaca}\n  - {path: b, type: completion}\n"
    old = f"base_model: a/b\n{sets}micro_batch_size: 1\n"
    path.write_text(old)
    (note,) = convert_file(path, "axolotl").of("refused")
    assert "make a recipe of each" in note.why
    path.write_text(old.replace("alpaca", "completion"))
    assert convert_file(path, "axolotl").values["method"] == {"type": "pretrain"}


@pytest.mark.parametrize(
    ("lines", "grouped"),
    [
        ("sample_packing: false", False),
        ("group_by_length: true", True),
        ("train_sampling_strategy: group_by_length", True),
        ("sample_packing: true", None),
    ],
)
def test_rows_are_grouped_by_length_where_they_were(tmp_path: Path, lines: str, grouped: bool | None) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(f"base_model: a/b\ndatasets: [{{path: a, type: chat_template}}]\nmicro_batch_size: 1\n{lines}\n")
    assert convert_file(path, "axolotl").values["data"].get("group_by_length") is grouped


def test_what_a_data_set_of_axolotl_says_is_accounted_for(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    entry = "{path: a, type: chat_template, message_field_role: who, train_on_eos: turn, conversation: x, roles: null}"
    path.write_text(f"base_model: a/b\ndatasets: [{entry}]\nmicro_batch_size: 1\n")
    (note,) = [note for note in convert_file(path, "axolotl").notes if note.key == "datasets"]
    assert note.kind == "changed"
    why = "who, content: messages hold role and content, or from and value, here; conversation: not taken over"
    assert note.why == why


def test_columns_of_dataset_info_are_kept(tmp_path: Path) -> None:
    sets = {
        "mine": {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": "turns", "tools": "tools"}},
        "hub": {
            "hf_hub_url": "o/n",
            "formatting": "sharegpt",
            "columns": {"messages": "chat"},
            "tags": {"role_tag": "role"},
        },
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(sets))
    (tmp_path / "old.yaml").write_text(LLAMAFACTORY)
    first, second = convert_file(tmp_path / "old.yaml").values["data"]["train"]
    assert (first["format"], first["columns"]) == ("sharegpt", {"conversations": "turns"})
    assert (second["format"], second["columns"]) == ("messages", {"messages": "chat"})


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> int:
        with pytest.raises(SystemExit) as left:
            main(["convert", *arguments])
        assert isinstance(left.value.code, int)
        return left.value.code

    assert run("axolotl.yaml", "-o", "new.yaml") == 4
    assert "--accept relora" in capsys.readouterr().err
    assert not Path("new.yaml").exists()
    accept = ("axolotl.yaml", "--accept", "relora")
    assert run(*accept) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["adapter"]["type"] == "lora"
    assert "approximate" in printed.err
    assert run(*accept, "-o", "new.yaml") == 0
    assert "new.yaml, valid (approximate" in capsys.readouterr().out
    assert run(*accept, "-o", "new.yaml") == 2
    assert "convert.output_exists" in capsys.readouterr().err
    assert run("axolotl.yaml", "--accept", "load_in_5bit") == 2
    assert "load_in_5bit" in capsys.readouterr().err
    accept = ("LLaMA-Factory.yaml",)
    assert run(*accept, "-o", "new.yaml", "--force") == 2, "its data is not here"
    assert "Fix before running:\nnew.yaml:" in capsys.readouterr().out
    Path("ours.yaml").write_text("model: {name_or_path: x}\ndata: {train: y}\n")
    assert run("ours.yaml") == 2
    assert "halftune recipe already" in capsys.readouterr().err
    assert run("axolotl.yaml", "--json") == 4
    told = json.loads(capsys.readouterr().out)
    assert (told["framework"], told["status"], told["recipe"]["adapter"]["type"]) == ("axolotl", "refused", "lora")
    assert {"kind": "refused", "key": "relora"}.items() <= next(
        key for key in told["keys"] if key["kind"] == "refused"
    ).items()
    assert run("axolotl.yaml", "TRL.yaml", "ours.yaml") == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["refused", "approximate", "unreadable"]
    assert lines[3] == "1 refused, 1 approximate, 1 unreadable"
    assert run("TRL.yaml", "axolotl.yaml", "-o", "x.yaml") == 2


SAME = """\
base_model: builtin:qwen2-tiny
datasets: [{path: a/chat, type: chat_template}]
micro_batch_size: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 1e-4
val_set_size: 0
sequence_len: 2048
warmup_ratio: 0.1
"""


def axolotl(more: str, accepted: tuple[str, ...] = ()) -> Any:
    Path("old.yaml").write_text(SAME + more)
    return convert_file(Path("old.yaml"), "axolotl", accepted)


@pytest.mark.parametrize("flags", [[], ["--json"], ["-o", "new.yaml"]])
@pytest.mark.parametrize(("more", "code"), [("", 0), ("a_new_key: 3\n", 0), ("relora: true\n", 4)])
def test_exit_codes(more: str, code: int, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.yaml").write_text(SAME + more)
    with pytest.raises(SystemExit) as left:
        main(["convert", "old.yaml", *flags])
    assert left.value.code == code


LORA_OF_Q = "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_modules: [q_proj]\n"


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ("", "same"),
        ("liger_rope: true", "same"),
        ("plugins: [axolotl.integrations.liger.LigerPlugin]", "same"),
        ("wandb_watch: x", "same"),
        ("relora: null", "same"),
        ("unfrozen_parameters: []", "same"),
        ("evals_per_epoch: 4\nval_set_size: 0.1", "same"),
        ("a_new_key: 3", "approximate"),
        ("a_new_switch: false", "approximate"),
        ("wieght_decay: 0.1", "refused"),
        ("hub_token: x\nadam_beta3: 0.9", "same"),
        ("dataset_shard_num: 2\ndataset_shard_idx: 0", "refused"),
        ("datasets: [{path: a/b, type: chat_template, shards: 10, shards_idx: 1}]", "refused"),
        ("datasets: [{path: a/b, type: chat_template, preprocess_shards: 4}]", "same"),
        ("datasets: [{path: a/b, type: chat_template, drop_system_message: true}]", "same"),
        ("dataset_exact_deduplication: true", "same"),
        ("datasets: [{path: a/b, type: chat_template, split_thinking: true}]", "refused"),
        ("datasets: [{path: a/b, type: chat_template, split_thinking: false}]", "same"),
        ("datasets: [{path: a/b, type: chat_template, feild_messages: x}]", "refused"),
        ("context_parallel_size: 2", "approximate"),
        ("optimizer: adamw_bnb_8bit", "same"),
        ("optimizer: lion_8bit", "same"),
        ("optimizer: ademamix_8bit", "refused"),
        ("unfrozen_parameters: [lm_head]", "same"),
        ("qat: {activation_dtype: int8}", "refused"),
        ("fp8: true", "refused"),
        ("processor_type: AutoProcessor", "refused"),
        ("plugins: [axolotl.integrations.diffusion.DiffusionPlugin]", "refused"),
        ("plugins: [somebodys.Plugin]", "refused"),
        ("relora: true", "refused"),
        ("neftune_noise_alpha: 5", "approximate"),
        ("unfrozen_parameters: [^lm_head.weight$, 'layers.2[0-9]+.mlp']", "same"),
        ("unfrozen_parameters: ['^model.embed_tokens.weight$[:32000]']", "refused"),
        ("unfrozen_parameters: [x]\nadapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_linear: true", "refused"),
        ("reinit_weights: true", "refused"),
        ("chat_template_jinja: x.jinja", "same"),
        ("chat_template_jinja: '{{ messages }}'", "approximate"),
        ("loss_watchdog_threshold: 5.0\nloss_watchdog_patience: 3", "same"),
        ("train_on_inputs: true", "approximate"),
        ("excess_length_strategy: truncate", "same"),
        ("model_config: {output_router_logits: true}", "same"),
        ("model_config: {rope_theta: 1000000}", "refused"),
        ("datasets: [{path: a/b, type: alpaca}]\ntrain_on_inputs: true\nchat_template: no_such", "same"),
        ("datasets: [{path: a/b, type: 'alpaca:chat'}]", "same"),
        ("datasets: [{path: a/b, type: gpteacher}]", "same"),
        ("datasets: [{path: a/b, type: jeopardy}]", "approximate"),
        ("base_model: m/Llama-3-8B-Instruct\nchat_template: llama3", "same"),
        ("base_model: m/Llama-3-8B\nchat_template: llama3", "same"),
        ("base_model: m/Llama-3-8B\nchat_template: llama3\nspecial_tokens: {eos_token: <|eot_id|>}", "same"),
        ("base_model: m/gemma-3-it\nchat_template: gemma3\neot_tokens: [<end_of_turn>]", "same"),
        ("base_model: m/gemma-3-it", "same"),
        ("base_model: m/gemma-3-it\neot_tokens: [<end_of_turn>]", "same"),
        ("base_model: m/gpt-oss-20b", "same"),
        ("base_model: m/Qwen3-8B", "same"),
        ("base_model: m/Qwen3-8B\nchat_template: qwen3", "same"),
        ("chat_template: mistral_v2v3", "approximate"),
        ("chat_template: mistral_v1", "same"),
        ("special_tokens: {pad_token: x}", "same"),
        ("special_tokens: {bos_token: x, eos_token: y}", "same"),
        ("special_tokens: {eos_token: y, unk_token: x}", "same"),
        ("special_tokens: {additional_special_tokens: [<x>]}", "approximate"),
        ("datasets: [{path: a/b, type: chat_template, train_on_eos: turn}]", "same"),
        ("datasets: [{path: a/b, type: chat_template, train_on_eos: none}]", "refused"),
        ("datasets: [{path: a/b, type: chat_template, train_on_eot: all}]", "refused"),
        ("datasets: [{path: a/b, type: chat_template, message_field_training: train}]", "same"),
        ("datasets: [{path: a/b, type: chat_template, message_field_training: learn}]", "refused"),
        ("datasets: [{path: a/b, type: chat_template, message_field_training_detail: parts}]", "refused"),
        ("datasets: [{path: a/b, type: input_output}]", "refused"),
        ("datasets: [{path: a/b, type: null}]", "refused"),
        ("adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_linear: true", "same"),
        ("adapter: qlora\nlora_r: 8\nlora_alpha: 8\nlora_target_linear: true", "same"),
        (
            LORA_OF_Q + "lora_target_parameters: [experts.down_proj]",
            "same",
        ),
        (
            LORA_OF_Q + "load_in_8bit: true\nquantize_moe_experts: true",
            "same",
        ),
        (
            LORA_OF_Q + "quantize_moe_experts: true",
            "refused",
        ),
        (
            LORA_OF_Q + "load_in_8bit: true\nquantize_moe_experts: true\nlora_target_parameters: [experts.down_proj]",
            "same",
        ),
        ("adapter: lora\nlora_r: 8\nlora_alpha: 8\npeft: {loftq_config: {loftq_bits: 4}}", "refused"),
    ],
)
def test_the_status_says_whether_the_same_is_learned(more: str, status: str) -> None:
    written = {line.split(":")[0] for line in more.split("\n")}
    Path("old.yaml").write_text(
        "\n".join([*(line for line in SAME.split("\n") if line.split(":")[0] not in written), more])
    )
    assert convert_file(Path("old.yaml"), "axolotl").status == status


def test_dynamic_fine_tuning_is_the_same() -> None:
    Path("old.yaml").write_text(LLAMAFACTORY + "use_dft_loss: true\n")
    made = convert_file(Path("old.yaml"))
    assert ("use_dft_loss", "method.loss") in [(note.key, note.ours) for note in made.of("translated")]


@pytest.mark.parametrize(
    ("more", "status", "method"),
    [
        ("use_eaft_loss: true\neaft_alpha: 0.5\n", "translated", {"type": "sft", "loss": "eaft", "eaft_alpha": 0.5}),
        (
            "use_asft_loss: true\nasft_alpha: 0.05\n", "changed",
            {"type": "distill", "teacher": {"name_or_path": "builtin:qwen2-tiny"}, "divergence_weight": 0.05,
             "sft_weight": 1.0, "sft_loss": "dft"},
        ),
    ],
)  # fmt: skip
def test_other_losses_of_llamafactory(more: str, status: str, method: dict[str, Any]) -> None:
    text = LLAMAFACTORY.replace("quantization_bit: 4\n", "").replace("mask_history: true\n", "")
    Path("old.yaml").write_text(text + more)
    made = convert_file(Path("old.yaml"))
    assert more.partition(":")[0] in [note.key for note in made.of(status)]
    found = made.values["method"]
    assert {key: found[key] for key in method} == method


def test_eaft_of_axolotl_does_not_divide_the_entropy() -> None:
    Path("old.yaml").write_text(SAME + "use_eaft: true\neaft_k: 10\n")
    made = convert_file(Path("old.yaml"))
    assert made.status == "same"
    found = made.values["method"]
    assert {key: found[key] for key in ("loss", "eaft_tokens", "eaft_scale")} == {
        "loss": "eaft", "eaft_tokens": 10, "eaft_scale": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "more",
    ["use_llama_pro: true", "mixture_of_depths: convert", "use_badam: true",
     "add_tokens: x", "train_mm_proj_only: true", "image_max_pixels: 262144",
     "adapter_name_or_path: [saves/x, saves/y]", "optim: ademamix"],
)  # fmt: skip
def test_llamafactory_keys_that_change_what_is_learned(more: str) -> None:
    Path("old.yaml").write_text(LLAMAFACTORY.replace("quantization_bit: 4\n", "") + more + "\n")
    assert [note.key for note in convert_file(Path("old.yaml")).of("refused")] == [more.split(":")[0]]
    off = more.replace(more.split(": ")[1], "null")
    Path("old.yaml").write_text(LLAMAFACTORY.replace("quantization_bit: 4\n", "") + off + "\n")
    assert convert_file(Path("old.yaml")).status == "approximate"


def test_training_goes_on_from_an_adapter() -> None:
    Path("old.yaml").write_text(LLAMAFACTORY.replace("quantization_bit: 4\n", "") + "adapter_name_or_path: saves/x\n")
    assert convert_file(Path("old.yaml")).values["adapter"] == {"type": "lora", "name_or_path": "saves/x"}
    Path("old.yaml").write_text(SAME + "adapter: lora\nlora_r: 8\nlora_model_dir: saves/x\n")
    adapter = convert_file(Path("old.yaml"), "axolotl").values["adapter"]
    assert adapter["name_or_path"] == "saves/x"
    assert not adapter.keys() & {"rank", "alpha", "target_modules"}


@pytest.mark.parametrize(
    ("schedule", "options", "found"),
    [
        ("cosine_with_restarts", {"num_cycles": 3}, {"lr_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {"lr_min_ratio": 0.2}),
        ("cosine_with_min_lr", {"min_lr": 2e-5}, {"lr_min_ratio": 0.2}),
        ("polynomial", {"power": 2, "lr_end": 1e-5}, {"lr_power": 2, "lr_min_ratio": 0.1}),
    ],
)
def test_options_of_a_schedule(schedule: str, options: dict[str, float], found: dict[str, float]) -> None:
    lines = [line for line in TRL.split("\n") if not line.startswith(("lr_scheduler_type", "learning_rate"))]
    more = {"lr_scheduler_type": schedule, "learning_rate": 1e-4, "lr_scheduler_kwargs": options}
    Path("old.yaml").write_text("\n".join(lines) + yaml.safe_dump(more))
    converted = convert_file(Path("old.yaml"))
    training = {key: value for key, value in converted.values["training"].items() if key in found}
    assert training == pytest.approx(found)
    kinds = {note.kind for note in converted.notes if note.key.startswith("lr_scheduler_kwargs")}
    assert kinds == {"translated"}
    Path("old.yaml").write_text("\n".join(lines) + yaml.safe_dump(more | {"lr_scheduler_kwargs": {"steepness": 1}}))
    assert [one.key for one in convert_file(Path("old.yaml")).of("refused")] == ["lr_scheduler_kwargs.steepness"]


def test_no_refusal_names_what_halftune_has() -> None:
    """A refusal says 'not supported' of nothing that the schema has."""
    features = {"lora\\+": "lora_plus_ratio", "pissa": "init", "oft": "block_size", "dpo": "beta", "distill": "teacher"}
    schema = json.dumps(RunConfig.model_json_schema()).lower()
    said = [path.read_text() for path in (Path(convert.__file__).parent).rglob("*") if path.suffix in (".py", ".yaml")]
    for feature, key in features.items():
        assert f'"{key}"' in schema
        for text in said:
            assert not re.search(rf"{feature}\\b[^\n]*not supported", text, re.IGNORECASE), feature


def test_muon_keeps_its_name() -> None:
    Path("old.yaml").write_text(LLAMAFACTORY.replace("quantization_bit: 4\n", "") + "use_muon: true\n")
    assert convert_file(Path("old.yaml")).values["training"]["optim"] == "muon"
    Path("old.yaml").write_text(SAME.replace("optimizer: adamw_torch_fused", "optimizer: muon"))
    assert convert_file(Path("old.yaml"), "axolotl").values["training"]["optim"] == "muon"


@pytest.mark.parametrize(("written", "norm"), [("0", 0), ("null", 0), ("0.3", 0.3)])
def test_clipping_can_be_off(written: str, norm: float) -> None:
    """In axolotl, null leaves the Trainer's default, 1.0, which is ours."""
    Path("old.yaml").write_text(LLAMAFACTORY.replace("quantization_bit: 4\n", "") + f"max_grad_norm: {written}\n")
    assert convert_file(Path("old.yaml")).values["training"]["max_grad_norm"] == norm
    Path("old.yaml").write_text(SAME + f"max_grad_norm: {written}\n")
    training = convert_file(Path("old.yaml"), "axolotl").values["training"]
    assert training.get("max_grad_norm") == (None if written == "null" else norm)


@pytest.mark.parametrize("more", ["do_train: false", "do_predict: true"])
def test_a_config_of_llamafactory_that_trains_nothing_is_refused(more: str) -> None:
    Path("old.yaml").write_text(LLAMAFACTORY.replace("do_train: true\n", "") + more + "\n")
    assert [note.key for note in convert_file(Path("old.yaml")).of("refused")] == ["do_train"]


def test_thinking_switched_off_in_llamafactory_is_kept() -> None:
    Path("old.yaml").write_text(LLAMAFACTORY + "enable_thinking: false\n")
    assert convert_file(Path("old.yaml")).values["model"]["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_column_of_tools_is_kept() -> None:
    Path("old.yaml").write_text(SAME.replace("chat_template}]", "chat_template, field_tools: functions}]"))
    converted = convert_file(Path("old.yaml"), "axolotl")
    assert converted.values["data"]["train"][0]["columns"] == {"tools": "functions"}
    assert converted.status == "same"


def test_reasons_name_options_that_exist() -> None:
    schema = RunConfig.model_json_schema()
    options = {name for made in schema["$defs"].values() for name in made.get("properties", {})}
    files = [path for path in Path(convert.__file__).parent.rglob("*") if path.suffix in (".py", ".yaml")]
    texts = "".join(path.read_text() for path in files)
    named = set(re.findall(rf"\b(?:{'|'.join(schema['properties'])})\.([a-z0-9_]+)", texts))
    assert len(named) > 50
    assert not named - options


def test_rules_are_well_formed() -> None:
    results = {"to", "as", "value", "words", "otherwise", "why", "put", "none", "changed", "refused", "stop"}
    known = {"is", "same", "if", "unless", "default", "for"} | results
    here = Path(convert.__file__).parent
    files = "|".join(path.stem for path in here.glob("keys/*.yaml"))
    sources = "".join(path.read_text() for path in here.rglob("*.py"))
    followed = set(re.findall(rf'"({files})\.([a-z0-9_]+)"', sources))
    followed |= {("sections", section) for section in tables("sections")}
    rules = [rule for file, block in followed for rule in block_of_rules(file, block)]
    assert len(rules) > 200
    for key, cases in rules:
        for case in cases:
            assert case.keys() <= known, key
            assert "default" in case if "." in key else results & case.keys(), key
            assert case.get("as", "same") in VALUES, key
            names = (case.get("to", "model."), *case.get("put", {}), key if "." in key else "model.")
            assert all(name.split(".")[0] in RunConfig.model_fields for name in names), key


def test_llamafactory_trains_some_layers_rotates_and_begins_with_singular_vectors() -> None:
    def adapter(old: str, more: str) -> dict[str, Any]:
        text = LLAMAFACTORY.replace("quantization_bit: 4\n", "").replace("finetuning_type: lora", old)
        Path("old.yaml").write_text(f"{text}\n{more}\n")
        return convert_file(Path("old.yaml")).values["adapter"]

    frozen = adapter("finetuning_type: freeze", "freeze_trainable_layers: -3\nfreeze_extra_modules: norm")
    assert frozen == {"type": "none", "train_layers": -3, "train_only": ["norm"]}
    rotated = adapter("finetuning_type: oft", "oft_block_size: 16\noft_target: q_proj,v_proj")
    assert rotated == {"type": "oft", "block_size": 16, "target_modules": ["q_proj", "v_proj"]}
    assert adapter("finetuning_type: lora", "pissa_init: true")["init"] == "pissa_niter_16"
    assert adapter("finetuning_type: lora", "pissa_init: true\npissa_iter: -1")["init"] == "pissa"


@pytest.mark.parametrize("framework", OLD)
def test_a_misspelt_key_names_the_nearest(framework: str) -> None:
    Path("old.yaml").write_text(OLD[framework] + "wieght_decay: 0.1\n")

    def note(*accepted: str) -> Note:
        notes = convert_file(Path("old.yaml"), framework, accepted).notes
        return next(note for note in notes if note.key == "wieght_decay")

    assert note().kind == "refused"
    assert "did you mean weight_decay?" in note().why
    assert note("wieght_decay").kind == "changed"


def test_data_sets_of_llamafactory_on_the_hub() -> None:
    text = LLAMAFACTORY.replace("dataset: mine,hub", "dataset: org/one,org/two") + "dataset_dir: "
    Path("old.yaml").write_text(text + "ONLINE\n")
    online = convert_file(Path("old.yaml"))
    rest = {"format": "alpaca", "samples": 1000, "sampling": "first"}
    sources = [{"path": f"org/{name}", **rest} for name in ("one", "two")]
    assert online.values["data"]["train"] == sources
    assert not {"dataset", "dataset_dir"} & {note.key for note in (*online.of("changed"), *online.of("refused"))}
    Path("old.yaml").write_text(text + "REMOTE:org/sets\n")
    assert "dataset_dir" in {note.key for note in convert_file(Path("old.yaml")).of("refused")}


def test_media_of_llamafactory_are_refused() -> None:
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "a", "columns": {"images": "i"}}}))
    Path("old.yaml").write_text(LLAMAFACTORY)
    assert "dataset" in {note.key for note in convert_file(Path("old.yaml")).of("refused")}


@pytest.mark.parametrize(
    ("more", "quantization", "status"),
    [
        ("load_in_4bit: true", "nf4", "same"),
        ("load_in_8bit: true", "int8", "same"),
        ("load_in_4bit: true\nbnb_4bit_use_double_quant: false", "nf4_single", "same"),
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4", None, "refused"),
        ("load_in_4bit: false", None, "same"),
    ],
)
def test_a_base_that_is_quantised_on_load(more: str, quantization: str | None, status: str) -> None:
    converted = axolotl(f"{more}\n")
    assert (converted.status, converted.values["model"].get("quantization")) == (status, quantization)


def test_a_base_that_is_quantised_already_is_loaded_as_it_is() -> None:
    Path("old.yaml").write_text(SAME.replace("builtin:qwen2-tiny", "org/Llama-8B-bnb-4bit") + "load_in_4bit: true\n")
    converted = convert_file(Path("old.yaml"), "axolotl")
    assert (converted.status, converted.values["model"].get("quantization")) == ("same", None)


@pytest.mark.parametrize(("more", "quantization"), [("", "nf4"), ("quantization_method: hqq\n", None)])
def test_quantization_bit(more: str, quantization: str | None) -> None:
    Path("old.yaml").write_text(LLAMAFACTORY + more)
    assert convert_file(Path("old.yaml")).values["model"].get("quantization") == quantization


def test_remote_code_is_left_out_where_transformers_has_the_architecture() -> None:
    assert "trust_remote_code" not in axolotl("trust_remote_code: true\n").values["model"]
    for kind, kept in (("qwen2", None), ("somebodys", True)):
        Path("model").mkdir(exist_ok=True)
        Path("model/config.json").write_text(json.dumps({"model_type": kind}))
        Path("old.yaml").write_text(SAME.replace("builtin:qwen2-tiny", "./model") + "trust_remote_code: true\n")
        converted = convert_file(Path("old.yaml"), "axolotl")
        assert converted.values["model"].get("trust_remote_code") is kept
        assert converted.status == "same"


@pytest.mark.parametrize(
    ("more", "offloads"),
    [
        ("fsdp_config: {fsdp_offload_params: true}", True),
        ("fsdp_config: {offload_params: false}", None),
        ("fsdp: [full_shard, offload]", True),
        ("deepspeed: ds/zero3_bf16_cpuoffload_all.json", True),
        ("deepspeed: zero.json", True),
        ("deepspeed: zero2.json", None),
    ],
)
def test_offload_is_kept(more: str, offloads: bool | None) -> None:
    Path("zero.json").write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}))
    Path("zero2.json").write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "none"}}}))
    fsdp = axolotl(more).values.get("distributed", {}).get("fsdp", {})
    assert fsdp.get("cpu_offload") is offloads


@pytest.mark.parametrize(("steps", "key", "value"), [("0.1", "warmup_ratio", 0.1), ("10", "warmup_steps", 10)])
def test_warm_up_below_one_step_is_a_ratio(steps: str, key: str, value: float) -> None:
    converted = axolotl(f"warmup_steps: {steps}\n")
    assert converted.values["training"][key] == value
    assert "warmup_ratio" not in {note.key for note in converted.notes if note.kind == "translated"}


def test_a_config_of_llamafactory_v1() -> None:
    Path("sets.yaml").write_text("mine: {path: data/a.json, source: local, converter: alpaca, size: 500}\n")
    text = """\
model: builtin:qwen2-tiny
model_class: llm
peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}
kernel_config: {name: auto}
quant_config: null
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: sets.yaml
output_dir: out
micro_batch_size: 2
batching_strategy: normal
cutoff_len: 1024
learning_rate: 1.0e-4
max_steps: 10
sample_backend: hf
max_new_tokens: 128
"""
    Path("v1.yaml").write_text(text)
    converted = convert_file(Path("v1.yaml"))
    new = converted.values
    assert (converted.framework, converted.status) == ("LLaMA-Factory v1", "same")
    assert (new["data"]["max_length"], new["data"]["overlong"]) == (1024, "keep_start")
    assert new["data"]["train"] == [{"path": "data/a.json", "format": "alpaca", "samples": 500}]
    assert new["adapter"] == {"type": "lora", "rank": 16, "alpha": 32, "target_modules": "all-linear"}
    assert (new["training"]["lr_scheduler_type"], new["training"]["max_steps"]) == ("constant", 10)
    Path("new.yaml").write_text(converted.yaml)
    load_config("new.yaml", look_at_files=False)
    Path("sets.yaml").write_text("mine: {path: data/a.json, source: local, converter: sharegpt}\n")
    assert [note.key for note in convert_file(Path("v1.yaml")).of("changed")] == ["cutoff_len"], (
        "answers are rows there"
    )
    for more, key in (("quant_config: {name: hqq, quantization_bit: 4}", "quant_config"),
                      ("peft_config: {name: oft}", "peft_config"), ("pref_beta: 0.1", "pref_beta"),
                      ("train_dataset: data/v1_dpo_demo.yaml", "train_dataset"),
                      ("optim_config: {name: came}", "optim_config")):  # fmt: skip
        lines = [line for line in text.split("\n") if not line.startswith(f"{key}:")]
        Path("v1.yaml").write_text("\n".join([*lines, more]))
        assert [note.key for note in convert_file(Path("v1.yaml")).of("refused")] == [key]


def test_optimizers_are_those_of_the_schema() -> None:
    assert set(convert_optimizers.OPTIMIZERS.values()) <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", ["adamw_torch_8bit", "adamw_torch_4bit"])
def test_optimizers_of_torchao(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"base_model: builtin:qwen2-tiny\ndatasets: [{{path: a}}]\noptimizer: {name}\n")
    converted = convert_file(path, "axolotl")
    assert converted.values["training"]["optim"] == name
    assert "optimizer" in {note.key for note in converted.of("translated")}


def test_data_sets_of_llamafactory_lie_above_its_examples(tmp_path: Path) -> None:
    home = tmp_path / "home"  # not the folder that the test runs in
    (home / "data").mkdir(parents=True)
    (home / "data" / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    path = home / "examples" / "lora" / "a.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("model_name_or_path: builtin:qwen2-tiny\nstage: sft\nlora_rank: 8\ndataset: mine\n")
    converted = convert_file(path)
    assert converted.values["data"]["train"][0]["path"] == str(home / "data" / "mine.json")
    assert "dataset" in {note.key for note in converted.of("translated")}


def test_a_file_name_too_long_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"model: m\ntrain_dataset: {'d' * 400}\noutput_dir: o\n")
    with pytest.raises(ConfigError) as caught:
        convert_file(path, "LLaMA-Factory v1")
    assert caught.value.code == "convert.unexpected_value"


V1 = "model: Qwen/Qwen3-0.6B\ntrain_dataset: sets.yaml\nlearning_rate: 1.0e-5\nmax_steps: 10\n"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("quant_config: {name: bnb, quantization_bit: 4}", ("model.quantization", "nf4")),
        ("quant_config: {name: bnb, double_quantization: false}", ("model.quantization", "nf4_single")),
        ("quant_config: {name: auto}", ("model.quantization", None)),
        ("peft_config: {name: freeze, freeze_trainable_layers: -3}", ("adapter.train_layers", -3)),
        ("batching_strategy: padding_free", ("data.packing", False)),
    ],
)
def test_the_new_trainer_of_llamafactory(more: str, expected: tuple[str, object]) -> None:
    Path("sets.yaml").write_text("one: {path: a.json, converter: alpaca}\n")
    Path("old.yaml").write_text(f"{V1}{more}\n")
    converted = convert_file(Path("old.yaml"), "LLaMA-Factory v1")
    section, key = expected[0].split(".")
    assert (converted.status, converted.values[section].get(key)) == ("same", expected[1])
    Path("old.yaml").write_text(f"{V1}peft_config: {{name: freeze, unheard_of: 1}}\n")
    assert convert_file(Path("old.yaml"), "LLaMA-Factory v1").status == "approximate"


def test_the_phi_style_of_alpaca() -> None:
    """As ``AlpacaPrompter`` of axolotl writes it: no line break around a row's input."""
    kept = [line for line in SAME.split("\n") if not line.startswith("datasets:")]
    Path("old.yaml").write_text("\n".join([*kept, "datasets: [{path: a/b, type: 'alpaca:phi'}]"]))
    converted = convert_file(Path("old.yaml"), "axolotl")
    assert converted.values["data"]["train"] == [{"path": "a/b", "format": "alpaca", "prompt": "alpaca_phi"}]
    row = find_prompt("alpaca_phi")
    user = "<|system|>\nBelow is an instruction that describes a task{}. Write a response that appropriately completes "
    user += "the request.<|end|>\n<|user|>\n{{instruction}}<|end|>"
    paired = ", paired with an input that provides further context"
    assert row.with_input == user.format(paired) + "{input}<|assistant|>"
    assert row.without_input == user.format("") + "\n<|assistant|>\n"


def test_llama_pro_trains_layers_at_equal_distances() -> None:
    text = LLAMAFACTORY.replace("quantization_bit: 4\n", "").replace("finetuning_type: lora", "finetuning_type: freeze")
    Path("old.yaml").write_text(text + "use_llama_pro: true\nfreeze_trainable_layers: 8\n")
    made = convert_file(Path("old.yaml"))
    assert made.values["adapter"] == {"type": "none", "train_layers": 8, "spread_layers": True}


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("", {"optim": None, "learning_rate": 1e-5, "weight_decay": 0.01, "weight_decay_on": "all"}),
        ("optim_config: {name: muon, wd: 0.2}\n",
         {"optim": "muon", "learning_rate": 1e-3, "weight_decay": 0.2, "weight_decay_on": "all", "adam_beta2": 0.95}),
    ],
)  # fmt: skip
def test_optimizers_of_llamafactory_v1_decay_every_weight(more: str, wanted: dict[str, Any]) -> None:
    Path("old.yaml").write_text("model: builtin:qwen2-tiny\nlearning_rate: 1.0e-5\ntrain_dataset: data.yaml\n" + more)
    made = convert_file(Path("old.yaml"), "LLaMA-Factory v1")
    assert not made.of("refused")
    assert {key: made.values["training"].get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("use_galore: true\ngalore_layerwise: true\ngalore_rank: 64\n",
         {"optim": "galore", "projection_rank": 64, "projection_scale": 2.0, "max_grad_norm": 0}),
        ("use_apollo: true\napollo_update_interval: 50\n",
         {"optim": "apollo", "projection_rank": 16, "projection_interval": 50, "projection_scale": 32.0}),
        ("use_apollo: true\napollo_proj: svd\n", None),
        ("use_galore: true\noptim: adamw_8bit\n", None),
    ],
)  # fmt: skip
def test_projected_optimizers_of_llamafactory(more: str, wanted: dict[str, Any] | None) -> None:
    Path("old.yaml").write_text(LLAMAFACTORY.replace("quantization_bit: 4\n", "") + more)
    made = convert_file(Path("old.yaml"))
    assert bool(made.of("refused")) is (wanted is None)
    if wanted is not None:
        assert {key: made.values["training"].get(key) for key in wanted} == wanted


GRPO = """\
model_name_or_path: builtin:qwen2-tiny
dataset_name: trl-lib/DeepMath-103K
use_peft: true
lora_target_modules: all-linear
num_generations: 4
max_completion_length: 96
reward_funcs: [accuracy_reward, think_format_reward]
reward_weights: [1.0, 0.5]
loss_type: dr_grpo
beta: 0.04
scale_rewards: none
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
max_steps: 100
output_dir: out
"""


def test_grpo_of_trl() -> None:
    Path("old.yaml").write_text(GRPO)
    made = convert_file(Path("old.yaml"), "TRL")
    assert made.status == "approximate"
    method, training, data = (made.values[name] for name in ("method", "training", "data"))
    wanted = {"type": "grpo", "num_generations": 4, "max_completion_length": 96, "loss": "dr_grpo", "beta": 0.04}
    assert {key: method[key] for key in wanted} == wanted
    assert method["scale_rewards"] is False
    assert [(one["function"], one.get("weight", 1.0)) for one in method["rewards"]] == [
        ("same_maths", 1.0),
        ("matches", 0.5),
    ]
    # 8 x 4 answers are 8 prompts with 4 answers each; rows hold both
    assert (training["per_device_train_batch_size"], training["gradient_accumulation_steps"]) == (1, 8)
    assert training["learning_rate"] == 1e-6
    assert data["max_length"] == 1024 + 96
    pattern = method["rewards"][1]["pattern"]
    theirs = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)  # TRL's
    for answer in (
        "<think>a\nb</think>\nc",
        "<think>a",
        "x<think>a</think>",
        "<think><think>a</think>",
        "<think></think>",
    ):
        assert bool(re.fullmatch(pattern, answer)) == bool(theirs.match(answer)), answer


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("loss_type: dr_grpo", "loss_type: cispo", "loss_type"),
        ("scale_rewards: none", "scale_rewards: batch", "scale_rewards"),
        ("beta: 0.04", "top_entropy_quantile: 0.2", "top_entropy_quantile"),
        ("beta: 0.04", "steps_per_generation: 8", "steps_per_generation"),
        ("beta: 0.04", "multi_objective_aggregation: normalize_then_sum", "multi_objective_aggregation"),
        ("reward_funcs: [accuracy_reward, think_format_reward]", "", "reward_funcs"),
        ("reward_weights: [1.0, 0.5]", "reward_model_name_or_path: org/reward", "reward_model_name_or_path"),
    ],
)
def test_parts_of_grpo_that_are_not_there(old: str, new: str, key: str) -> None:
    Path("old.yaml").write_text(GRPO.replace(old, new))
    made = convert_file(Path("old.yaml"), "TRL")
    assert key in [note.key for note in made.of("refused")]


def test_a_server_and_functions_of_a_module() -> None:
    more = "use_vllm: true\nvllm_mode: server\nvllm_server_host: 10.0.0.1\n"
    Path("old.yaml").write_text(
        GRPO.replace("[accuracy_reward, think_format_reward]", "[lib.rewards.short, accuracy_reward]") + more
    )
    method = convert_file(Path("old.yaml"), "TRL").values["method"]
    assert method["rewards"][0] == {"function": "short", "file": "lib/rewards.py"}
    assert method["server"] == {"url": "http://10.0.0.1:8000"}


def test_grpo_of_axolotl() -> None:
    section = {"num_generations": 4, "reward_funcs": ["lib.short"], "max_completion_length": 64, "temperature": 0.7}
    tree = {
        "base_model": "builtin:qwen2-tiny", "rl": "grpo", "adapter": "lora", "lora_target_linear": True,
        "trl": section, "datasets": [{"path": "org/prompts", "type": "chat_template"}],
        "micro_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 9, "learning_rate": 1e-5,
    }  # fmt: skip
    Path("old.yaml").write_text(yaml.safe_dump(tree))
    made = convert_file(Path("old.yaml"), "axolotl")
    assert not made.of("refused")
    assert (made.values["method"]["type"], made.values["method"]["temperature"]) == ("grpo", 0.7)
    assert made.values["training"]["gradient_accumulation_steps"] == 2
    tree["datasets"] = [{"path": "org/prompts", "type": "lib.transform"}]
    Path("old.yaml").write_text(yaml.safe_dump(tree))
    assert [note.key for note in convert_file(Path("old.yaml"), "axolotl").of("refused")] == ["type"]


def test_on_policy_distillation_of_trl() -> None:
    text = "model_name_or_path: builtin:qwen2-tiny\nteacher_model_name_or_path: builtin:qwen2-small\n"
    text += "dataset_name: org/chats\nlmbda: 0.25\nbeta: 0.3\nmax_new_tokens: 64\nmax_steps: 9\noutput_dir: out\n"
    Path("old.yaml").write_text(text)
    made = convert_file(Path("old.yaml"), "TRL")
    assert not made.of("refused")
    wanted = {"type": "distill", "beta": 0.3, "on_policy": 0.25, "temperature": 0.9, "sampling_temperature": 0.9}
    wanted |= {"max_completion_length": 64, "train_on": "last", "teacher": {"name_or_path": "builtin:qwen2-small"}}
    assert made.values["method"] == wanted
    Path("old.yaml").write_text(text + "seq_kd: true\n")
    assert [note.key for note in convert_file(Path("old.yaml"), "TRL").of("refused")] == ["seq_kd"]


@pytest.mark.parametrize(
    ("asked", "ours", "schedule"),
    [
        ("optim: stable_adamw\nlr_scheduler_type: cosine\n", "stable_adamw", "cosine"),
        ("optim: schedule_free_adamw\nlr_scheduler_type: linear\n", "adamw_schedule_free", "constant_with_warmup"),
        ("optim: schedule_free_adamw\nlr_scheduler_type: constant\n", "adamw_schedule_free", "constant"),
        ("optim: schedule_free_adamw\n", "adamw_schedule_free", "constant_with_warmup"),
    ],
)
def test_optimizers_with_averages(asked: str, ours: str, schedule: str) -> None:
    Path("old.yaml").write_text(TRL.replace("lr_scheduler_type: cosine_with_restarts\n", asked))
    training = convert_file(Path("old.yaml"), "TRL").values["training"]
    assert (training["optim"], training["lr_scheduler_type"]) == (ours, schedule)


FULL_TRL = TRL.replace("use_peft: true", "use_peft: false").replace("bf16: false", "bf16: true")
BASES = {
    "axolotl": SAME,
    "lora": SAME + LORA_OF_Q,
    "LLaMA-Factory": LLAMAFACTORY.replace("quantization_bit: 4\n", "").replace("stage: sft\n", ""),
    "TRL": TRL,
    "full": FULL_TRL,
    "GRPO": GRPO,
    "GKD": "teacher_model_name_or_path: x\nmodel_name_or_path: y\ndataset_name: z\nmax_steps: 9\nuse_peft: true\n",
}


@pytest.mark.parametrize(
    ("base", "more", "key", "kind", "wanted"),
    [
        # a value that changes nothing
        ("axolotl", "context_parallel_size: 1", "context_parallel_size", "none", {}),
        ("axolotl", "dataset_shard_num: 1", "dataset_shard_num", "none", {}),
        ("axolotl", "dataset_shard_num: 2", "dataset_shard_num", "refused", {}),
        ("axolotl", "min_sample_len: 2", "min_sample_len", "none", {}),
        ("axolotl", "min_sample_len: 9", "min_sample_len", "changed", {}),
        ("axolotl", "embedding_lr: 1e-4", "embedding_lr", "none", {}),
        ("axolotl", "embedding_lr: 1e-5", "embedding_lr", "refused", {}),
        ("axolotl", "embedding_lr_scale: 1.0", "embedding_lr_scale", "none", {}),
        ("axolotl", "shuffle_before_merging_datasets: true", "shuffle_before_merging_datasets", "none", {}),
        ("axolotl", "sample_packing_sequentially: true", "sample_packing_sequentially", "none", {}),
        ("axolotl", "data_seed: 7", "data_seed", "none", {}),
        ("axolotl", "accelerator_config: {dispatch_batches: false}", "accelerator_config.dispatch_batches",
         "none", {}),
        ("axolotl", "accelerator_config: {split_batches: true}", "accelerator_config.split_batches", "changed", {}),
        ("axolotl", "model_config: {use_cache: false}", "model_config", "none", {}),
        ("axolotl", "save_total_limit: 0", "save_total_limit", "none", {"training.save_total_limit": None}),
        ("LLaMA-Factory", "cp_size: 1", "cp_size", "none", {}),
        ("LLaMA-Factory", "cp_size: 2", "cp_size", "changed", {}),
        ("LLaMA-Factory", "mix_strategy: concat", "mix_strategy", "none", {}),
        ("LLaMA-Factory", "mix_strategy: interleave_under", "mix_strategy", "changed", {}),
        ("LLaMA-Factory", "init_special_tokens: noise_init", "init_special_tokens", "none", {}),
        ("LLaMA-Factory", "save_total_limit: 0", "save_total_limit", "none", {"training.save_total_limit": None}),
        ("TRL", "report_to: comet_ml", "report_to", "translated", {"logging.report_to": []}),
        ("axolotl", "logging_steps: 0", "logging_steps", "none", {}),
        ("TRL", "packing: false", "packing_strategy", "none", {"data.packing": False}),
        ("TRL", "dtype: null", "dtype", "none", {}),
        ("TRL", "dtype: float32", "dtype", "none", {}),
        ("full", "dtype: bfloat16", "dtype", "translated", {"precision.trainable": "bf16"}),
        ("full", "dtype: float32", "dtype", "none", {"precision.trainable": None}),
        ("full", "dtype: auto", "dtype", "changed", {}),
        ("TRL", "loss_type: sigmoid\nld_alpha: 1.0", "ld_alpha", "none", {}),
        ("TRL", "loss_type: apo_zero_unpaired", "kto", "translated", {"method.group_size": 8}),
        ("GRPO", "num_generations_eval: 4", "num_generations_eval", "none", {}),
        ("GRPO", "num_generations_eval: 2", "num_generations_eval", "changed", {}),
        ("GRPO", "beta: 0.0\nsync_ref_model: true", "sync_ref_model", "none", {}),
        ("GRPO", "sync_ref_model: true", "sync_ref_model", "refused", {}),
        ("GRPO", "generation_batch_size: 64", "generation_batch_size", "none", {}),
        ("GRPO", "generation_batch_size: 8", "generation_batch_size", "refused", {}),
        ("GKD", "lmbda: 0", "lmbda", "translated", {"method.on_policy": 0}),
        ("GKD", "lmbda: 1.0", "lmbda", "translated", {"method.on_policy": 1.0}),
        # a key that does nothing there without another one
        ("axolotl", "lisa_step_interval: 20", "lisa_step_interval", "none", {}),
        ("axolotl", "lisa_n_layers: 2\nlisa_step_interval: 20", "lisa_step_interval", "refused", {}),
        ("axolotl", "relora: false\nrelora_steps: 20", "relora_steps", "none", {}),
        ("axolotl", "image_size: 512", "image_size", "none", {}),
        ("axolotl", "cosine_constant_lr_ratio: 0.8", "cosine_constant_lr_ratio", "none", {}),
        ("axolotl", "cosine_constant_lr_ratio: 0.8\ncosine_min_lr_ratio: 0.1", "cosine_constant_lr_ratio",
         "changed", {}),
        ("axolotl", "lr_scheduler: linear\ncosine_min_lr_ratio: 0.1", "cosine_min_lr_ratio", "none", {}),
        ("axolotl", "lr_scheduler: null\ncosine_min_lr_ratio: 0.1", "cosine_min_lr_ratio", "translated",
         {"training.lr_scheduler_type": "cosine_with_min_lr", "training.lr_min_ratio": 0.1}),
        ("axolotl", "lr_scheduler: linear\nlr_quadratic_warmup: true", "lr_quadratic_warmup", "none", {}),
        ("axolotl", "lr_quadratic_warmup: true", "lr_quadratic_warmup", "changed", {}),
        ("axolotl", "trl: {beta: 0.1}", "trl", "none", {}),
        ("axolotl", "optim_args: betas=0.9", "optim_args", "none", {}),
        ("axolotl", "optimizer: sgd\noptim_args: momentum=0.9", "optim_args", "changed", {}),
        ("lora", "loraplus_lr_ratio: 16\nloraplus_lr_embedding: 1e-6", "loraplus_lr_embedding", "none", {}),
        ("lora", "loraplus_lr_ratio: 16\nloraplus_lr_embedding: 1e-6\nlora_target_modules: [embed_tokens]",
         "loraplus_lr_embedding", "refused", {}),
        ("LLaMA-Factory", "pref_beta: 0.1", "pref_beta", "none", {}),
        ("LLaMA-Factory", "stage: rm\npref_ftx: 0.1", "pref_ftx", "none", {}),
        ("LLaMA-Factory", "stage: dpo\npref_loss: orpo\nref_model: x", "ref_model", "none", {}),
        ("LLaMA-Factory", "stage: dpo\nref_model: x", "ref_model", "refused", {}),
        ("LLaMA-Factory", "stage: dpo\nref_model: builtin:qwen2-tiny", "ref_model", "none", {}),
        ("LLaMA-Factory", "metric_for_best_model: accuracy", "metric_for_best_model", "none", {}),
        # false where the note speaks of true
        ("axolotl", "pretrain_multipack_attn: false", "pretrain_multipack_attn", "changed", {}),
        ("axolotl", "average_tokens_across_devices: false", "average_tokens_across_devices", "changed", {}),
        ("LLaMA-Factory", "ignore_pad_token_for_loss: false", "ignore_pad_token_for_loss", "changed", {}),
        ("axolotl", "rl: simpo\ncpo_alpha: 0", "cpo_alpha", "translated", {"method.sft_weight": 0.0}),
        ("LLaMA-Factory", "use_asft_loss: true\nasft_alpha: 0", "use_asft_loss", "translated", {"method.loss": "dft"}),
        ("TRL", "completion_only_loss: false", "completion_only_loss", "translated", {"method.train_on": "assistant"}),
        ("TRL", "max_length: null", "max_length", "translated", {"data.overlong": "error"}),
        ("GRPO", "disable_dropout: true", "disable_dropout", "none", {"adapter.dropout": 0.0}),
        ("GKD", "disable_dropout: true", "disable_dropout", "none", {"adapter.dropout": 0.0}),
        ("GKD", "disable_dropout: false", "disable_dropout", "none", {"adapter.dropout": 0.05}),
        ("GRPO", "use_vllm: true\nvllm_mode: server\nvllm_importance_sampling_correction: false",
         "vllm_importance_sampling_correction", "translated", {"method.server.max_weight": None}),
        ("GRPO", "use_vllm: true\nvllm_mode: server\nvllm_importance_sampling_mode: token_truncate",
         "vllm_importance_sampling_mode", "none", {}),
        ("GRPO", "use_vllm: true\nvllm_mode: server\nvllm_importance_sampling_mode: token_mask",
         "vllm_importance_sampling_mode", "changed", {}),
        ("GRPO", "use_vllm: true\nvllm_importance_sampling_mode: token_mask", "vllm_importance_sampling_mode",
         "none", {}),
        # what halftune has a key for
        ("axolotl", "full_determinism: true", "full_determinism", "translated", {"training.deterministic": True}),
        ("axolotl", "warmup_ratio: null\nmax_steps: 1000", "warmup_steps (3 %, at most 100)", "default",
         {"training.warmup_steps": 30, "training.warmup_ratio": None}),
        ("axolotl", "lr_scheduler: constant\nwarmup_ratio: 0.1", "warmup_ratio", "none",
         {"training.warmup_ratio": None, "training.warmup_steps": None}),
        ("axolotl", "lr_scheduler: constant\nwarmup_ratio: null\nmax_steps: 1000", "max_steps", "translated",
         {"training.warmup_ratio": None, "training.warmup_steps": None}),
        ("LLaMA-Factory", "lr_scheduler_type: constant\nwarmup_ratio: 0.1", "warmup_ratio", "none",
         {"training.warmup_ratio": None, "training.warmup_steps": None}),
        ("TRL", "lr_scheduler_type: constant\nwarmup_steps: 5", "warmup_steps", "none",
         {"training.warmup_ratio": None, "training.warmup_steps": None}),
        ("axolotl", "optimizer: adamw_apex_fused", "optimizer", "translated", {"training.optim": "adamw"}),
        ("axolotl", "optimizer: paged_lion_32bit", "optimizer", "translated", {"training.optim": "lion"}),
        ("axolotl", "optimizer: galore_adamw\noptim_args: rank=64, scale=0.1\noptim_target_modules: [attn, mlp]",
         "optimizer", "translated", {"training.optim": "galore", "training.projection_rank": 64,
                                     "training.projection_interval": 200, "training.projection_scale": 0.1}),
        ("axolotl", "optimizer: apollo_adamw\noptim_target_modules: all-linear", "optimizer", "changed",
         {"training.optim": "apollo", "training.projection_rank": 128}),
        ("axolotl", "optimizer: apollo_adamw\noptim_args: proj=svd\noptim_target_modules: [attn, mlp]",
         "optimizer", "refused", {}),
        ("axolotl", "datasets: [{path: json, data_files: [a.json, b.json], type: alpaca}]", "datasets", "translated",
         {"data.train": [{"path": f"{one}.json", "format": "alpaca", "prompt": "alpaca"} for one in "ab"]}),
        ("axolotl", "datasets: [{path: a/b, type: chat_template, chat_template: tokenizer_default,"
         " roles: {user: [human], assistant: [gpt]}}]", "datasets", "translated", {"data.train": [{"path": "a/b"}]}),
        ("axolotl", "datasets: [{path: a/b, type: chat_template, roles: {user: [customer]}}]", "datasets",
         "changed", {}),
        ("axolotl", "chat_template_jinja: x.jinja", "chat_template_jinja", "translated",
         {"model.chat_template": "x.jinja", "method.labels": "text"}),
        ("axolotl", "special_tokens: {additional_special_tokens: [<x>], pad_token: y}",
         "special_tokens: additional_special_tokens", "changed", {"model.tokens.add": ["<x>"]}),
        ("lora", "peft_init_lora_weights: olora", "peft_init_lora_weights", "translated", {"adapter.init": "olora"}),
        ("lora", "peft_init_lora_weights: true", "peft_init_lora_weights", "none", {}),
        ("lora", "peft_init_lora_weights: false", "peft_init_lora_weights", "refused", {}),
        ("lora", "peft_init_lora_weights: eva", "peft_init_lora_weights", "refused", {}),
        ("lora", "peft_autocast_adapter_dtype: true", "peft_autocast_adapter_dtype", "none", {}),
        ("lora", "bf16: true\npeft_autocast_adapter_dtype: false", "peft_autocast_adapter_dtype", "translated",
         {"precision.trainable": "bf16"}),
        ("lora", "load_in_4bit: true\nbnb_config_kwargs: {bnb_4bit_use_double_quant: false}", "load_in_4bit",
         "translated", {"model.quantization": "nf4_single"}),
        ("TRL", "load_in_4bit: true", "load_in_4bit", "translated", {"model.quantization": "nf4_single"}),
        ("TRL", "load_in_4bit: true\nuse_bnb_nested_quant: true", "load_in_4bit", "translated",
         {"model.quantization": "nf4"}),
        ("LLaMA-Factory", "new_special_tokens: <x>,<y>", "new_special_tokens", "changed",
         {"model.tokens.add": ["<x>", "<y>"]}),
        ("LLaMA-Factory", "resize_vocab: true", "resize_vocab", "changed",
         {"adapter.modules_to_save": ["embed_tokens", "lm_head"]}),
        ("LLaMA-Factory", "resize_vocab: true\nfinetuning_type: full", "resize_vocab", "none", {}),
        ("LLaMA-Factory", "adapter_name_or_path: x\nloraplus_lr_ratio: 16", "loraplus_lr_ratio", "translated",
         {"adapter.lora_plus_ratio": 16}),
        ("LLaMA-Factory", "lora_target: [all]", "lora_target", "translated", {"adapter.target_modules": "all-linear"}),
        ("LLaMA-Factory", "use_galore: true\noptim: adamw_torch", "optim", "none", {"training.optim": "galore"}),
        ("LLaMA-Factory", "stage: pt\nneat_packing: null", "packing", "default", {"data.packing": True}),
        ("TRL", "eos_token: <e>", "eos_token", "translated", {"model.tokens.special": {"eos": "<e>"}}),
        ("TRL", "chat_template_path: a.jinja", "chat_template_path", "translated", {"model.chat_template": "a.jinja"}),
        ("TRL", "chat_template_path: org/model", "chat_template_path", "changed", {"model.chat_template": None}),
        ("GRPO", "chat_template_kwargs: {enable_thinking: false}", "chat_template_kwargs", "translated",
         {"model.chat_template_kwargs": {"enable_thinking": False}}),
        ("LLaMA-Factory", "use_swanlab: true", "use_swanlab", "translated", {"logging.report_to": ["swanlab"]}),
        ("axolotl", "use_mlflow: true\nuse_tensorboard: true", "use_mlflow", "translated",
         {"logging.report_to": ["tensorboard", "mlflow"]}),
        ("TRL", "lora_target_parameters: [experts.down_proj]", "lora_target_parameters", "translated",
         {"adapter.target_parameters": ["experts.down_proj"]}),
        ("TRL", "test_split_size: 0.1", "test_split_size", "translated", {"data.eval_split": 0.1}),
        ("TRL", "eval_strategy: 'no'\ndataset_test_split: test", "dataset_test_split", "none", {"data.eval": None}),
        ("TRL", "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 0.5}",
         "lr_scheduler_kwargs.num_cycles", "none", {}),
        ("TRL", "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 20}",
         "lr_scheduler_kwargs.num_decay_steps", "translated", {"training.lr_decay_ratio": 0.2}),
        ("TRL", "optim: schedule_free_adamw\nlr_scheduler_kwargs: {num_cycles: 2}", "lr_scheduler_kwargs", "none", {}),
        ("axolotl", "embedding_lr: 1e-4\nweight_decay: 0.1", "embedding_lr", "refused", {}),
        ("lora", "embedding_lr: 1e-5", "embedding_lr", "none", {}),
        ("axolotl", "bf16: null", "bf16", "translated", {"precision.compute": "fp32"}),
        ("axolotl", "bf16: null\nfp16: true", "bf16", "translated", {"precision.compute": "fp16"}),
        ("TRL", "bf16: null\nfp16: null", "bf16", "translated", {"precision.compute": "bf16"}),
        ("axolotl", "rl: orpo", "rl", "changed", {"method.type": "orpo"}),
        ("axolotl", "rl: dpo\ndpo_norm_loss: true", "dpo_norm_loss", "translated", {"method.loss": "sigmoid_norm"}),
        ("axolotl", "rl: dpo\ndpo_norm_loss: true\ndpo_loss_type: [hinge]", "dpo_norm_loss", "refused", {}),
        ("axolotl", "rl: simpo\ndpo_norm_loss: true", "dpo_norm_loss", "refused", {}),
        ("LLaMA-Factory", "ref_model: x", "ref_model", "none", {}),
        ("GRPO", "max_prompt_length: 512", "max_prompt_length", "changed", {"data.max_length": 512 + 96}),
    ],
)  # fmt: skip
def test_a_note_is_true_of_the_value(base: str, more: str, key: str, kind: str, wanted: dict[str, Any]) -> None:
    written = {line.split(":")[0] for line in more.split("\n")}
    kept = [line for line in BASES[base].split("\n") if line.split(":")[0] not in written]
    Path("old.yaml").write_text("\n".join([*kept, more]))
    framework = {"lora": "axolotl", "full": "TRL", "GRPO": "TRL", "GKD": "TRL"}.get(base, base)
    made = convert_file(Path("old.yaml"), framework)
    assert [note.kind for note in made.notes if note.key == key] == [kind]

    def found(dotted: str) -> Any:
        holder: Any = made.values
        for part in dotted.split("."):
            holder = holder.get(part) if isinstance(holder, dict) else None
        return holder

    assert {one: found(one) for one in wanted} == wanted
