"""Generates replies under the training plan: same dtypes, autocast and guard."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ModelError
from halftune.core.processes.time_limit import Limits, OutOfTime
from halftune.model.files.load_errors import TEMPLATE_ERRORS, first_line
from halftune.model.tokenizer.tokenizer import end_of_turn_ids
from halftune.model.tokenizer.vocabulary import check_ids
from halftune.plan import Plan
from halftune.precision.dtypes import autocast

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaProcessor
    from halftune.data.media.reference import MediaRef

_SECONDS, _MEMORY = 30, 1 << 30  # CPU time and bytes for rendering one conversation

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
    images: MediaProcessor | None = None,
) -> str:
    """Generate the reply to ``messages``, without control tokens.

    Without a chat template the last message's text is continued. The model is in evaluation mode during generation;
    its mode is restored afterwards, also after an interrupt. Adapters are not changed.

    Args:
        model: on its device, a peft model or a transformers one.
        tokenizer: its tokenizer.
        messages: OpenAI format, the user's message last; images, videos and sounds are parts with a reference ``ref``.
        generation: decoding settings; of the checkpoint's generation config only stop tokens are used.
        plan: gives autocast.
        on_text: called with each new piece of text as it comes.
        template_variables: further variables of the chat template (``model.chat_template_kwargs``).
        sharded: compute device of sharded weights. All processes must call this with the same arguments and random
            state; they return together.
        images: the model's processor, if messages have images.

    Raises:
        ModelError: the template rejects the conversation, the prompt is empty, it exceeds the context length, or the
            logits are not finite.
    """
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    device = sharded or causal.device  # shards may be offloaded to main memory
    prompt_1T, seen = conversation_inputs(causal, tokenizer, messages, template_variables or {}, images, device)
    length = prompt_1T.shape[1]
    room = min(generation.max_new_tokens, _room(causal, length))
    settings = _settings(generation, tokenizer, causal.generation_config, room)
    pieces = _Pieces(tokenizer, length, on_text)
    # in inference mode, weights are gathered as ones that cannot be trained, and torchao's tensors have no views
    no_views = sharded is not None or plan.precision.trains_in_float8
    without_graph = torch.no_grad() if no_views else torch.inference_mode()
    with decoding(causal, settings), without_graph, autocast(plan.precision, device):
        answer_1S = causal.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            **seen,
            generation_config=settings,
            logits_processor=LogitsProcessorList([Finite()]),
            streamer=pieces if on_text is not None else None,
            synced_gpus=sharded is not None,
        )
    return str(tokenizer.decode(answer_1S[0, length:], skip_special_tokens=True)).strip()


def conversation_inputs(
    causal: Any,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    images: MediaProcessor | None,
    device: torch.device,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The prompt of a conversation, int64 ``[1, T]``, and the forward pass's arguments for its images.

    Args:
        causal: the model, without peft.
        tokenizer: its tokenizer.
        messages: as of `generate_reply`.
        variables: further variables of the chat template.
        images: the model's processor, if messages have images.
        device: of the tensors.

    Raises:
        ModelError: as `generate_reply`, except for the context length.
    """
    refs = [part["ref"] for one in messages if isinstance(one["content"], list) for part in one["content"] if
            part["type"] in ("image", "video", "audio")]  # fmt: skip
    prompt = _prompt(tokenizer, messages, variables, partial(_with_images, images, refs))
    if not prompt:
        what = "the prompt has no tokens"
        raise ModelError(what, where=str(tokenizer.name_or_path), code="infer.no_prompt")
    check_ids(causal, tokenizer, [prompt], "the conversation")
    prompt_1T = torch.tensor([prompt], device=device)
    seen = _image_inputs(images, refs, prompt_1T, causal.dtype) if images is not None and refs else {}
    return prompt_1T, seen


def context_length(causal: Any) -> int | None:
    """Tokens of the longest sequence; None if the model's config names no limit."""
    return getattr(causal.config.get_text_config(), "max_position_embeddings", None)


def _room(causal: Any, length: int) -> int:
    """Tokens that fit behind a prompt of ``length``."""
    limit = context_length(causal)
    if limit is not None and length >= limit:
        what = f"the conversation has {length:,} tokens; the model's limit is {limit:,}"
        raise ModelError(what, remedy="start a new conversation (/reset in chat)", code="infer.conversation_too_long")
    return sys.maxsize if limit is None else limit - length


def _prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    expand: Callable[[str], str],
) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(str(messages[-1]["content"]))["input_ids"])
    try:
        with Limits(_SECONDS, _MEMORY):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables))
    except (*TEMPLATE_ERRORS, OutOfTime) as error:
        what = f"rejected by the chat template: {first_line(error)}"
        raise ModelError(
            what,
            where=str(tokenizer.name_or_path),
            remedy="see model.chat_template",
            code="model.chat_template_invalid",
        ) from error
    return list(tokenizer(expand(text), add_special_tokens=False)["input_ids"])


