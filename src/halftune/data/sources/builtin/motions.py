"""Videos made by code: a coloured bar on its way across a picture without edges, and where it goes."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

from PIL import Image

SIDE, BAR, FRAMES, FPS = 56, 14, 4, 2  # pixels, frames, and frames per second
COLOURS = {"red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 60, 220), "black": (20, 20, 20)}
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def rows(count: int, seed: int) -> Sequence[dict[str, Any]]:
    """Rows of messages with one GIF each; every colour and way is equally frequent, and no frame alone shows the way.

    Args:
        count: number of rows.
        seed: of places, speeds and backgrounds.
    """
    chance, made = random.Random(seed), []
    kinds = list(product(COLOURS, WAYS))
    for number in range(count):
        colour, way = kinds[number % len(kinds)]
        question = {"role": "user", "content": "<video>What moves, and where to?"}
        answer = {"role": "assistant", "content": f"{colour} {way}"}
        made.append({"messages": [question, answer], "videos": [{"bytes": _film(colour, way, chance)}]})
    return made


def _film(colour: str, way: str, chance: random.Random) -> bytes:
    """A GIF in which a bar goes on, and comes back at the other side."""
    light, speed, start = chance.randint(225, 255), chance.randint(12, 16), chance.randrange(SIDE)
    right, down = WAYS[way]
    frames = []
    for step in range(FRAMES):
        frame = Image.new("RGB", (SIDE, SIDE), (light, light, light))
        place = (start + (right + down) * speed * step) % SIDE
        for edge in (place, place - SIDE):  # what goes over an edge comes in at the other
            frame.paste(COLOURS[colour], (edge, 0, edge + BAR, SIDE) if right else (0, edge, SIDE, edge + BAR))
        frames.append(frame)
    encoded = io.BytesIO()
    frames[0].save(encoded, "GIF", save_all=True, append_images=frames[1:], duration=1000 // FPS, optimize=False)
    return encoded.getvalue()
