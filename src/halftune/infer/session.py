"""A conversation with a run's result, under the plan it was trained with; its base model can answer instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from halftune.config.sections.generation import GenerationSection
from halftune.model.adapters.attach import load_adapter
from halftune.model.finished import FinishedRun
from halftune.model.generate import OnText, generate_reply
from halftune.model.load import load_model
from halftune.model.place import device_of
from halftune.model.tokenizer import load_tokenizer
from halftune.precision.report import check_dtypes


@dataclass
class ChatSession:
    """A conversation. ``history`` is what both have said; the system prompt stands apart.

    Attributes:
        run: what is talked to.
        generation: how answers are decoded.
        model: base with adapter, or the full model, on its device.
        tokenizer: the run's.
        tuned: whether the training shows: adapter on, or the trained model rather than its base.
        system: system prompt, empty for none.
    """

    run: FinishedRun
    generation: GenerationSection
    model: Any
    tokenizer: PreTrainedTokenizerBase
    tuned: bool = True
    system: str = ""
    history: list[dict[str, str]] = field(default_factory=list)
    _base: Any = None

    def messages(self, text: str) -> list[dict[str, str]]:
        """The conversation so far with the user's next message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, {"role": "user", "content": text}]

    def answer(self, text: str, *, tuned: bool, on_text: OnText | None = None) -> str:
        """The answer to ``text`` after the conversation so far, which stays as it is."""
        return self.reply(self.messages(text), tuned=tuned, on_text=on_text)

    def reply(self, messages: list[dict[str, str]], *, tuned: bool, on_text: OnText | None = None) -> str:
        """The answer to any conversation, whatever this one has been."""
        if tuned:
            return self._generate(self.model, messages, on_text)
        if isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                return self._generate(self.model, messages, on_text)
        if self._base is None:  # a full model's base is a second model: loaded when it is first asked
            self._base = _load(self.run, base=True)
        return self._generate(self._base, messages, on_text)

    def record(self, text: str, answer: str) -> None:
        """Adds an exchange to the conversation."""
        self.history += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def _generate(self, model: Any, messages: list[dict[str, str]], on_text: OnText | None) -> str:
        variables = self.run.loaded.run.model.chat_template_kwargs
        return generate_reply(
            model, self.tokenizer, messages, self.generation, self.run.plan, on_text, template_variables=variables
        )


def open_session(run: FinishedRun) -> ChatSession:
    """Loads a run's result with the plan's dtypes, and checks them.

    Raises:
        HalftuneError: the model does not load as planned.
    """
    tokenizer = load_tokenizer(run.result)
    return ChatSession(run, run.loaded.run.generation, _load(run, base=False), tokenizer)


def _load(run: FinishedRun, *, base: bool) -> Any:
    model: Any = load_model(run.loaded.run.model if base else run.result, run.plan, for_training=False)
    if run.is_adapter:
        model = load_adapter(model, run.final, run.plan)
    check_dtypes(model, run.plan.precision)
    return model.to(device_of(run.plan))
