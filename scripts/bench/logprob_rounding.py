"""How bf16 rounds log-probabilities: of tokens, and of answers of 64 to 2,048 tokens, at two vocabularies.

  python scripts/bench/logprob_rounding.py                                      Markdown table on stdout
  python scripts/bench/logprob_rounding.py --vocabularies 4096 --lengths 64     a part of it

The builtin 3 M model, untied, its head scaled so that logits have the standard deviation 3; labels are drawn from the
model's own probabilities. Three log-probabilities of the same labels are compared with that of ``PolicyModel``, the
model in bf16 under autocast as the plan trains it:

    head      fp64, of the same bf16 rows and bf16 weights: what the rounded logits and the fp32 softmax do
    model     the same bf16 weights in fp32: what all layers in bf16 do
    TRL       distance of TRL's fused head, on the same bf16 model, to ``head``: for comparison

Errors in nats: root mean square and greatest of a token, root mean square of an answer's sum. The mean error of a token
says whether they add up.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import head, row, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from halftune.data.batch import Batch
from halftune.model.policy.policy import PolicyModel

VOCABULARIES, LENGTHS, ROWS, SPREAD = (4_096, 152_000), (64, 512, 2_048), 256, 3.0


@torch.no_grad()
def rows_of(model: Any, ids: Tensor) -> Tensor:
    """What the head gets at every position but the last: ``[B · (T - 1), H]``."""
    return model.base_model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)


def exact(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities in fp64."""
    wide = weight.double().T
    parts = zip(rows.split(ROWS), targets.split(ROWS), strict=True)
    return torch.cat([(one.double() @ wide).log_softmax(-1).gather(1, at[:, None])[:, 0] for one, at in parts])


def drawn(rows: Tensor, weight: Tensor) -> Tensor:
    """A label for each row, drawn from its probabilities."""
    parts = [torch.multinomial((one.float() @ weight.float().T).softmax(-1), 1)[:, 0] for one in rows.split(ROWS)]
    return torch.cat(parts)


def measured(vocabulary: int, length: int, answers: int) -> list[str]:
    """The cells of a line."""
    from trl.trainer.utils import add_fused_lm_head

    with tempfile.TemporaryDirectory() as folder:
        tiny_model(Path(folder), vocab_size=vocabulary, tie_word_embeddings=False, max_position_embeddings=4096)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(length)
    ids = torch.randint(3, vocabulary, (answers, length + 1))
    probe = rows_of(model, ids[:1])
    model.lm_head.weight.data *= SPREAD / (probe @ model.lm_head.weight.T).std()
    model.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rows = rows_of(model, ids)
        targets = drawn(rows, model.lm_head.weight)
        labels = torch.cat([torch.full((answers, 1), -100), targets.view(answers, length)], dim=1)
        batch = Batch({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
        ours = PolicyModel(model).token_logprobs(batch)
        add_fused_lm_head(model)
        theirs = model(ids, labels=labels, fused_lm_head=True).log_probs.flatten()
    same = exact(rows, model.lm_head.weight, targets)
    del model.forward
    wide = exact(rows_of(model.float(), ids), model.lm_head.weight, targets)
    cells = []
    for other, known in ((ours, same), (ours, wide), (theirs, same)):
        apart = other.double() - known
        sums = apart.view(answers, length).sum(1)
        cells.append(f"{apart.square().mean().sqrt():.4f} / {apart.abs().max():.3f}")
        cells.append(f"{sums.square().mean().sqrt():.3f}")
        cells.append(f"{apart.mean():+.5f}")
    return [f"{-same.mean():.2f}", *cells]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=8_192, help="in each line (default 8192)")
    asked = parser.parse_args()
    names = [f"{one}, {what}" for one in ("head", "model", "TRL") for what in ("token", "answer", "mean")]
    print(head("vocabulary", "tokens of an answer", "nats a token", *names))
    for vocabulary, length in itertools.product(asked.vocabularies, asked.lengths):
        print(row(f"{vocabulary:,}", f"{length:,}", *measured(vocabulary, length, max(1, asked.tokens // length))))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
