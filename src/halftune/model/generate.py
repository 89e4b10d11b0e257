"""Answers a conversation under the plan that the model was trained with: same dtypes, same autocast, same guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from halftune.config.sections.generation import GenerationSection
from halftune.core.errors import ModelError
from halftune.core.time_limit import OutOfTime, cpu_limit
from halftune.model.damage import TEMPLATE_FAULTS, first_line
from halftune.model.tokenizer import end_of_turn_ids
from halftune.model.vocabulary import check_ids
from halftune.plan import Plan
from halftune.precision.dtypes import autocast

_SECONDS = 30  # of CPU time for rendering one conversation

OnText = Callable[[str], None]


def generate_reply(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    generation: GenerationSection,
    plan: Plan,
    on_text: OnText | None = None,
    template_variables: Mapping[str, Any] | None = None,
    sharded: torch.device | None = None,
) -> str:
    """The answer to ``messages``, without its control tokens.

    A tokenizer without a chat template continues the last message's text as it stands. The model is in evaluation mode
    meanwhile and back in its own mode afterwards, also after an interrupt; adapters are as the caller left them.

    Args:
        model: on its device, a peft model or a transformers one.
        tokenizer: its tokenizer.
        messages: OpenAI's form, ending with the user's.
        generation: how to decode; the checkpoint's own generation config has no say but for its stop tokens.
        plan: gives autocast.
        on_text: called with each new piece of text as it comes.
        template_variables: what the chat template is told besides the messages (``model.chat_template_kwargs``).
        sharded: where processes compute that each hold a share of the weights. All of them call this with the same
            arguments and random state, and none leaves before the others have their answer.

    Raises:
        ModelError: the template refuses the conversation, no token is left of it, or it is longer than the context.
    """
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    prompt = _prompt(tokenizer, messages, template_variables or {})
    if not prompt:
        raise ModelError("the tokenizer makes no token of it", where=str(tokenizer.name_or_path))
    check_ids(causal, tokenizer, [prompt], "the conversation")
    device = sharded or causal.device  # shards may lie in main memory
    prompt_1T = torch.tensor([prompt], device=device)
    length = prompt_1T.shape[1]
    limit = getattr(causal.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length >= limit:
        what = f"the conversation is {length:,} tokens, the model takes {limit:,}"
        raise ModelError(what, remedy="start a new one (/reset in chat)")
    room = generation.max_new_tokens if limit is None else min(generation.max_new_tokens, limit - length)
    settings = _settings(generation, tokenizer, causal.generation_config, room)
    pieces = _Pieces(tokenizer, length, on_text)
    # weights that are gathered in inference mode could not be trained afterwards
    without_graph = torch.inference_mode() if sharded is None else torch.no_grad()
    with _answering(causal, settings), without_graph, autocast(plan.precision, device):
        answer_1S = causal.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            generation_config=settings,
            streamer=pieces if on_text is not None else None,
            synced_gpus=sharded is not None,
        )
    return str(tokenizer.decode(answer_1S[0, length:], skip_special_tokens=True)).strip()


def _prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(str(messages[-1]["content"]))["input_ids"])
    try:
        with cpu_limit(_SECONDS):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables))
    except (*TEMPLATE_FAULTS, OutOfTime) as error:
        what = f"the chat template refuses the conversation: {first_line(error)}"
        raise ModelError(what, where=str(tokenizer.name_or_path), remedy="see model.chat_template") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _settings(
    generation: GenerationSection, tokenizer: PreTrainedTokenizerBase, own: GenerationConfig, room: int
) -> GenerationConfig:
    stops = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = sorted({token for token in (*stops, *end_of_turn_ids(tokenizer)) if token is not None})
    sampling: dict[str, Any] = {}
    if generation.temperature > 0:
        sampling = {"temperature": generation.temperature, "top_p": generation.top_p, "top_k": generation.top_k}
    return GenerationConfig(
        max_new_tokens=room,
        do_sample=bool(sampling),
        repetition_penalty=generation.repetition_penalty,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **sampling,
    )


@contextmanager
def _answering(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Evaluation mode, and our decoding settings in place of the checkpoint's, which would fill in what ours leave."""
    training, own = [module for module in model.modules() if module.training], model.generation_config
    model.eval()
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own
        for module in training:
            module.training = True


class _Pieces(BaseStreamer):
    """Hands on text as tokens come, holding back white space at the end and what is not whole characters yet."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, on_text: OnText | None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._waiting = prompt_length
        self._tokens: list[int] = []
        self._given = ""

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate`` with the prompt first, then with each new token."""
        tokens = value.flatten().tolist()
        if self._waiting:
            self._waiting = 0
            return
        self._tokens += tokens
        self._give(final=False)

    def end(self) -> None:
        """Called by ``generate`` once, after the last token."""
        self._give(final=True)

    def _give(self, *, final: bool) -> None:
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).strip()
        if self._on_text is None or (text.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return
        new = text[len(self._given) :]
        if new:
            self._given += new
            self._on_text(new)
