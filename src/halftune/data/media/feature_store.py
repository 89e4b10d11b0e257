"""Features of images on disk: one file per image, verified when it is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from halftune.core.atomic import whole_file
from halftune.core.files import read_limited
from halftune.core.log import get_logger

log = get_logger(__name__)

_DIGEST = 32  # bytes in front of the tensors
_LARGEST = 1 << 30  # bytes of a file


class FeatureStore:
    """Tensors by key, each in a file below a folder.

    Args:
        folder: created when it is written to; other processes may write to it at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        """The file of a key: hexadecimal digits."""
        return self.folder / key[:2] / f"{key[2:]}.features"

    def has(self, key: str) -> bool:
        """Whether there is a file, whose content :meth:`read` verifies."""
        return self.path(key).is_file()

    def write(self, key: str, tensors: dict[str, Tensor]) -> int:
        """Write a file; its number of bytes.

        Raises:
            OSError: it cannot be written.
        """
        path, content = self.path(key), save({name: one.contiguous() for name, one in tensors.items()})
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as beside:
            beside.write_bytes(_digest(content) + content)
        return _DIGEST + len(content)

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a file; None, with a warning, if it is missing or damaged."""
        path = self.path(key)
        try:
            stored = read_limited(path, _LARGEST, root=self.folder)
            if stored[:_DIGEST] == _digest(stored[_DIGEST:]):
                return load(stored[_DIGEST:])
            log.warning("corrupt features in %s", path)
        except FileNotFoundError:
            log.warning("no features in %s", path)
        except (OSError, SafetensorError, ValueError) as error:
            log.warning("corrupt features in %s: %s", path, error)
        return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()
