"""How each framework is asked for the same job: packages, configuration, command, and where it writes its losses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .job import ALPHA, RANK, Job

HERE = Path(__file__).resolve().parent
Values = dict[str, Any]


@dataclass(frozen=True)
class Framework:
    """One framework.

    Attributes:
        packages: what pip installs beside the CPU build of torch; empty for halftune, which runs this script.
        afterwards: further commands in the environment ({python} is its interpreter, {site} its packages).
        command: (environment's folder, job) → arguments; writes the configuration into ``job.out``.
        losses: the folder of a run → its logged training losses.
        cannot: number formats that it refuses on a CPU.
    """

    packages: tuple[str, ...]
    command: Callable[[Path, Job], list[str]]
    losses: Callable[[Path], list[float]]
    afterwards: tuple[tuple[str, ...], ...] = ()
    cannot: tuple[str, ...] = ()


def _write(path: Path, values: Values) -> Path:
    path.write_text(json.dumps(values, indent=1))  # JSON is YAML
    return path


def state_losses(out: Path) -> list[float]:
    """Of ``trainer_state.json``, else of what transformers' Trainer prints."""
    files = sorted(out.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    if files:
        return [line["loss"] for line in json.loads(files[-1].read_text())["log_history"] if "loss" in line]
    text = (out / "transcript.log").read_text(errors="replace")
    return [float(number) for number in re.findall(r"'loss': '?([0-9.]+)", text)]


def halftune(_: Path, job: Job) -> list[str]:
    """Ours, in the environment that runs this script."""
    recipe = {
        "model": {"name_or_path": str(job.model)},
        "precision": job.precision,
        "adapter": {"type": "lora", "rank": RANK, "alpha": ALPHA, "target_modules": "all-linear"},
        "data": {
            "train": str(job.data / "messages.jsonl"),
            "max_length": job.length,
            "packing": job.packed,
            "cache": False,  # every framework tokenises in every run
        },
        "training": {
            "output_dir": str(job.out / "run"),
            "max_steps": job.steps,
            "per_device_train_batch_size": job.rows,
            "learning_rate": job.learning_rate,
            "gradient_checkpointing": False,
            "logging_steps": job.log_every,
            "save_steps": "end",
        },
    }
    return [sys.executable, "-m", "halftune", "train", "--config", str(_write(job.out / "job.yaml", recipe))]


def halftune_losses(out: Path) -> list[float]:
    """Of ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def plain(environment: Path, job: Job) -> list[str]:
    """The Trainer and peft, as one writes it by hand."""
    options = {
        "model": job.model,
        "data": job.data / "messages.jsonl",
        "out": job.out / "run",
        "precision": job.precision,
        "packed": int(job.packed),
        "rows": job.rows,
        "length": job.length,
        "steps": job.steps,
        "log-every": job.log_every,
        "learning-rate": job.learning_rate,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [str(environment / "bin" / "python"), str(HERE / "plain.py"), *words]


def trl(environment: Path, job: Job) -> list[str]:
    """``trl sft``."""
    config = {
        "model_name_or_path": str(job.model),
        "dtype": "bfloat16" if job.precision == "bf16" else "float32",
        "dataset_name": str(job.data / "trl"),
        "use_peft": True,
        "lora_r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "max_length": job.length,
        "packing": job.packed,
        **_trainer(job),
    }
    return [str(environment / "bin" / "trl"), "sft", "--config", str(_write(job.out / "job.yaml", config))]


def _trainer(job: Job) -> Values:
    """Arguments of transformers' Trainer that TRL and LLaMA-Factory take as they are."""
    return {
        "output_dir": str(job.out / "run"),
        "logging_steps": job.log_every,
        "save_steps": 10_000,
        "per_device_train_batch_size": job.rows,
        "gradient_accumulation_steps": 1,
        "learning_rate": job.learning_rate,
        "max_steps": job.steps,
        "lr_scheduler_type": "cosine",
        "bf16": job.precision == "bf16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "seed": 42,
    }


def llamafactory(environment: Path, job: Job) -> list[str]:
    """``llamafactory-cli train``; packing with samples kept apart (``neat_packing``)."""
    config = {
        "model_name_or_path": str(job.model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_target": "all",
        "dataset_dir": str(job.data),
        "dataset": "alpaca",
        "template": "qwen",
        "cutoff_len": job.length,
        "packing": job.packed,
        "neat_packing": job.packed,
        "overwrite_cache": True,
        "disable_gradient_checkpointing": True,
        **{key: value for key, value in _trainer(job).items() if key != "gradient_checkpointing"},
    }
    return [str(environment / "bin" / "llamafactory-cli"), "train", str(_write(job.out / "job.yaml", config))]


def axolotl(environment: Path, job: Job) -> list[str]:
    """``axolotl train``; its fused LoRA kernels are for GPUs."""
    config = {
        "base_model": str(job.model),
        "datasets": [
            {
                "path": str(job.data / "messages.jsonl"),
                "ds_type": "json",
                "type": "chat_template",
                "field_messages": "messages",
            }
        ],
        "chat_template": "tokenizer_default",
        "dataset_prepared_path": str(job.out / "prepared"),
        "val_set_size": 0,
        "output_dir": str(job.out / "run"),
        "adapter": "lora",
        "lora_r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0,
        "lora_target_linear": True,
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        "sequence_len": job.length,
        "sample_packing": job.packed,
        "pad_to_sequence_len": False,
        "excess_length_strategy": "truncate",
        "micro_batch_size": job.rows,
        "gradient_accumulation_steps": 1,
        "num_epochs": 10,
        "max_steps": job.steps,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "learning_rate": job.learning_rate,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "bf16": job.precision == "bf16",
        "tf32": False,
        "gradient_checkpointing": False,
        "logging_steps": job.log_every,
        "save_steps": 10_000,
        "seed": 42,
    }
    return [str(environment / "bin" / "axolotl"), "train", str(_write(job.out / "job.yaml", config))]


def torchtune(environment: Path, job: Job) -> list[str]:
    """``tune run lora_finetune_single_device``; its model is its own, built from sizes."""
    sizes = json.loads((job.model / "config.json").read_text())
    tune, run = job.data.parent / "tune", str(job.out / "run")
    config = {
        "output_dir": run,
        "model": {
            "_component_": "torchtune.models.qwen2.lora_qwen2",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "vocab_size": sizes["vocab_size"],
            "num_layers": sizes["num_hidden_layers"],
            "num_heads": sizes["num_attention_heads"],
            "num_kv_heads": sizes["num_key_value_heads"],
            "embed_dim": sizes["hidden_size"],
            "intermediate_dim": sizes["intermediate_size"],
            "max_seq_len": sizes["max_position_embeddings"],
            "norm_eps": sizes["rms_norm_eps"],
            "rope_base": 10000.0,
            "tie_word_embeddings": True,
            "lora_rank": RANK,
            "lora_alpha": ALPHA,
            "lora_dropout": 0.0,
        },
        "tokenizer": {
            "_component_": "torchtune.models.qwen2.qwen2_tokenizer",
            "path": str(tune / "vocab.json"),
            "merges_file": str(tune / "merges.txt"),
            "special_tokens_path": str(tune / "special.json"),
            "max_seq_len": job.length,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(job.model),
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": run,
            "model_type": "QWEN2",
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": True,
        "dataset": {
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "json",
            "data_files": str(job.data / "messages.jsonl"),
            "conversation_column": "messages",
            "conversation_style": "openai",
            "train_on_input": False,
            "packed": job.packed,
            "split": "train",
        },
        "seed": 42,
        "shuffle": True,
        "batch_size": job.rows,
        "optimizer": {"_component_": "torch.optim.AdamW", "weight_decay": 0.0, "lr": job.learning_rate},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "epochs": 1,
        "max_steps_per_epoch": job.steps,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": 1.0,
        "compile": False,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": f"{run}/logs"},
        "log_every_n_steps": job.log_every,
        "log_peak_memory_stats": False,
        "device": "cpu",
        "dtype": job.precision,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
    }
    file = _write(job.out / "job.yaml", config)
    return [str(environment / "bin" / "tune"), "run", "lora_finetune_single_device", "--config", str(file)]


def torchtune_losses(out: Path) -> list[float]:
    """Of its DiskLogger: ``Step 1 | loss:8.3 …``."""
    files = sorted((out / "run" / "logs").glob("*.txt"))
    return [float(number) for number in re.findall(r"\bloss:\s?([0-9.]+)", files[-1].read_text())] if files else []


# LLaMA-Factory imports torchaudio always, and the registry's build of it wants CUDA: a stand-in with a version only.
_NO_AUDIO = "import pathlib; pathlib.Path('{site}/torchaudio.py').write_text('__version__ = \"2.11.0\"\\n')"
_WITHOUT_CUDA_BUILDS = ("{python}", "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio")

FRAMEWORKS: dict[str, Framework] = {
    "halftune": Framework((), halftune, halftune_losses),
    "plain": Framework(
        ("transformers==5.23.0", "peft==0.21.2", "datasets==5.2.0", "accelerate==1.15.0"), plain, state_losses
    ),
    "trl": Framework(("trl[peft]==1.16.0",), trl, state_losses),
    "llamafactory": Framework(
        ("llamafactory==0.9.5",),
        llamafactory,
        state_losses,
        afterwards=(_WITHOUT_CUDA_BUILDS, ("{python}", "-c", _NO_AUDIO)),
    ),
    "axolotl": Framework(("axolotl==0.19.0",), axolotl, state_losses, cannot=("bf16",)),
    "torchtune": Framework(
        ("torchtune==0.6.1",),
        torchtune,
        torchtune_losses,
        afterwards=(("{python}", "-m", "pip", "install", "-q", "--no-deps", "torchao==0.10.0"),),
    ),
}
