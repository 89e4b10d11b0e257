"""Pictures of any mode in RGB, as transformers' processors read the file itself; and 16-bit greys, which those clip."""

from __future__ import annotations

import numpy as np
from PIL import Image

_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB")
_BITS, _PHOTOMETRIC, _BLACK_IS_ZERO = 0x0102, 0x0106, 1  # tags of a TIFF, and a value of the second


def unread(image: Image.Image) -> str:
    """Why an image cannot become RGB; empty if it can. Floats, 32-bit and signed integers have no value for white.

    Args:
        image: as it was opened, not yet decoded.
    """
    # Pillow scales pixels of 2, 4 and 16 bits, not the transparent colour
    narrow = ";" in str(getattr(image, "tile", ""))
    keyed = image.format == "PNG" and image.mode != "P" and "transparency" in image.info and narrow
    # Pillow 10 opens a 16-bit PNG in mode I
    sixteen = image.mode in ("I;16", "I;16B") or (image.mode, image.format) == ("I", "PNG")
    tags = getattr(image, "tag_v2", {})
    plain = tags.get(_BITS, (16,)) == (16,) and tags.get(_PHOTOMETRIC, 1) == _BLACK_IS_ZERO
    if not keyed and (image.mode in _EIGHT_BITS or (sixteen and plain)):
        return ""
    kind = f"mode {image.mode}" + keyed * " with a transparent colour"
    return f"its pixels cannot be scaled to 8 bits ({kind}); save it with 8 bits per channel"


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, transparency composited onto white; of 16 bits the upper eight.

    Args:
        image: of a file that is not ``unread``.
    """
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif "A" in image.getbands() or image.info.get("transparency") is not None:
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image.convert("RGBA"))
    return image.convert("RGB")
