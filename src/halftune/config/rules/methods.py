"""Rules between keys of the method, of its rows, of its loss and of its server, and of rows that are streamed."""

from __future__ import annotations

from collections.abc import Iterator

from halftune.config.rules.rule import Context, Violation, rule
from halftune.config.run import RunConfig
from halftune.config.sections.data import StreamingSection
from halftune.config.sections.method import (
    ConversationMethod,
    DistillMethod,
    DpoMethod,
    GrpoMethod,
    MethodSection,
    PretrainMethod,
    SftMethod,
)
from halftune.config.sections.model import LoraAdapter
from halftune.config.sections.training import TrainingSection

STREAMED = ("sft", "pretrain")


@rule("config.no_effect", "method")
def labels_of_own_texts(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Keys of labels that another one overrules."""
    method = run.method
    if not isinstance(method, ConversationMethod):
        return
    if method.labels == "text" and method.train_on == "all":
        what = "text has no effect with train_on: all, which labels the whole conversation"
        yield Violation(("method", "labels"), what, "remove it, or set train_on: assistant")
    if method.labels == "text" and method.train_line_break:
        what = "has no effect with labels: text, which labels no line break of the template"
        yield Violation(("method", "train_line_break"), what, "remove it, or set labels: turn")
    if method.label_ends and method.labels == "turn":
        what = "has no effect with labels: turn, which labels every end-of-turn token"
        yield Violation(("method", "label_ends"), what, "remove it, or set labels: text")


@rule(
    "config.keys_conflict",
    "method",
    "adapter.type",
    "adapter.rank",
    "adapter.init",
    "adapter.use_dora",
    "adapter.modules_to_save",
    "model.tokens.add",
)
def servers_load_adapters(run: RunConfig, context: Context) -> Iterator[Violation]:
    """A server receives a LoRA adapter that vLLM can load."""
    key, adapter = ("method", "server"), run.adapter
    if not isinstance(run.method, GrpoMethod) or run.method.server is None:
        return
    if not isinstance(adapter, LoraAdapter):
        what = "the server receives the weights as a LoRA adapter"
        yield Violation(key, what, "set adapter: lora, or remove the key")
        return
    refused = {
        "adapter.use_dora": adapter.use_dora,
        "adapter.modules_to_save": adapter.modules_to_save,
        "model.tokens.add": run.model.tokens.add,
    }
    if adapter.saved_rank > (most := run.method.server.ranks[-1]):
        what = f"must be at most {most} where a vLLM server samples; with init: pissa or olora, half of it"
        yield Violation(("adapter", "rank"), what, "lower it, or remove method.server")
    for name, given in refused.items():
        if given:
            yield Violation(key, f"conflicts with {name}: vLLM does not load such adapters", "remove one of the two")


@rule("config.no_effect", "training.label_smoothing", "training.router_aux_loss_coef", "method.type")
def parts_of_the_cross_entropy(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Only the cross-entropy of tokens has labels to smooth, and the routers' loss beside it."""
    method = run.method
    weighted = method.loss if isinstance(method, SftMethod) and method.loss != "nll" else ""
    if method.type in ("sft", "pretrain") and not weighted:
        return
    what = f"has no effect with loss: {weighted}" if weighted else f"has no effect with method: {method.type}"
    for key in filter(lambda key: getattr(run.training, key), ("label_smoothing", "router_aux_loss_coef")):
        yield Violation(("training", key), what, "remove it, or use method: sft")


@rule("config.no_effect", "method")
def options_are_the_losses(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Options of one loss have no effect with others."""
    method = run.method
    if isinstance(method, SftMethod) and method.loss != "eaft":
        for key in ("eaft_alpha", "eaft_tokens", "eaft_scale"):
            if getattr(method, key) != SftMethod.model_fields[key].default:
                yield Violation(("method", key), f"has no effect with loss: {method.loss}", "set loss: eaft")
    if isinstance(method, DistillMethod) and method.sft_loss != "nll" and not method.sft_weight:
        yield Violation(("method", "sft_loss"), "has no effect without sft_weight", "set method.sft_weight")


@rule("config.no_effect", "method.type", "method.loss", "method.label_smoothing")
def smoothing_fits_the_loss(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Label smoothing is a part of three of DPO's losses, and exo_pair does not exist without it."""
    if not isinstance(run.method, DpoMethod):
        return
    key, loss, smoothing = ("method", "label_smoothing"), run.method.loss, run.method.label_smoothing
    if smoothing and loss not in ("sigmoid", "robust", "exo_pair"):
        yield Violation(key, f"has no effect with loss: {loss}", "remove it")
    if not smoothing and loss == "exo_pair":
        what = "must be above 0 with loss: exo_pair"
        yield Violation(key, what, "set it to 0.001", code="config.invalid_value")


# Row formats → the records that they hold, and why a method on others refuses them: what, remedy, code.
_ROWS = {
    "preference": ("preference", "{} does not support pairs of answers", "use method: dpo", "data.preference_pairs"),
    "rated": ("rated", "{} does not support rated answers", "use method: kto", "data.rated_answers"),
    "prompt": ("prompt", "{} requires answers, and prompts have none", "use method: grpo", "data.unknown_format"),
    "text": (
        "document",
        "method: sft requires answers; plain text has none",
        "use method: pretrain",
        "data.text_without_answers",
    ),
}


def _unfit(method: MethodSection, form: str) -> tuple[str, str, str] | None:
    """Why a method cannot train on rows of a format: what, remedy, code; None if it can."""
    name, rows = f"method: {method.type}", method.records[0]
    held, what, remedy, code = _ROWS.get(form, ("conversation", "", "", ""))
    if form == "auto" or held == rows:
        return None
    if rows == "preference":
        what = f"{form} rows have one answer, but method: {method.type} requires pairs"
        return what, "use format: preference, or method: sft", "data.preference_pairs"
    if rows == "rated":
        return f"{name} requires rated answers, not {form} rows", "use format: rated", "data.rated_answers"
    return (what.format(name), remedy, code) if what else None


@rule("data.preference_pairs", "method.type", "data.train", "data.eval", "data.system")
def method_fits_formats(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Each method supports certain data formats."""
    for part in ("train", "eval"):
        for index, source in enumerate(getattr(run.data, part)):
            if found := _unfit(run.method, source.format):
                yield Violation(("data", part, index, "format"), *found)
    if isinstance(run.method, PretrainMethod) and run.data.system is not None:
        what, remedy = "has no effect with method: pretrain", "remove it, or use method: sft"
        yield Violation(("data", "system"), what, remedy, code="config.no_effect")


@rule("config.keys_conflict", "method.type", "data.deduplicate", "data.max_length", "training.tokens_per_batch")
def examples_are_what_is_counted(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Copies are found among examples; prompt and answer fit into a sample, and answers are not known beforehand."""
    name = f"method: {run.method.type}"
    if run.data.deduplicate and run.method.rows > 1:
        what = f"is not supported with {name}, whose examples are groups of rows"
        yield Violation(("data", "deduplicate"), what, "remove the copies from the file")
    if run.method.answer_tokens + 8 > run.data.max_length:
        what = f"leaves no room for a prompt in data.max_length ({run.data.max_length})"
        yield Violation(("method", "max_completion_length"), what, "raise data.max_length, or lower it")
    if run.method.samples_answers and run.training.tokens_per_batch is not None:
        what = f"is not supported with {name}, where the model answers"
        yield Violation(("training", "tokens_per_batch"), what, "set training.per_device_train_batch_size: prompts")


@rule("config.keys_conflict", "method", "data.packing", "data.images", "data.videos", "data.max_length")
def answers_are_whole_and_text(run: RunConfig, context: Context) -> Iterator[Violation]:
    """On-policy distillation replaces whole answers of text."""
    if isinstance(run.method, DistillMethod) and run.method.on_policy:
        for wrong, key in (
            (run.data.packing.split, "data.packing.split"),
            (run.data.media, "media in rows"),
        ):
            if wrong:
                yield Violation(("method", "on_policy"), f"is not supported with {key}", "remove one of them")
        if run.method.max_completion_length + 8 > run.data.max_length:
            what = f"leaves no room for a prompt in data.max_length ({run.data.max_length}): nothing would be answered"
            yield Violation(("method", "max_completion_length"), what, "raise data.max_length, or lower it")


@rule(
    "config.keys_conflict",
    "data.streaming",
    "data.eval",
    "training.max_steps",
    "training.num_train_epochs",
    "training.eval_steps",
    "training.save_steps",
)
def streams_have_no_epochs(run: RunConfig, context: Context) -> Iterator[Violation]:
    """The length of a run with streamed data, and its periods, are steps."""
    training = run.training
    if not run.data.streaming.enabled:
        if run.data.streaming != StreamingSection():
            key = ("data", "streaming", "buffer")
            yield Violation(key, "has no effect without streaming", "set enabled: true", code="config.no_effect")
        return
    if training.max_steps is None:
        what = "data.streaming has no epochs, so the run needs its number of steps"
        yield Violation(("training", "max_steps"), what, "set training.max_steps", code="config.missing_key")
    if training.num_train_epochs != TrainingSection.model_fields["num_train_epochs"].default:
        yield Violation(("training", "num_train_epochs"), "data.streaming has no epochs", "remove it")
    for key in ("save_steps", "eval_steps") if run.data.eval else ("save_steps",):
        if isinstance(value := getattr(training, key), str) and value != "end":
            remedy = f"set training.{key} to a number of steps, or a share of the run such as 0.1"
            yield Violation(("training", key), f"{value}: data.streaming has no epochs", remedy)


@rule(
    "config.keys_conflict",
    "data.streaming",
    "data.train",
    "data.eval_split",
    "data.deduplicate",
    "data.images",
    "data.videos",
    "data.audio",
    "method",
)
def streams_are_read_once(run: RunConfig, context: Context) -> Iterator[Violation]:
    """Streamed data has no number of rows, and no two rows are far apart in memory."""
    data = run.data
    if not data.streaming.enabled:
        return
    refused = {
        "eval_split": (data.eval_split, "use data.eval with a file of its own"),
        "deduplicate": (data.deduplicate, "remove the copies from the files"),
        "images": (data.images, "remove one of them"),
        "videos": (data.videos, "remove one of them"),
        "audio": (data.audio, "remove one of them"),
    }
    for key, (given, remedy) in refused.items():
        if given:
            yield Violation(("data", key), "does not go with data.streaming, which never sees all rows", remedy)
    for index, source in enumerate(data.train):
        if source.samples is not None:
            what = "needs the number of rows, which data.streaming does not know"
            yield Violation(("data", "train", index, "samples"), what, "remove it, or set weight")
    if run.method.type not in STREAMED:
        what = f"does not stream data; {' and '.join(STREAMED)} do"
        yield Violation(("method", "type"), what, "set data.streaming: false")
