"""Chat templates of axolotl and LLaMA-Factory that convert as the same: their texts, and what of them is trained.

The texts are what their sources render for ``CONVERSATION``, with ``<s>`` and ``</s>`` as BOS and EOS: axolotl at
067b021c8b87 (``utils/chat_templates/templates``), LLaMA-Factory at ff6d4d12eeb0 (``data/template.py``).
"""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from halftune.config.chat_templates import find_template
from halftune.convert.draft import Draft
from halftune.convert.templates import AXOLOTL, LLAMA_FACTORY, axolotl_template, llamafactory_template
from halftune.model.tokenizer.named_templates import jinja_of

CONVERSATION = [("system", " S "), ("user", " U "), ("assistant", " A "), ("user", "V"), ("assistant", "B")]
AXOLOTL_TEXTS = {
    ("aya", "cohere"): (
        "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|> S <|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>U<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>A<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>V"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>B<|END_OF_TURN_TOKEN|>"
    ),
    ("chatml", "qwen2_vl", "qwen_25"): (
        "<|im_start|>system\n S <|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
        "<|im_start|>assistant\n A <|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n"
    ),
    ("deepseek_v2",): "<s> S \n\n<｜User｜> U <｜Assistant｜> A </s><｜User｜>V<｜Assistant｜>B</s>",
    ("exaone",): (
        "[|system|] S [|endofturn|]\n[|user|] U \n[|assistant|] A [|endofturn|]\n[|user|]V\n"
        "[|assistant|]B[|endofturn|]\n"
    ),
    ("falcon_h1",): (
        "<s><|im_start|>system\n S <|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
        "<|im_start|>assistant\n A <|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n"
    ),
    ("gemma",): (
        "<s><start_of_turn>user\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
    ),
    ("gemma3", "gemma3n"): (
        "<s><start_of_turn>user\n S \n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
    ),
    ("gemma4", "gemma4_unified"): (
        "<s><|turn>system\nS<turn|>\n<|turn>user\nU<turn|>\n<|turn>model\nA<turn|>\n<|turn>user\nV<turn|>\n"
        "<|turn>model\nB<turn|>\n"
    ),
    ("jamba",): (
        "<s><|bom|><|system|>  S <|eom|><|bom|><|user|>  U <|eom|><|bom|><|assistant|>  A "
        "<|eom|><|bom|><|user|> V<|eom|><|bom|><|assistant|> B<|eom|>"
    ),
    ("llama3",): (
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
    ),
    ("llama4",): (
        "<s><|header_start|>system<|header_end|>\n\nS<|eot|><|header_start|>user"
        "<|header_end|>\n\n U <|eot|><|header_start|>assistant<|header_end|>\n\n A <|eot|>"
        "<|header_start|>user<|header_end|>\n\nV<|eot|><|header_start|>assistant<|header_end|>\n\nB"
        "<|eot|>"
    ),
    ("metharme",): "<s><|system|> S <|user|>U<|model|>A<|user|>V<|model|>B</s>",
    ("mistral_v1",): "<s> [INST]  S \n\n U  [/INST]  A </s> [INST] V [/INST] B</s>",
    ("phi_3",): (
        "<s><|system|>\n S <|end|>\n<|user|>\n U <|end|>\n<|assistant|>\n A <|end|>\n<|user|>\nV"
        "<|end|>\n<|assistant|>\nB<|end|>\n"
    ),
    ("phi_35",): (
        "<|system|>\n S <|end|>\n<|user|>\n U <|end|>\n<|assistant|>\n A <|end|>\n<|user|>\nV<|end|>\n"
        "<|assistant|>\nB<|end|>\n"
    ),
    ("qwen3", "qwen3_5"): (
        "<|im_start|>system\n S <|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
        "<|im_start|>assistant\n A <|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\nB<|im_end|>\n"
    ),
}
LLAMA_FACTORY_TEXTS = {
    (
        "chatml",
        "opencoder",
        "qwen",
        "qwen2_omni",
        "qwen2_vl",
        "qwen3",
        "qwen3_5",
        "qwen3_vl",
        "qwen3_nothink",
        "qwen3_5_nothink",
        "qwen3_vl_nothink",
        "smollm",
        "yi",
    ): (
        "<|im_start|>system\n S <|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
        "<|im_start|>assistant\n A <|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n"
    ),
    ("cpm4", "falcon_h1"): (
        "<s><|im_start|>system\n S <|im_end|>\n<|im_start|>user\n U <|im_end|>\n"
        "<|im_start|>assistant\n A <|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\nB<|im_end|>\n"
    ),
    ("deepseek3",): "<s> S <｜User｜> U <｜Assistant｜> A </s><｜User｜>V<｜Assistant｜>B</s>",
    ("ernie_nothink",): (
        "<|begin_of_sentence|> S \nUser:  U \nAssistant:  A <|end_of_sentence|>User: V\nAssistant: B<|end_of_sentence|>"
    ),
    ("gemma3", "gemma3n"): (
        "<s><start_of_turn>user\n S \n\n U <end_of_turn>\n<start_of_turn>model\n A <end_of_turn>\n"
        "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
    ),
    ("granite3",): (
        "<|start_of_role|>system<|end_of_role|> S <|end_of_text|>\n<|start_of_role|>user"
        "<|end_of_role|> U <|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|> A "
        "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>V<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>B<|end_of_text|>\n"
    ),
    ("llama3",): (
        "<s><|start_header_id|>system<|end_header_id|>\n\n S <|eot_id|><|start_header_id|>user"
        "<|end_header_id|>\n\n U <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n A "
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
    ),
    ("llama4",): (
        "<s><|header_start|>system<|header_end|>\n\n S <|eot|><|header_start|>user"
        "<|header_end|>\n\n U <|eot|><|header_start|>assistant<|header_end|>\n\n A <|eot|>"
        "<|header_start|>user<|header_end|>\n\nV<|eot|><|header_start|>assistant<|header_end|>\n\nB"
        "<|eot|>"
    ),
    ("ministral", "pixtral"): "<s>[INST] S \n\n U [/INST] A </s>[INST]V[/INST]B</s>",
    ("mistral",): "<s>[INST]  S \n\n U [/INST]  A </s>[INST] V[/INST] B</s>",
    ("mistral_small",): "<s>[SYSTEM_PROMPT] S [/SYSTEM_PROMPT][INST] U [/INST] A </s>[INST]V[/INST]B</s>",
    ("moonlight",): (
        "<|im_system|>system<|im_middle|> S <|im_end|><|im_user|>user<|im_middle|> U <|im_end|>"
        "<|im_assistant|>assistant<|im_middle|> A <|im_end|><|im_user|>user<|im_middle|>V"
        "<|im_end|><|im_assistant|>assistant<|im_middle|>B<|im_end|>"
    ),
    ("phi",): (
        "<|system|>\n S <|end|>\n<|user|>\n U <|end|>\n<|assistant|>\n A <|end|>\n<|user|>\nV<|end|>\n"
        "<|assistant|>\nB<|end|>\n"
    ),
    ("phi4",): (
        "<|im_start|>system<|im_sep|> S <|im_end|><|im_start|>user<|im_sep|> U <|im_end|>"
        "<|im_start|>assistant<|im_sep|> A <|im_end|><|im_start|>user<|im_sep|>V<|im_end|>"
        "<|im_start|>assistant<|im_sep|>B<|im_end|>"
    ),
    ("phi4_mini",): (
        "<|system|> S <|end|><|user|> U <|end|><|assistant|> A <|end|><|user|>V<|end|><|assistant|>B<|end|>"
    ),
}
# System text of a conversation without one.
DEFAULTS = {
    "moonlight": "You are a helpful assistant provided by Moonshot-AI.",
    "opencoder": "You are OpenCoder, created by OpenCoder Team.",
    "qwen2_omni": "You are a helpful assistant.",
    "qwen2_vl": "You are a helpful assistant.",
    **dict.fromkeys(("qwen", "qwen_25"), "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    **dict.fromkeys(("exaone", "jamba"), ""),
    "metharme": (
        "Enter RP mode. You shall reply to the user while staying in character. Your responses must be "
        "detailed, creative, immersive, and drive the scenario forward."
    ),
}
# LLaMA-Factory's that train the line break after the end of a turn.
LINE_BREAK = {
    "chatml", "cpm4", "falcon_h1", "gemma3", "gemma3n", "granite3", "opencoder", "phi", "qwen", "qwen2_omni",
    "qwen2_vl", "qwen3", "qwen3_nothink", "qwen3_5", "qwen3_5_nothink", "qwen3_vl", "qwen3_vl_nothink", "smollm", "yi",
}  # fmt: skip
THOUGHT = ("qwen3", "qwen3_5", "qwen3_vl")  # an answer without a thought gets an empty one


def render(name, turns, **variables):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    row = find_template(name)
    return environment.from_string(jinja_of(row)).render(
        messages=messages, bos_token="<s>", eos_token="</s>", **variables
    )


def by_name(texts):
    return sorted((name, text) for names, text in texts.items() for name in names)


def test_every_name_is_tested():
    assert {name for name, _ in by_name(AXOLOTL_TEXTS)} == AXOLOTL
    assert {name for name, _ in by_name(LLAMA_FACTORY_TEXTS)} == LLAMA_FACTORY


@pytest.mark.parametrize(("name", "text"), by_name(AXOLOTL_TEXTS))
def test_text_of_axolotl(name, text):
    assert render(name, CONVERSATION[name == "gemma" :]) == text


@pytest.mark.parametrize(("name", "text"), by_name(LLAMA_FACTORY_TEXTS))
def test_text_and_labels_of_llamafactory(name, text):
    draft = Draft({"template": name}, "LLaMA-Factory")
    draft.put("method.type", "sft")
    draft.put("data.train", [{"path": "x", "format": "alpaca"}])
    llamafactory_template(draft)
    assert [note.kind for note in draft.notes] == ["translated"]
    variables = draft.get("model.chat_template_kwargs") or {}
    found = render(draft.get("model.chat_template"), CONVERSATION, **variables)
    # the thought that encode_multiturn puts before an answer without one
    assert found == (text.replace("assistant\nB", "assistant\n<think>\n\n</think>\n\nB") if name in THOUGHT else text)
    assert bool(draft.get("method.train_line_break")) is (name in LINE_BREAK)


@pytest.mark.parametrize("name", sorted(AXOLOTL | LLAMA_FACTORY))
def test_default_system_text(name):
    row = find_template(name)
    assert row is not None
    assert row.default_system == DEFAULTS.get(name)


@pytest.mark.parametrize(("source", "kind"), [({"format": "alpaca"}, "translated"), ({}, "changed")])
def test_thoughts_of_llamafactory_need_single_turns(source, kind):
    draft = Draft({"template": "qwen3"}, "LLaMA-Factory")
    draft.put("method.type", "sft")
    draft.put("data.train", [{"path": "x", **source}])
    llamafactory_template(draft)
    assert [note.kind for note in draft.notes] == [kind]


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ({"chat_template": "falcon_h1"}, {"chat_template": "falcon_h1", "labels": "text", "label_ends": None}),
        ({"chat_template": "qwen3", "eot_tokens": ["<|x|>"]},
         {"chat_template": "qwen3", "labels": "text", "label_ends": ["<|x|>"]}),
        ({"base_model": "openai/gpt-oss-20b", "eot_tokens": ["<|end|>"]},
         {"chat_template": None, "labels": "text", "label_ends": ["<|end|>"]}),
        ({"base_model": "mistralai/Devstral-Small-2507", "tokenizer_use_mistral_common": True},
         {"chat_template": "mistral_v7_tekken", "labels": None, "label_ends": None}),
        ({"base_model": "mistralai/Voxtral-Mini-3B-2507", "tokenizer_use_mistral_common": True},
         {"chat_template": "mistral_v7_tekken", "labels": None, "label_ends": None}),
    ],
)  # fmt: skip
def test_labels_of_axolotl(more, values):
    source = {"datasets": [{"path": "x/y", "type": "chat_template"}], **more}
    draft = Draft(source, "axolotl")
    draft.put("model.name_or_path", source.get("base_model", "some/base"))
    draft.put("method.type", "sft")
    draft.put("data.train", [{"path": "x/y"}])
    axolotl_template(draft)
    assert {note.kind for note in draft.notes} <= {"translated", "none"}
    assert draft.get("model.chat_template") == values["chat_template"]
    assert [draft.get(f"method.{key}") for key in ("labels", "label_ends")] == [values["labels"], values["label_ends"]]
    assert draft.get("model.chat_template_kwargs") == (
        {"trim_answers": True} if "tokenizer_use_mistral_common" in more else None
    )


@pytest.mark.parametrize("more", [
    {"base_model": "mistralai/Mistral-Small-Instruct-2409"},  # v3
    {"base_model": "mistralai/Ministral-8B-Instruct-2410"},  # the system text stands before the last question there
    {"base_model": "mistralai/Devstral-Small-2507", "datasets": [{"path": "x/think", "type": "chat_template"}]},
])  # fmt: skip
def test_other_formats_of_mistral_common(more):
    draft = Draft({"datasets": [{"path": "x/y"}], "tokenizer_use_mistral_common": True, **more}, "axolotl")
    draft.put("model.name_or_path", more["base_model"])
    draft.put("method.type", "sft")
    draft.put("data.train", [{"path": "x/y"}])
    axolotl_template(draft)
    assert draft.has("tokenizer_use_mistral_common")
