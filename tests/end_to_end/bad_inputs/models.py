"""Models, tokenizers and adapters that cannot be loaded as asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bad_inputs.case import RECIPE, SMALL, Case, model_folder, safetensors, weights_of, with_model

OURS = with_model()
REMOTE = 'org/model", trust_remote_code: true'
LORA = "adapter: {type: lora, target_modules: [%s]}\n"


def edited(name: str, old: str, new: str) -> None:
    """A whole checkpoint with one file changed."""
    path = model_folder() / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def cut() -> None:
    path = model_folder() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-50])


def pointer() -> None:
    (model_folder() / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def without_shard() -> None:
    folder = model_folder()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def pickled() -> None:
    folder = model_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_of_pickles() -> None:
    folder = model_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))


def link_to_nothing() -> None:
    path = model_folder() / "model.safetensors"
    path.unlink()
    path.symlink_to("../blobs/gone")


def without(name: str) -> None:
    (model_folder() / name).unlink()


def without_weight() -> None:
    folder, weights = model_folder(num_hidden_layers=4), weights_of({**SMALL, "num_hidden_layers": 4})
    del weights["model.layers.1.mlp.up_proj.weight"]
    (folder / "model.safetensors").write_bytes(safetensors(weights))


def with_code(entry: str) -> None:
    folder = model_folder()
    config = {**SMALL, "model_type": "mystery", "auto_map": {"AutoModelForCausalLM": entry}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_mystery.py").write_text("print('this must never run')\n")


def an_adapter() -> None:
    Path("model").mkdir()
    Path("model/adapter_config.json").write_text('{"peft_type": "LORA"}')


def real(**settings: object) -> None:
    """A real small checkpoint with a tokenizer whose settings are changed; None removes one."""
    from halftune.model.files.builtin import materialize

    shutil.copytree(materialize("qwen2-tiny"), "model", ignore=shutil.ignore_patterns("manifest.json"))
    path = Path("model/tokenizer_config.json")
    values = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def broken_tokenizer() -> None:
    real()
    path = Path("model/tokenizer.json")
    values = json.loads(path.read_text())
    values["model"]["merges"] = [["no", "such"]]
    path.write_text(json.dumps(values))


CASES = (
    Case(
        "a missing model folder",
        OURS.replace('"model"', "./model"),
        says=("no such folder", "x.yaml:1"),
        error=("model.not_found",),
    ),
    Case(
        "a model that is a file",
        RECIPE.replace("builtin:qwen2-tiny", "rows.jsonl"),
        says=("got a file",),
        error=("model.not_found",),
    ),
    Case(
        "a folder without config.json",
        OURS,
        make=lambda: Path("model").mkdir(),
        says=("no config.json",),
        error=("model.config_missing",),
    ),
    Case(
        "an adapter instead of a model",
        OURS,
        make=an_adapter,
        says=("contains an adapter", "base model"),
        error=("model.is_adapter",),
    ),
    Case(
        "config.json that is not valid JSON",
        OURS,
        make=lambda: edited("config.json", "{", "{,"),
        code=3,
        says=("config.json:1", "not valid JSON"),
        error=("core.file_damaged",),
    ),
    Case(
        "config.json with a size that is text",
        OURS,
        make=lambda: edited("config.json", '"hidden_size": 8', '"hidden_size": "8"'),
        code=3,
        says=("hidden_size",),
        error=("model.config_invalid",),
    ),
    Case(
        "config.json with a dtype that torch does not have",
        OURS,
        make=lambda: model_folder(dtype="bfloat61"),
        code=3,
        says=("config.json", "bfloat61", "did you mean bfloat16"),
        error=("model.config_invalid",),
    ),
    Case(
        "config.json with an unknown layer type",
        OURS,
        make=lambda: edited("config.json", "{", '{"layer_types": ["full_atention"], '),
        code=3,
        says=("config.json", "layer_types", "did you mean full_attention"),
        error=("model.config_invalid",),
    ),
    Case(
        "config.json with more layer types than layers",
        OURS,
        make=lambda: edited("config.json", "{", '{"layer_types": ["full_attention", "full_attention", "conv"], '),
        code=3,
        says=("config.json", "layer_types", "3 entries", "num_hidden_layers"),
        error=("model.config_invalid",),
    ),
    Case(
        "an encoder",
        OURS,
        make=lambda: model_folder(model_type="bert"),
        code=3,
        says=("is an encoder",),
        error=("model.not_causal",),
    ),
    Case(
        "an encoder-decoder",
        OURS,
        make=lambda: model_folder(model_type="t5", is_encoder_decoder=True),
        code=3,
        says=("model/config.json", "t5 is an encoder-decoder", "use a decoder"),
        error=("model.not_causal",),
    ),
    Case(
        "an image classifier",
        OURS,
        make=lambda: model_folder(model_type="resnet"),
        code=3,
        says=("resnet", "no causal language model", "use a language model"),
        error=("model.not_causal",),
    ),
    Case(
        "an unknown model type",
        OURS,
        make=lambda: model_folder(model_type="lama"),
        code=3,
        says=("did you mean llama",),
        error=("model.unknown_type",),
    ),
    Case(
        "a truncated weight file",
        OURS,
        make=cut,
        code=3,
        says=("model/model.safetensors", "corrupt or truncated safetensors file"),
        error=("core.file_damaged",),
    ),
    Case(
        "a git-lfs pointer instead of weights",
        OURS,
        make=pointer,
        code=3,
        says=("git lfs pull",),
        error=("core.file_damaged",),
    ),
    Case(
        "a missing shard",
        OURS,
        make=without_shard,
        code=3,
        says=("1 of 2 weight files", "00002-of-00002"),
        error=("model.weights_missing",),
    ),
    Case(
        "a missing weight",
        OURS,
        make=without_weight,
        code=3,
        says=("1 weight is missing", "layers.1.mlp.up_proj"),
        error=("model.weights_mismatch",),
    ),
    Case(
        "weights of a different shape",
        OURS,
        make=lambda: edited("config.json", '"vocab_size": 32', '"vocab_size": 64'),
        code=3,
        says=("wrong shape",),
        error=("model.weights_mismatch",),
    ),
    Case(
        "no weights",
        OURS,
        make=lambda: without("model.safetensors"),
        code=3,
        says=("no weights",),
        error=("model.weights_missing",),
    ),
    Case(
        "weights as pickles",
        OURS,
        make=pickled,
        code=3,
        says=("pytorch_model.bin", "python -c", "save_pretrained"),
        error=("model.pickle_refused",),
    ),
    Case(
        "a pickle named model.safetensors",
        OURS,
        make=lambda: (model_folder() / "model.safetensors").write_bytes(b"\x80\x04K\x01."),
        code=3,
        says=("model/model.safetensors", "corrupt or truncated safetensors file"),
        error=("core.file_damaged",),
    ),
    Case(
        "an index that names a pickle",
        OURS,
        make=index_of_pickles,
        code=3,
        says=("index.json", "pytorch_model.bin", "not safetensors"),
        error=("model.pickle_refused",),
    ),
    Case(
        "weights that are a broken symbolic link",
        OURS,
        make=link_to_nothing,
        code=3,
        says=("link to ../blobs/gone",),
        error=("core.broken_link",),
    ),
    Case(
        "an adapter in the model's folder",
        OURS,
        make=lambda: (model_folder() / "adapter_config.json").write_text("{}"),
        code=3,
        says=("also contains an adapter", "move adapter_config.json"),
        error=("model.adapter_beside_model",),
    ),
    Case(
        "no tokenizer",
        OURS,
        make=lambda: model_folder(tokenizer=None),
        code=3,
        says=("no tokenizer", "model.tokenizer"),
        error=("model.tokenizer_missing",),
    ),
    Case(
        "a tokenizer that is not valid JSON",
        OURS,
        make=lambda: model_folder(tokenizer='{"model":\n ['),
        code=3,
        says=("tokenizer.json:2",),
        error=("core.file_damaged",),
    ),
    Case(
        "a tokenizer that does not load",
        OURS,
        make=broken_tokenizer,
        code=3,
        needs_torch=True,
        says=("cannot load the tokenizer",),
        error=("model.tokenizer_invalid",),
    ),
    Case(
        "`unk_token` outside the vocabulary",
        OURS,
        make=lambda: real(unk_token=""),
        code=3,
        needs_torch=True,
        says=("unk_token ''", "vocabulary"),
        error=("model.tokenizer_invalid",),
    ),
    Case(
        "no chat template",
        OURS,
        make=model_folder,
        says=("no chat template", "model.chat_template"),
        error=("model.chat_template_missing",),
    ),
    Case(
        "a checkpoint that requires remote code",
        OURS,
        make=lambda: with_code("modeling_mystery.M"),
        code=3,
        says=("remote code", "trust_remote_code"),
        error=("model.remote_code_required",),
    ),
    Case(
        "code from another repository",
        OURS.replace('"model"', '"model", trust_remote_code: true'),
        make=lambda: with_code("other/repository--modeling_mystery.M"),
        code=3,
        says=("other/repository", "is not pinned"),
        error=("model.code_not_pinned",),
    ),
    Case(
        "code from the hub not pinned to a revision",
        RECIPE.replace('builtin:qwen2-tiny"', REMOTE),
        says=("not pinned to a revision", "40 hexadecimal"),
        error=("model.revision_not_pinned",),
    ),
    Case(
        "code from the hub at a branch",
        RECIPE.replace('builtin:qwen2-tiny"', REMOTE + ", revision: main"),
        says=("branch or tag",),
        error=("model.revision_not_pinned",),
    ),
    Case(
        "a hub id without a network",
        RECIPE.replace("builtin:qwen2-tiny", "org/no-such-model"),
        code=3,
        says=("org/no-such-model", "hub is unreachable"),
        error=("model.hub_unreachable",),
    ),
    Case(
        "an unknown target module",
        RECIPE + LORA % "q_prog",
        says=("adapter.target_modules", "did you mean q_proj"),
        error=("config.bad_target_modules",),
    ),
    Case(
        "one of two target modules unknown",
        RECIPE + LORA % "q_proj, w_proj",
        says=("adapter.target_modules", "'w_proj'"),
        error=("config.bad_target_modules",),
    ),
    Case(
        "target modules that match nothing",
        RECIPE + LORA.replace("[%s]", '"nothing_.*"'),
        says=("adapter.target_modules", "no module matches"),
        error=("config.bad_target_modules",),
    ),
    Case(
        "an empty list of targets",
        RECIPE + LORA % "",
        says=("target_modules", "empty module name"),
        error=("config.bad_target_modules",),
    ),
)
