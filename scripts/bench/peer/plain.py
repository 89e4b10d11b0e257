"""What a user writes by hand: transformers' Trainer, peft's LoRA, loss on answers; packing by position ids.

Runs in an environment of its own; see ``python scripts/bench/peers.py --help``.
"""

import argparse
import json

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

IGNORED = -100


def arguments():
    """The options; all are needed."""
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "out", "precision"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("packed", "rows", "length", "steps", "log-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    return parser.parse_args()


def tokenise(row, tokenizer, length):
    """Ids and labels of a conversation whose last message is the answer."""
    messages = row["messages"]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    question = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(messages[-1]["content"] + "<|im_end|>\n", add_special_tokens=False)["input_ids"]
    labels = [IGNORED] * len(question) + answer
    return {"input_ids": (question + answer)[:length], "labels": labels[:length]}


def pack(samples, length):
    """Rows of whole samples, first come first packed; positions begin anew with every sample."""
    rows = []
    room = 0
    for sample in samples:
        size = len(sample["input_ids"])
        if size > room:
            rows.append({"input_ids": [], "labels": [], "position_ids": []})
            room = length
        rows[-1]["input_ids"] += sample["input_ids"]
        rows[-1]["labels"] += [IGNORED, *sample["labels"][1:]]
        rows[-1]["position_ids"] += range(size)
        room -= size
    return rows


class PackedCollator:
    """Pads packed rows; without an attention mask, transformers finds the samples by their positions."""

    def __init__(self, pad):
        self.fill = {"input_ids": pad, "labels": IGNORED, "position_ids": 0}

    def __call__(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            key: torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in rows])
            for key, fill in self.fill.items()
        }


def main():
    """Trains."""
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    model.config.use_cache = False  # with a cache, transformers does not look for packed samples
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with open(args.data, encoding="utf-8") as file:
        samples = [tokenise(json.loads(line), tokenizer, args.length) for line in file]
    rows = pack(samples, args.length) if args.packed else samples
    padded = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=IGNORED)
    trainer = Trainer(
        model=get_peft_model(model, lora),
        train_dataset=Dataset.from_list(rows),
        data_collator=PackedCollator(tokenizer.pad_token_id) if args.packed else padded,
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=args.rows,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            logging_steps=args.log_every,
            save_steps=10_000,
            bf16=args.precision == "bf16",
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            seed=42,
        ),
    )
    trainer.train()
    trainer.save_model(args.out)
    trainer.save_state()


if __name__ == "__main__":
    main()
