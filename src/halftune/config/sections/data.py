"""The ``data`` section: sources, lengths, packing. Also the names of the builtin data sets."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from halftune.config.sections import LISTED, Flag, InputPath, Int, Number, Section

BUILTIN_DATA: dict[str, str] = {
    "stdlib-text": "plain text: docstrings and sources of this Python's standard library, a few megabytes",
    "python-docs": "about 1,500 questions and answers on Python's standard library",
    "number-formats": "questions and answers on number formats and GPUs, each fact in several wordings",
    "number-formats-test": "the same facts asked in wordings that number-formats does not have",
    "number-formats-text": "the same facts as plain text",
    "patterns": "pictures of coloured patterns, made by code, with the question what they show (data.images: true)",
    "patterns-test": "the same with other widths and places",
    "motions": "videos of moving bars, made by code: their colour, and where they go (data.videos: true)",
    "motions-test": "the same with other places and speeds",
    "tones": "beeps made by code: how many, how high, level, rising or falling (data.audio: true)",
    "tones-test": "the same with other pitches, lengths and pauses",
    "python-pairs": "python-docs with a rejected answer, from another question, for preference methods",
    "python-rated": "python-docs with right answers and answers to other questions, rated, for kto",
}


FormatName = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "preference", "rated", "prompt", "text"]
"""The row formats in the order of detection; each is the file of this name in ``halftune.data.formats``."""


class SourceSection(Section):
    """One data source. A plain string is short for `{path: string}`."""

    word: ClassVar[str | None] = "path"

    path: InputPath
    """A file (JSON, JSONL, CSV, Parquet, text), a folder of such files, a hub data set id, or `builtin:<name>`."""

    split: str = "train"
    """Split of a hub data set."""

    format: Literal["auto", FormatName] = "auto"
    """Row format; `auto` detects it from the columns and prints it."""

    columns: dict[str, str] = Field(default_factory=dict)
    """Other names of the format's columns, e.g. `{prompt: question, completion: answer}`."""

    prompt: str | None = None
    """A prompt in place of the chat template, for rows with `instruction`, `output` and optionally `input`: `alpaca`,
    `alpaca_chat`, `alpaca_chatml`, `alpaca_phi`, or a text with `{instruction}` and `{input}`. The answer and EOS
    follow it."""

    samples: Annotated[Int, Field(ge=1)] | None = None
    """Number of rows to use; all by default."""

    sampling: Literal["random", "first"] = "random"
    """Which rows `samples` takes: `random` ones, chosen by `training.seed`, or the `first` ones."""

    drop_system: Flag = False
    """Leave out the rows' system messages; `data.system` may add another one."""

    weight: Annotated[Number, Field(gt=0)] = 1.0
    """How often the source is seen in an epoch: 2 shows each row twice, 0.5 half of the rows. Which half depends on
    `training.seed`, and is the same in every epoch: the other rows are never seen."""


EvalName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,40}$"), "1 to 40 letters, digits, - and _"]


class EvalSourceSection(SourceSection):
    """An evaluation source. A plain string is short for `{path: string}`."""

    name: EvalName | None = None
    """Name of an evaluation set of its own, with the metric `eval_loss_NAME`. `eval_loss` is the mean over all sources,
    also those without a name."""


class PackingSection(Section):
    """Packing. `packing: true` is short for `packing: {enabled: true}`."""

    word: ClassVar[str | None] = "enabled"

    enabled: Flag | Literal["auto"] = "auto"
    """Put several samples into one row without attention across them. `auto`: if the model supports it."""

    split: Flag = False
    """Split a sample that does not fit in the rest of a row, instead of leaving the rest empty."""


class StreamingSection(Section):
    """Streaming. `streaming: true` is short for `streaming: {enabled: true}`."""

    word: ClassVar[str | None] = "enabled"

    enabled: Flag = False
    """Read and tokenise rows while training, for data that does not fit on a disk or into the cache. Requires
    `training.max_steps`. `weight` of a source is then its share of the rows. After its last row, a source begins
    again."""

    buffer: Annotated[Int, Field(ge=8, le=1_000_000)] = 4096
    """Rows that each process holds, shuffles and packs together."""


