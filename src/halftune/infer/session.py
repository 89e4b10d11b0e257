"""A conversation with a run's result, with the dtypes of training; its base model can answer instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from halftune.config.sections.training import GenerationSection
from halftune.model.adapters import load_adapter
from halftune.model.completed_run import CompletedRun
from halftune.model.device import device_of
from halftune.model.generate import OnText, generate_reply
from halftune.model.identity import check_base
from halftune.model.load import load_model
from halftune.model.result import base_of_result
from halftune.model.tokenizer import load_tokenizer
from halftune.precision.report import check_dtypes


@dataclass
class ChatSession:
    """A conversation. ``history`` excludes the system prompt.

    Attributes:
        run: the finished run.
        generation: decoding settings.
        model: base with adapter, or the full model, on its device.
        tokenizer: the run's tokenizer.
        tuned: whether to use the trained model (adapter enabled) instead of the base model.
        system: system prompt; empty for none.
    """

    run: CompletedRun
    generation: GenerationSection
    model: Any
    tokenizer: PreTrainedTokenizerBase
    tuned: bool = True
    system: str = ""
    history: list[dict[str, str]] = field(default_factory=list)
    _base: Any = None

    def messages(self, text: str) -> list[dict[str, str]]:
        """Return the conversation with the user's next message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, {"role": "user", "content": text}]

    def answer(self, text: str, *, tuned: bool, on_text: OnText | None = None) -> str:
        """Return the answer to ``text`` in this conversation, without recording it."""
        return self.reply(self.messages(text), tuned=tuned, on_text=on_text)

    def reply(self, messages: list[dict[str, str]], *, tuned: bool, on_text: OnText | None = None) -> str:
        """Return the answer to ``messages``, independent of this conversation."""
        if tuned:
            return self._generate(self.model, messages, on_text)
        if isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                return self._generate(self.model, messages, on_text)
        if self._base is None:  # a full model's base is a second model, loaded on first use
            self._base = _load(self.run, base=True)
        return self._generate(self._base, messages, on_text)

    def record(self, text: str, answer: str) -> None:
        """Add an exchange to the conversation."""
        self.history += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _generate(self, model: Any, messages: list[dict[str, str]], on_text: OnText | None) -> str:
        variables = self.run.loaded.run.model.chat_template_kwargs
        return generate_reply(
            model, self.tokenizer, messages, self.generation, self.run.plan, on_text, template_variables=variables
        )


def open_session(run: CompletedRun) -> ChatSession:
    """Load a run's result with the plan's dtypes, and check them.

    Raises:
        HalftuneError: the model cannot be loaded as planned.
    """
    tokenizer = load_tokenizer(run.result)
    return ChatSession(run, run.loaded.run.generation, _load(run, base=False), tokenizer)


def _load(run: CompletedRun, *, base: bool) -> Any:
    if base or run.is_adapter:
        check_base(base_of_result(run.final), run.loaded.run.model, allowed=run.any_base)
    model: Any = load_model(run.loaded.run.model if base else run.result, run.plan, for_training=False)
    if run.is_adapter:
        model = load_adapter(model, run.final, run.plan)
    check_dtypes(model, run.plan.precision)
    return model.to(device_of(run.plan))
