"""A conversation with a run's result, with the dtypes of training; its base model can answer instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from halftune.config.facts.media import DATA_KEYS
from halftune.config.sections.training import GenerationSection
from halftune.core.errors import ModelError
from halftune.model.adapters import load_adapter
from halftune.model.files.identity import check_base
from halftune.model.files.locate import locate
from halftune.model.files.result import base_of_result
from halftune.model.generate import OnText, generate_reply
from halftune.model.load.device import device_of
from halftune.model.load.load import load_model
from halftune.model.result.completed_run import CompletedRun
from halftune.model.tokenizer.tokenizer import load_tokenizer
from halftune.precision.report import check_dtypes

if TYPE_CHECKING:
    from halftune.data.media.processor import MediaProcessor
    from halftune.data.media.reference import MediaRef


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
        images: the model's processor; None if it was trained on text alone.
        attached: images and sounds of the next message.
    """

    run: CompletedRun
    generation: GenerationSection
    model: Any
    tokenizer: PreTrainedTokenizerBase
    tuned: bool = True
    system: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    images: MediaProcessor | None = None
    attached: list[MediaRef] = field(default_factory=list)
    _base: Any = None

    def attach(self, path: str, kind: str = "image") -> MediaRef:
        """Adds an image, a video or a sound to the next message.

        Args:
            path: of a file.
            kind: ``image``, ``video`` or ``audio``.

        Raises:
            ModelError: see :meth:`media`.
        """
        file = Path(path).expanduser().absolute()
        self.attached.append(self.media(file.name, file.parent, kind))
        return self.attached[-1]

    def media(self, given: str, folder: Path | None = None, kind: str = "image") -> MediaRef:
        """The reference of an image, a video or a sound.

        Args:
            given: a data URL, or a path in ``folder``.
            folder: None: paths are refused.
            kind: ``image``, ``video`` or ``audio``.

        Raises:
            ModelError: it cannot be read, or the model was not trained on its kind.
        """
        if self.images is None or kind not in self.images.settings.kinds:
            what, remedy = f"the model was not trained with {kind}", f"train it with {DATA_KEYS[kind]}: true"
            raise ModelError(what, remedy=remedy, code="infer.bad_image")
        from halftune.data.media.reference import BadMedia, refer  # few conversations have images

        try:
            return refer(given, folder, kind)
        except BadMedia as error:
            raise ModelError(str(error), remedy="use another file", code="infer.bad_image") from error

    def messages(self, text: str) -> list[dict[str, Any]]:
        """Return the conversation with the user's next message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, {"role": "user", "content": self._content(text)}]

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        media = [{"type": one.kind, "ref": one} for one in self.attached]
        return [*media, {"type": "text", "text": text}] if media else text

    def answer(self, text: str, *, tuned: bool, on_text: OnText | None = None) -> str:
        """Return the answer to ``text`` in this conversation, without recording it."""
        return self.reply(self.messages(text), tuned=tuned, on_text=on_text)

    def reply(self, messages: list[dict[str, Any]], *, tuned: bool, on_text: OnText | None = None) -> str:
        """Return the answer to ``messages``, independent of this conversation."""
        if tuned:
            return self._generate(self.model, messages, on_text)
        if isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                return self._generate(self.model, messages, on_text)
        if self._base is None:  # a full model's base is a second model, loaded on first use
            self._base = load_weights(self.run, base=True)
        return self._generate(self._base, messages, on_text)

    def record(self, text: str, answer: str) -> None:
        """Add an exchange to the conversation, with the attached images."""
        self.history += [{"role": "user", "content": self._content(text)}, {"role": "assistant", "content": answer}]
        self.attached = []

    def _generate(self, model: Any, messages: list[dict[str, Any]], on_text: OnText | None) -> str:
        return generate_reply(
            model,
            self.tokenizer,
            messages,
            self.generation,
            self.run.plan,
            on_text,
            template_variables=self.run.loaded.run.model.chat_template_kwargs,
            images=self.images,
        )


def open_session(run: CompletedRun) -> ChatSession:
    """Load a run's result with the plan's dtypes, and check them.

    Raises:
        HalftuneError: the model cannot be loaded as planned.
    """
    tokenizer, config = load_tokenizer(run.result), run.loaded.run
    session = ChatSession(run, config.generation, load_weights(run, base=False), tokenizer)
    if config.data.media:
        from halftune.data.media.processor import MediaProcessor, media_settings  # few runs have images

        folder = locate(config.model if run.is_adapter else run.result)
        session.images = MediaProcessor(media_settings(config, folder), tokenizer)
    return session


def load_weights(run: CompletedRun, *, base: bool) -> Any:
    """Load a run's result, or its base model, on the plan's device, and check the dtypes.

    Raises:
        HalftuneError: the model cannot be loaded as planned, or the base is not that of training.
    """
    if base or run.is_adapter:
        check_base(base_of_result(run.final), run.loaded.run.model, allowed=run.any_base)
    model: Any = load_model(run.loaded.run.model if base else run.result, run.plan, for_training=False)
    if run.is_adapter:
        model = load_adapter(model, run.final, run.plan)
    check_dtypes(model, run.plan.precision)
    return model.to(device_of(run.plan))