class DataSection(Section):
    """Training and evaluation data."""

    train: Annotated[tuple[SourceSection, ...], LISTED, Field(min_length=1)]
    """Training sources: a path, a list of paths, or a list of sections with weights and sample counts."""

    eval: Annotated[tuple[EvalSourceSection, ...], LISTED] = ()
    """Evaluation sources, like `train`; each may have a name."""

    deduplicate: Flag = False
    """Train each sample once: of those with equal tokens and labels, the first one is kept."""

    eval_split: Annotated[Number, Field(ge=0)] = 0.0
    """Without `eval`: hold out this share (below 1) or this many (1 and above) of the training samples."""

    max_length: Annotated[Int, Field(ge=8)] = 2048
    """Longest sample in tokens; with packing, the length of a row."""

    overlong: Literal["truncate", "keep_start", "proportional", "drop", "error"] = "truncate"
    """Handling of longer samples. `truncate` never cuts a header, an end-of-turn token or a whole answer.
    `keep_start` keeps the first `max_length` tokens. `proportional` cuts question and answer of an exchange at their
    ends, in proportion to their lengths."""

    packing: PackingSection = PackingSection()
    """`true`, `false` or `auto`, or a section."""

    streaming: StreamingSection = StreamingSection()
    """`true` or `false`, or a section."""

    group_by_length: Flag = True
    """Without packing: batch samples of similar length, which reduces padding; the order of batches stays random."""

    system: str | None = None
    """System message for conversations without one."""

    merge_system: Flag = False
    """If the chat template does not support system messages (Gemma 1 and 2), prepend it to the first user message.
    Otherwise such rows, or their system messages, are dropped, depending on the template."""

    on_lost_text: Literal["warn", "drop"] = "warn"
    """What becomes of a row whose chat template omits, shortens or changes text: of any message, of reasoning
    (``<think>``), tool calls or tools. It is trained and reported, or dropped. White space, JSON escapes, and reasoning
    before the last question may differ."""

    images: Flag = False
    """Train on the images of rows, with the frozen towers of a multimodal model. Without it, rows with images are
    dropped."""

    audio: Flag = False
    """Train on the audio of rows, as `images`. WAV files are read without further packages; `soundfile` reads FLAC,
    MP3 and OGG, and `soxr` resamples."""

    videos: Flag = False
    """Train on the videos of rows, as `images`. `av` (PyAV) reads MP4, MOV, WebM, MKV and AVI; GIF needs no package.
    The sound of a video is not used."""

    video_fps: Annotated[Number, Field(gt=0)] | None = None
    """Frames taken per second of a video; by default as the model's video processor does (2 for Qwen)."""

    video_max_frames: Annotated[Int, Field(ge=1)] | None = None
    """Most frames taken of a video, evenly spread over it; by default the video processor's limit (768 for Qwen)."""

    video_max_pixels: Annotated[Int, Field(ge=1)] | None = None
    """Scale larger frames down to this many pixels (width × height); by default the video processor's limit."""

    video_min_pixels: Annotated[Int, Field(ge=1)] | None = None
    """Scale smaller frames up to this many pixels."""

    audio_max_seconds: Annotated[Number, Field(gt=0)] | None = None
    """The longest sound; by default the model's own limit (`chunk_length` of its feature extractor)."""

    media_folder: InputPath | None = None
    """Folder where paths of images, videos and audio begin, and which they may not leave; by default the folder of the
    data file."""

    image_max_pixels: Annotated[Int, Field(ge=1)] | None = None
    """Scale larger images down to this many pixels (width × height) before the model's own processor."""

    image_min_pixels: Annotated[Int, Field(ge=1)] | None = None
    """Scale smaller images up to this many pixels."""

    cache_features: Flag | Literal["auto"] = "auto"
    """Compute frozen towers once per image and sound, and keep the features in the cache. `auto`: if media are used
    more than once and the disk has room."""

    on_bad_media: Literal["error", "drop"] = "error"
    """A missing, broken or too large image, video or sound, or another number of markers than of files, stops the run
    (`error`), or its row is dropped and counted (`drop`)."""

    @property
    def media(self) -> tuple[str, ...]:
        """What is trained beside text: ``image``, ``video``, ``audio``."""
        asked = {"image": self.images, "video": self.videos, "audio": self.audio}
        return tuple(kind for kind in asked if asked[kind])

    num_workers: Annotated[Int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokeniser processes; `auto`: one per core for large data sets, none for small ones."""

    cache: Flag = True
    """Cache tokenised data in the user's cache folder, keyed by content, tokenizer and settings."""
