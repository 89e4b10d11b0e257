"""Sounds made by code: one to three beeps, low to high, level, rising or falling, and what is heard."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from halftune.data.media.sound import encoded

RATE, SAMPLES = 16_000, 12_800  # per second; of a sound
BEEPS = ("one", "two", "three")
PITCHES = {"low": 350, "middle": 900, "high": 2300}  # Hz in the middle of a beep, ± 15 %
MOTIONS = {"level": 1.0, "rising": 3.0, "falling": 1 / 3}  # the last pitch of a beep, by the first


def rows(count: int, seed: int) -> Sequence[dict[str, Any]]:
    """Rows of messages with one WAV each, of 8 bits; every number, pitch and motion is equally frequent.

    Args:
        count: number of rows.
        seed: of pitches, lengths, pauses and loudness.
    """
    chance, made = np.random.default_rng(seed), []
    kinds = list(product(BEEPS, PITCHES, MOTIONS))
    for number in range(count):
        beeps, pitch, motion = kinds[number % len(kinds)]
        sound = _sound(BEEPS.index(beeps) + 1, PITCHES[pitch] * chance.uniform(0.85, 1.15), MOTIONS[motion], chance)
        question = {"role": "user", "content": "<audio>What do you hear?"}
        answer = {"role": "assistant", "content": f"{beeps} {pitch} {motion}"}
        made.append({"messages": [question, answer], "audios": [{"bytes": encoded(sound, RATE)}]})
    return made


def _sound(beeps: int, pitch: float, motion: float, chance: np.random.Generator) -> np.ndarray:
    """Beeps in noise, float ``[SAMPLES]``."""
    sound, place = chance.normal(0, 0.01, SAMPLES), int(chance.integers(400, 1200))
    length, pause = int(chance.integers(2400, 3000)), int(chance.integers(800, 1200))
    along = np.linspace(0, 1, length)
    phase = 2 * np.pi * np.cumsum(pitch * motion ** (along - 0.5)) / RATE
    beep = chance.uniform(0.4, 0.8) * np.sin(phase) * np.minimum(1, 12 * np.minimum(along, 1 - along))
    for _ in range(beeps):
        sound[place : place + length] += beep
        place += length + pause
    return sound
