"""Pictures made by code: one colour and one pattern each, of random width and place, and what they show."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

SIDE = 56  # pixels
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 60, 220),
    "yellow": (235, 215, 40),
    "black": (20, 20, 20),
    "pink": (245, 130, 190),
}
# Whether a pixel has the colour; of its column and row in units of a stripe's width.
PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "plain": lambda column, row: True,
    "rows": lambda column, row: row % 2 == 0,
    "columns": lambda column, row: column % 2 == 0,
    "squares": lambda column, row: (column + row) % 2 == 0,
}


def rows(count: int, seed: int) -> Sequence[dict[str, Any]]:
    """Rows of messages with one PNG each; every colour and pattern is equally frequent.

    Args:
        count: number of rows.
        seed: of widths, places and backgrounds.
    """
    chance, made = random.Random(seed), []
    kinds = [(colour, pattern) for colour in COLOURS for pattern in PATTERNS]
    for number in range(count):
        colour, pattern = kinds[number % len(kinds)]
        light, width = chance.randint(225, 255), chance.randint(4, 9)
        across, down = chance.randrange(2 * width), chance.randrange(2 * width)
        image = Image.new("RGB", (SIDE, SIDE), (light, light, light))
        for x in range(SIDE):
            for y in range(SIDE):
                if PATTERNS[pattern]((x + across) // width, (y + down) // width):
                    image.putpixel((x, y), COLOURS[colour])
        encoded = io.BytesIO()
        image.save(encoded, "PNG")
        question = {"role": "user", "content": "<image>What is in the picture?"}
        answer = {"role": "assistant", "content": f"{colour} {pattern}"}
        made.append({"messages": [question, answer], "images": [{"bytes": encoded.getvalue()}]})
    return made