def _with_images(images: MediaProcessor | None, refs: Sequence[MediaRef], text: str) -> str:
    if not refs:
        return text
    assert images is not None
    from halftune.data.media.reference import BadMedia  # few conversations have images

    try:
        written = images.write(text, refs)
    except BadMedia as error:
        raise ModelError(str(error), remedy="use another file", code="infer.bad_image") from error
    if written is None:
        token = images.token_of(refs[0])
        what = f"the conversation has not one {token} for each of its images, videos and sounds"
        raise ModelError(what, remedy=f"write no {token}, or /reset", code="infer.bad_image")
    return written


def _image_inputs(
    images: MediaProcessor, refs: Sequence[MediaRef], prompt_1T: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The forward pass's arguments for images, on the prompt's device."""
    from halftune.data.media.reference import BadMedia

    try:
        made = images.inputs([refs])
    except BadMedia as error:
        raise ModelError(str(error), remedy="use another file, or /reset", code="infer.bad_image") from error
    made |= images.token_types(prompt_1T)
    return {  # seconds of videos, which have one axis, become positions: they stay fp32
        name: (one.to(dtype) if one.is_floating_point() and one.ndim > 1 else one).to(prompt_1T.device)
        for name, one in made.items()
    }


def ending_ids(tokenizer: PreTrainedTokenizerBase, own: GenerationConfig) -> list[int]:
    """Tokens that end an answer: those of the checkpoint's generation config, and the template's ends of turns."""
    stops = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    return sorted({token for token in (*stops, *end_of_turn_ids(tokenizer)) if token is not None})


def _settings(
    generation: GenerationSection, tokenizer: PreTrainedTokenizerBase, own: GenerationConfig, room: int
) -> GenerationConfig:
    ends = ending_ids(tokenizer, own)
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


def generate_answers(
    causal: Any,
    prompts: Sequence[np.ndarray],
    *,
    ends: Sequence[int],
    most: int,
    pad: int,
    device: torch.device | None = None,
    processors: Sequence[LogitsProcessor] | None = None,
    synced: bool = False,
    inputs: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] | None = None,
) -> list[np.ndarray]:
    """Generate one answer to each prompt, all at once: int32, with the token that ends it.

    Args:
        causal: a transformers model; the caller opens autocast.
        prompts: token ids, int32.
        ends: tokens that end an answer.
        most: tokens of an answer.
        pad: id of padding, which is masked.
        device: that the model computes on; default the model's.
        processors: of logits; the likeliest token is taken. Default: logits that are not finite are refused.
        synced: weights are sharded: a process that is done computes on until all are.
        inputs: makes further arguments of the forward pass, as pixels, from the padded token ids int64 ``[N, T]``.

    Raises:
        ModelError: the logits are not finite.
    """
    longest, device = max(map(len, prompts)), device or causal.device
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: answers begin in the same column
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    settings = GenerationConfig(
        max_new_tokens=most, do_sample=False, eos_token_id=list(ends) or None, pad_token_id=pad, use_cache=True
    )
    more = {} if inputs is None else {name: one.to(device) for name, one in inputs(ids).items()}
    with decoding(causal, settings), torch.no_grad():
        made = causal.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            **more,
            generation_config=settings,
            logits_processor=LogitsProcessorList([Finite()] if processors is None else processors),
            synced_gpus=synced,
        )
    return [until_end(row, ends) for row in made[:, longest:].cpu().numpy()]


def until_end(answer: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """An answer up to the first token that ends it, which is kept: int32."""
    found = np.flatnonzero(np.isin(answer, list(ends)))
    return answer[: found[0] + 1 if len(found) else len(answer)].astype(np.int32)


@contextmanager
def decoding(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Inside, evaluation mode and our decoding settings; the checkpoint's would fill in unset ones."""
    own = model.generation_config
    model.generation_config = settings
    try:
        with evaluating(model):
            yield
    finally:
        model.generation_config = own


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; each module's own mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Finite(LogitsProcessor):
    """Refuses NaN and +inf, from which greedy decoding would take some token; -inf excludes a token on purpose."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not (scores < float("inf")).all():  # false for NaN, too
            what = "the model's logits are not finite"
            remedy = "copy or download its weights again; in fp16, try precision=fp32"
            raise ModelError(what, remedy=remedy, code="infer.non_finite")
        return scores


class _Pieces(BaseStreamer):
    """Streams text as tokens arrive, except trailing white space and incomplete characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, on_text: OnText | None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._in_prompt = prompt_length
        self._tokens: list[int] = []
        self._emitted = ""

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate`` with the prompt first, then with each new token."""
        tokens = value.flatten().tolist()
        if self._in_prompt:
            self._in_prompt = 0
            return
        self._tokens += tokens
        self._emit(final=False)

    def end(self) -> None:
        """Called by ``generate`` once, after the last token."""
        self._emit(final=True)

    def _emit(self, *, final: bool) -> None:
        text = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).strip()
        if self._on_text is None or (text.endswith("\N{REPLACEMENT CHARACTER}") and not final):
            return
        new = text[len(self._emitted) :]
        if new:
            self._emitted += new
            self._on_text(new)
