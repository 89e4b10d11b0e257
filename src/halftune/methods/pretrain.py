"""Continued pre-training: the cross-entropy of every token of a document."""

from __future__ import annotations

from halftune.methods.sft import Sft


class Pretrain(Sft):
    """As supervised fine-tuning: the data alone differs, in which every token carries a label."""
