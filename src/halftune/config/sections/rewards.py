"""Where answers and their rewards come from in reinforcement learning."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from halftune.config.sections import Flag, InputPath, Int, Number, Section

REWARDS = ("exact_answer", "matches", "same_maths", "passes_tests", "overlong")
"""Reward functions that come with halftune."""


class RewardFunctionSection(Section):
    """A reward of an answer. A plain string is short for `{function: string}`."""

    word: ClassVar[str | None] = "function"

    function: str
    """`exact_answer`, `matches`, `same_maths`, `passes_tests`, `overlong`, or the name of a function in `file`."""

    file: InputPath | None = None
    """A Python file with the function, relative to the recipe. It runs with your rights."""

    pattern: str | None = None
    """For `matches`: a regular expression that must match the whole answer."""

    weight: Number = 1.0
    """Factor in the sum of all rewards."""

    run_code: Flag = False
    """For `passes_tests`: allow code of the model to run on this machine. It is limited in time and memory, and on
    Linux has no network, writes to its own folder only and reads Python's and the system's files only (Landlock)."""

    seconds: Annotated[Number, Field(gt=0)] = 5.0
    """For `passes_tests`: CPU time of a program."""

    memory_mib: Annotated[Int, Field(ge=64)] = 512
    """For `passes_tests`: address space of a program in MiB."""

    soft_tokens: Annotated[Int, Field(ge=1)] = 64
    """For `overlong`: the penalty starts this many tokens before `max_completion_length`."""


class ServerSection(Section):
    """A vLLM server that samples the answers. A plain string is short for `{url: string}`."""

    word: ClassVar[str | None] = "url"
    ranks: ClassVar[tuple[int, ...]] = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that `--max-lora-rank` may be

    url: Annotated[str, Field(pattern="^https?://"), "an address such as http://localhost:8000"]
    """Address of the server, such as `http://localhost:8000`. It serves the base model with `--enable-lora`."""

    max_weight: Annotated[Number, Field(gt=0)] | None = 3.0
    """Bound of the importance weight of a token: its probability here over that on the server. `null`: no weights."""

    timeout_seconds: Annotated[Number, Field(gt=0)] = 600.0
    """Longest wait for an answer of the server."""
