"""A tiny ``tekken.json``, Mistral's own format of a tokenizer: the 256 bytes, a few words, and the control tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
           "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
           "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]",
           "[/THINK]")  # fmt: skip
# Voxtral's; its processor takes 24 for the token of a sound.
AUDIO = (*SPECIAL[:20], *(f"<SPECIAL_{rank}>" for rank in range(20, 24)), "[AUDIO]", "[BEGIN_AUDIO]",
         *(f"<SPECIAL_{rank}>" for rank in range(26, 34)), "[TRANSCRIBE]")  # fmt: skip
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tekken(folder: Path, special: tuple[str, ...] = SPECIAL, version: str = "v13", **more: Any) -> Path:
    """Writes ``tekken.json`` with these control tokens and the sections ``more``."""
    words = [bytes([one]) for one in range(256)] + [b"th", b"is", b" i", b"br", b" is", b"ie", b"our", b"ou"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(dict.fromkeys(words))
    ]
    control = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)]
    settings = {"pattern": PATTERN, "num_vocab_tokens": len(vocabulary), "default_vocab_size": len(vocabulary) + 40,
                "default_num_special_tokens": 40, "version": version}  # fmt: skip
    file = folder / "tekken.json"
    file.write_text(json.dumps({"config": settings, "vocab": vocabulary, "special_tokens": control, **more}))
    return file
