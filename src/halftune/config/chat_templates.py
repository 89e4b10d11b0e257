"""Chat templates by name: how each format frames its turns, as data. ``model/named_templates.py`` writes the Jinja.

In a frame, ``{}`` is the text of the message, ``{bos}`` and ``{eos}`` are the tokenizer's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal


@dataclass(frozen=True)
class TemplateRow:
    """One chat format.

    Attributes:
        name: as in ``model.chat_template``.
        user, assistant: frames of a turn. The generation prompt is the assistant's frame up to ``{}``.
        source: hub id or address where the authors document the format.
        system: frame of a system turn, or of the system text within the first user turn; empty: refused.
        merged: whether the system text is part of the first user turn.
        aliases: other names, as LLaMA-Factory and axolotl spell them.
        tokens: tokens that the tokenizer must have.
        end: the token that ends an answer; ``{eos}``: the tokenizer's own.
        start: text before the first turn.
        prompt: the generation prompt where it is shorter than the assistant's header.
        last: what follows the last answer, in place of the end of the assistant's frame.
        default_system: system text of a conversation without one.
        trim: whether texts are stripped of surrounding white space: none, all, those of turns or of the system only.
            ``model.chat_template_kwargs: {trim: false, trim_system: false}`` keeps it.
        thinking: whether reasoning is written, as ``<think>`` block of the answers after the last question.
        empty_think: whether the last answer has a ``<think>`` block also without reasoning.
        tools: how tools are written; empty: conversations with tools are refused.
    """

    name: str
    user: str
    assistant: str
    source: str
    system: str = ""
    merged: bool = False
    aliases: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    end: str = "{eos}"
    start: str = ""
    prompt: str | None = None
    last: str | None = None
    default_system: str | None = None
    trim: Literal["", "all", "turns", "system"] = ""
    thinking: bool = False
    empty_think: bool = False
    tools: Literal["", "chatml", "qwen"] = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)


# hub ids and addresses of the documentation
_DOCS_MISTRAL = "https://github.com/mistralai/mistral-common"
_IM = ("<|im_start|>", "<|im_end|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TULU: dict[str, Any] = {
    "user": "<|user|>\n{}\n",
    "assistant": "<|assistant|>\n{}{eos}\n",
    "system": "<|system|>\n{}\n",
}


def _turns(turn: str, user: str = "user", assistant: str = "assistant", system: str = "system") -> dict[str, Any]:
    """Frames of a format that differ in the role only, written ``ROLE`` in the frame."""
    return {
        key: turn.replace("ROLE", role)
        for key, role in (("user", user), ("assistant", assistant), ("system", system))
        if role
    }


def _chatml(
    name: str,
    source: str,
    *aliases: str,
    default: str | None = None,
    start: str = "",
    think: bool = False,
    tools: Literal["", "chatml", "qwen"] = "",
) -> TemplateRow:
    return TemplateRow(
        name,
        **_turns("<|im_start|>ROLE\n{}<|im_end|>\n"),
        source=source,
        aliases=aliases,
        tokens=_IM,
        end="<|im_end|>",
        default_system=default,
        start=start,
        thinking=think,
        empty_think=think,
        tools=tools,
    )


_CHATML = (
    _chatml(
        "chatml", "https://github.com/openai/openai-python/blob/v0.27.0/chatml.md", "yi", "smollm", "dbrx",
        tools="chatml",
    ),
    _chatml(
        "qwen2.5", "Qwen/Qwen2.5-7B-Instruct", "qwen", "qwen25", "qwen_25", "qwen2_5",
        default="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", tools="qwen",
    ),
    _chatml("qwen2", "Qwen/Qwen2-7B-Instruct", "qwen2_vl", default="You are a helpful assistant."),
    _chatml("qwen3", "Qwen/Qwen3-8B", think=True, tools="qwen"),
    _chatml("qwen3_nothink", "Qwen/Qwen3-4B-Instruct-2507", "qwen3_instruct", "qwen3_5_nothink", tools="qwen"),
    _chatml(
        "mimo", "XiaomiMiMo/MiMo-7B-RL", default="You are MiMo, an AI assistant developed by Xiaomi.", tools="qwen"
    ),
    _chatml("internlm2", "internlm/internlm2-chat-7b", "intern2", "falcon_h1", "cpm4", "lfm2", start="{bos}"),
    _chatml(
        "smollm2", "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        default="You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    ),
    _chatml(
        "opencoder", "infly/OpenCoder-8B-Instruct", default="You are OpenCoder, created by OpenCoder Team."
    ),
    TemplateRow(
        "sailor", **_turns("<|im_start|>ROLE\n{}<|im_end|>\n", "question", "answer"), source="sail/Sailor-7B-Chat",
        tokens=_IM, end="<|im_end|>",
    ),
    TemplateRow(
        "phi4", **_turns("<|im_start|>ROLE<|im_sep|>{}<|im_end|>"), source="microsoft/phi-4", aliases=("phi_4",),
        tokens=(*_IM, "<|im_sep|>"), end="<|im_end|>",
    ),
    TemplateRow(
        "moonlight", "<|im_user|>user<|im_middle|>{}<|im_end|>", "<|im_assistant|>assistant<|im_middle|>{}<|im_end|>",
        "moonshotai/Moonlight-16B-A3B-Instruct", system="<|im_system|>system<|im_middle|>{}<|im_end|>",
        aliases=("kimi",), tokens=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
        end="<|im_end|>", default_system="You are a helpful assistant provided by Moonshot-AI.",
    ),
)  # fmt: skip

_LLAMA = (
    TemplateRow(
        "llama2", "{bos}[INST] {} [/INST]", " {} {eos}", "meta-llama/Llama-2-7b-chat-hf",
        system="<<SYS>>\n{}\n<</SYS>>\n\n", merged=True, aliases=("llama-2",), prompt="", trim="turns",
    ),
    TemplateRow(
        "llama3", **_turns("<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>"), start="{bos}", trim="all",
        source="https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/", aliases=("llama-3",),
        tokens=_HEADERS, end="<|eot_id|>",
    ),
    TemplateRow(
        "llama4", **_turns("<|header_start|>ROLE<|header_end|>\n\n{}<|eot|>"), start="{bos}", trim="system",
        source="https://www.llama.com/docs/model-cards-and-prompt-formats/llama4/", aliases=("llama-4",),
        tokens=("<|header_start|>", "<|header_end|>", "<|eot|>"), end="<|eot|>",
    ),
    TemplateRow(
        "openchat3.6",
        **_turns(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n{}<|eot_id|>",
            "GPT4 Correct User", "GPT4 Correct Assistant", "System",
        ),
        source="openchat/openchat-3.6-8b-20240522", aliases=("openchat-3.6",), start="{bos}", trim="all",
        tokens=_HEADERS, end="<|eot_id|>",
    ),
    TemplateRow(
        "vicuna", "USER: {} ", "ASSISTANT: {}{eos}", "lmsys/vicuna-7b-v1.5", system="{} ", start="{bos}",
        aliases=("vicuna_v1.1", "llava"), prompt="ASSISTANT:",
        default_system=(
            "A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions."
        ),
    ),
    TemplateRow(
        "alpaca", "### Instruction:\n{}\n\n", "### Response:\n{}{eos}\n\n",
        "https://github.com/tatsu-lab/stanford_alpaca", system="{}\n\n", start="{bos}", last="{eos}",
        default_system=(
            "Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request."
        ),
    ),
    TemplateRow(
        "zephyr", **_turns("<|ROLE|>\n{}{eos}\n"), source="HuggingFaceH4/zephyr-7b-beta", aliases=("stablelm2",),
    ),
    TemplateRow(
        "tulu", **_TULU, source="allenai/Llama-3.1-Tulu-3-8B", aliases=("tulu3", "tulu2"), last="{eos}",
    ),
    TemplateRow("olmo", **_TULU, source="allenai/OLMo-7B-Instruct", start="{eos}", last="{eos}"),
    TemplateRow("olmo2", **_TULU, source="allenai/OLMo-2-1124-7B-Instruct", start="{bos}", last="{eos}"),
    TemplateRow(
        "solar", "### User:\n{}\n\n", "### Assistant:\n{}\n\n", "upstage/SOLAR-10.7B-Instruct-v1.0",
        system="### System:\n{}\n\n", last="{eos}",
    ),
    TemplateRow(
        "metharme", "<|user|>{}", "<|model|>{}", "PygmalionAI/metharme-7b", system="<|system|>{}",
        aliases=("pygmalion",), start="{bos}", trim="turns", last="{eos}",
        default_system=(
            "Enter RP mode. You shall reply to the user while staying in character. Your responses must be "
            "detailed, creative, immersive, and drive the scenario forward."
        ),
    ),
)  # fmt: skip

_MISTRAL = (
    TemplateRow(
        "mistral_v1", " [INST] {} [/INST]", " {}{eos}", _DOCS_MISTRAL, system="{}\n\n", merged=True,
        aliases=("mixtral",), start="{bos}", prompt="",
    ),
    TemplateRow(
        "mistral", "[INST] {}[/INST]", " {}{eos}", _DOCS_MISTRAL, system="{}\n\n", merged=True, start="{bos}",
        aliases=("mistral_v3", "mistral_v2", "mistral_v2v3"), prompt="", tokens=("[INST]", "[/INST]"),
    ),
    TemplateRow(
        "mistral_v3_tekken", "[INST]{}[/INST]", "{}{eos}", _DOCS_MISTRAL, system="{}\n\n", merged=True,
        aliases=("ministral", "mistral_nemo", "pixtral"), start="{bos}", tokens=("[INST]", "[/INST]"),
    ),
    TemplateRow(
        "mistral_v7", "[INST] {}[/INST]", " {}{eos}", _DOCS_MISTRAL, system="[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]",
        start="{bos}", prompt="", tokens=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    TemplateRow(
        "mistral_v7_tekken", "[INST]{}[/INST]", "{}{eos}", _DOCS_MISTRAL,
        system="[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]", aliases=("mistral_small",), start="{bos}",
        tokens=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    TemplateRow(
        "breeze", "[INST] {} [/INST] ", "{}{eos}", "MediaTek-Research/Breeze-7B-Instruct-v1_0", system="{} ",
        start="{bos}", trim="all",
    ),
)  # fmt: skip

_DEEPSEEK = (
    TemplateRow(
        "deepseek", "User: {}\n\n", "Assistant: {}{eos}", "deepseek-ai/deepseek-llm-7b-chat", system="{}\n\n",
        start="{bos}", prompt="Assistant:",
    ),
    TemplateRow(
        "deepseek_v2", "<｜User｜>{}", "<｜Assistant｜>{}{eos}", "deepseek-ai/DeepSeek-V2.5", system="{}\n\n",
        aliases=("deepseek2", "deepseek_v2.5"), start="{bos}", tokens=("<｜User｜>", "<｜Assistant｜>"),
    ),
    TemplateRow(
        "deepseek_v3", "<｜User｜>{}", "<｜Assistant｜>{}{eos}", "deepseek-ai/DeepSeek-V3", system="{}",
        aliases=("deepseek3",), start="{bos}", tokens=("<｜User｜>", "<｜Assistant｜>"),
    ),
    TemplateRow(
        "deepseek_r1", "<｜User｜>{}", "<｜Assistant｜>{}{eos}", "deepseek-ai/DeepSeek-R1", system="{}",
        aliases=("deepseekr1",), start="{bos}", tokens=("<｜User｜>", "<｜Assistant｜>"), thinking=True,
        prompt="<｜Assistant｜><think>\n",
    ),
    TemplateRow(
        "deepseek_coder", "### Instruction:\n{}\n", "### Response:\n{}\n<|EOT|>\n",
        "deepseek-ai/deepseek-coder-6.7b-instruct", system="{}", aliases=("deepseekcoder",), start="{bos}",
        tokens=("<|EOT|>",), end="<|EOT|>", prompt="### Response:",
        default_system=(
            "You are an AI programming assistant, utilizing the Deepseek Coder model, developed by Deepseek Company, "
            "and you only answer questions related to computer science. For politically sensitive questions, security "
            "and privacy issues, and other non-computer science questions, you will refuse to answer\n"
        ),
    ),
)  # fmt: skip

_OTHERS = (
    TemplateRow(
        "gemma", **_turns("<start_of_turn>ROLE\n{}<end_of_turn>\n", assistant="model", system=""), trim="turns",
        source="https://ai.google.dev/gemma/docs/core/prompt-structure", aliases=("gemma2",), start="{bos}",
        tokens=("<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>",
    ),
    TemplateRow(
        "gemma3", **{**_turns("<start_of_turn>ROLE\n{}<end_of_turn>\n", assistant="model"), "system": "{}\n\n"},
        merged=True, trim="turns", source="https://ai.google.dev/gemma/docs/core/prompt-structure",
        aliases=("gemma3n",), start="{bos}", tokens=("<start_of_turn>", "<end_of_turn>"), end="<end_of_turn>",
    ),
    TemplateRow(
        "phi3", **_turns("<|ROLE|>\n{}<|end|>\n"), source="microsoft/Phi-3.5-mini-instruct",
        aliases=("phi", "phi_35", "phi3.5"), tokens=("<|user|>", "<|assistant|>", "<|end|>"), end="<|end|>",
    ),
    TemplateRow(
        "phi_3", **_turns("<|ROLE|>\n{}<|end|>\n"), source="microsoft/Phi-3-mini-4k-instruct", start="{bos}",
        tokens=("<|user|>", "<|assistant|>", "<|end|>"), end="<|end|>",
    ),
    TemplateRow(
        "phi4_mini", **_turns("<|ROLE|>{}<|end|>"), source="microsoft/Phi-4-mini-instruct",
        tokens=("<|user|>", "<|assistant|>", "<|end|>"), end="<|end|>",
    ),
    TemplateRow(
        "starchat", **_turns("<|ROLE|>\n{}<|end|>\n"), source="HuggingFaceH4/starchat-beta", default_system="",
        tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), end="<|end|>",
    ),
    TemplateRow(
        "command_r",
        **_turns(
            "<|START_OF_TURN_TOKEN|><|ROLE_TOKEN|>{}<|END_OF_TURN_TOKEN|>", "USER", "CHATBOT", "SYSTEM"
        ),
        source="https://docs.cohere.com/docs/command-r-hf", aliases=("cohere", "aya"), start="{bos}", trim="turns",
        tokens=(
            "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
        ),
        end="<|END_OF_TURN_TOKEN|>",
    ),
    TemplateRow(
        "falcon", "User: {}\n", "Falcon: {}\n", "tiiuae/falcon-180B-chat", system="System: {}\n", prompt="Falcon:",
        last="{eos}",
    ),
    TemplateRow(
        "granite", **_turns("<|start_of_role|>ROLE<|end_of_role|>{}<|end_of_text|>\n"),
        source="ibm-granite/granite-3.1-8b-instruct", aliases=("granite3", "granite4"),
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"), end="<|end_of_text|>",
    ),
    TemplateRow(
        "glm4", **_turns("<|ROLE|>\n{}"), source="zai-org/glm-4-9b-chat-hf", start="[gMASK]<sop>",
        aliases=("glm4_0414",), tokens=("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"),
        prompt="<|assistant|>", last="{eos}",
    ),
    TemplateRow(
        "baichuan2", "<reserved_106>{}", "<reserved_107>{}", "baichuan-inc/Baichuan2-7B-Chat", system="{}",
        tokens=("<reserved_106>", "<reserved_107>"), last="{eos}",
    ),
    TemplateRow(
        "openchat", **_turns("GPT4 Correct ROLE: {}<|end_of_turn|>", "User", "Assistant", "System"),
        source="openchat/openchat_3.5", start="{bos}", tokens=("<|end_of_turn|>",), end="<|end_of_turn|>",
        prompt="GPT4 Correct Assistant:",
    ),
    TemplateRow(
        "orion", "Human: {}\n\n", "Assistant: {eos}{}{eos}", "OrionStarAI/Orion-14B-Chat", start="{bos}",
    ),
    TemplateRow(
        "xverse", "Human: {}\n\n", "Assistant: {}{eos}", "xverse/XVERSE-7B-Chat", prompt="Assistant: ",
    ),
    TemplateRow(
        "exaone", "[|user|]{}\n", "[|assistant|]{}[|endofturn|]\n", "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct",
        system="[|system|]{}[|endofturn|]\n", tokens=("[|endofturn|]",), end="[|endofturn|]", default_system="",
    ),
    TemplateRow(
        "nemotron", "<extra_id_1>User\n{}\n", "<extra_id_1>Assistant\n{}\n", "nvidia/Nemotron-Mini-4B-Instruct",
        system="<extra_id_0>System\n{}\n", tokens=("<extra_id_0>", "<extra_id_1>"), default_system="", last="\n{eos}",
    ),
    TemplateRow(
        "jamba", **_turns("<|bom|><|ROLE|> {}<|eom|>"), source="ai21labs/AI21-Jamba-Mini-1.5", start="{bos}",
        tokens=("<|bom|>", "<|eom|>", "<|user|>", "<|assistant|>", "<|system|>"), end="<|eom|>",
        prompt="<|bom|><|assistant|>", default_system="",
    ),
    TemplateRow(
        "minicpm", "<用户>{}", "<AI>{}", "openbmb/MiniCPM-2B-sft-bf16", aliases=("cpm",), trim="all", last="{eos}",
    ),
    TemplateRow(
        "seed_oss", **_turns("{bos}ROLE\n{}{eos}"), source="ByteDance-Seed/Seed-OSS-36B-Instruct",
    ),
    TemplateRow(
        "bailing", **_turns("<role>ROLE</role>{}", "HUMAN", "ASSISTANT", "SYSTEM"), source="inclusionAI/Ling-lite",
        aliases=("ling",), tokens=("<role>", "</role>"), last="{eos}",
    ),
    TemplateRow(
        "ernie_nothink", "User: {}\n", "Assistant: {}<|end_of_sentence|>", "baidu/ERNIE-4.5-0.3B-PT", system="{}\n",
        aliases=("ernie4_5",), start="<|begin_of_sentence|>", tokens=("<|begin_of_sentence|>", "<|end_of_sentence|>"),
        end="<|end_of_sentence|>",
    ),
    TemplateRow(
        "yuan", "{}<sep>", "{}<eod>\n", "IEITYuan/Yuan2-2B-hf", tokens=("<sep>", "<eod>"), end="<eod>",
    ),
)  # fmt: skip

TEMPLATES: tuple[TemplateRow, ...] = (*_CHATML, *_LLAMA, *_MISTRAL, *_DEEPSEEK, *_OTHERS)

# Formats that a base model's vocabulary may stand for, most specific first. Their tokens occur in no other vocabulary.
_BY_VOCABULARY = (
    "phi4",
    "chatml",
    "llama3",
    "llama4",
    "gemma3",
    "granite",
    "deepseek_v3",
    "command_r",
    "jamba",
)


@cache
def template_names() -> dict[str, TemplateRow]:
    """Every name and alias, with its row."""
    return {name: row for row in TEMPLATES for name in row.names}


def find_template(name: str) -> TemplateRow | None:
    """The row of a name or alias; None if there is none."""
    return template_names().get(name)


def template_for(vocabulary: Iterable[str]) -> TemplateRow | None:
    """The format whose tokens a vocabulary has; None if there is none."""
    known = set(vocabulary)
    rows = map(template_names().__getitem__, _BY_VOCABULARY)
    return next((row for row in rows if known.issuperset(row.tokens)), None)
