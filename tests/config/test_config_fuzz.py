"""Whatever is in the file or on the command line, the loader answers with a configuration or with a ConfigError."""

# ruff: noqa: E501

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from halftune.config.load import LoadedConfig, load_config
from halftune.config.render import resolved_yaml
from halftune.config.render.docs import explained_yaml
from halftune.convert.convert import CONVERTERS, convert_file
from halftune.core.errors import ConfigError

TOKENS = (
    ": ", ":\n", "\n", "  ", "\t", "- ", "[", "]", "{", "}", ",", "'", '"', "&a ", "*a", "<<: *a", "!!str ", "!x ", "|\n", ">\n", "#",
    "---\n", "? ", "null", "~", "true", "no", "1e-4", "-1", ".nan", ".inf", "0", "99999999999999999999999", "\x00", "\x85", "\ufeff",
    "ä", "\U0001f600", '"\\ud800"', '"\\0"', "type: none", "type", "bf16: true\n", "precision: ", "training: ", "[[[[", "builtin:",
    "~nobody/x", "../", "depends_on: x.yaml\n", "a" * 300, "%", "@", "`",
)  # fmt: skip
ARGUMENTS = (
    "training", "data.train", "data.train[0]", "data.train.0.path", "precision", "adapter.type", "adapter", "bf16", "model", "x.y.z",
    "logging.report_to[0]", "data.train[0].columns.prompt", "depends_on", "training.bf16", "model.chat_template_kwargs.a", "method",
)  # fmt: skip


def mutate(generator: random.Random, text: str) -> str:
    for _ in range(generator.randint(1, 6)):
        at = generator.randint(0, len(text))
        match generator.randint(0, 3):
            case 0:
                text = text[:at] + generator.choice(TOKENS) + text[at:]
            case 1:
                text = text[:at] + text[at + generator.randint(1, 12) :]
            case 2:
                other = generator.randint(0, len(text))
                text = text[:at] + text[other : other + generator.randint(1, 40)] + text[at:]
            case _:
                lines = text.split("\n")
                generator.shuffle(lines[:])
                line = generator.randrange(len(lines))
                lines[line] = " " * generator.randint(0, 5) + lines[line].lstrip()
                text = "\n".join(lines)
    return text


def test_loader(tmp_path: Path, load: Callable[..., LoadedConfig], recipe_text: str) -> None:
    load()
    generator = random.Random(20)
    everything = explained_yaml()
    sources = (
        recipe_text,
        everything[generator.randint(0, 2000) :],
        everything,
        'bf16: true\ntraining: {output_dir: "x"}\n',
    )
    valid = 0
    for _ in range(500):
        text = mutate(generator, generator.choice(sources[:1] * 3 + sources))
        arguments = [
            f"{generator.choice(ARGUMENTS)}={generator.choice(TOKENS)}" for _ in range(generator.choice((0, 0, 1, 3)))
        ]
        Path("x.yaml").write_bytes(text.encode("utf-8"))
        try:
            loaded = load_config("x.yaml", arguments)
        except ConfigError as error:
            for problem in error.problems:
                assert str(problem).strip(), (text, arguments)
                assert "Input should" not in str(problem), (text, arguments)
            continue
        valid += 1
        Path("again.yaml").write_text(resolved_yaml(loaded), encoding="utf-8")
        assert load_config("again.yaml").run == loaded.run, (text, arguments)
    assert valid > 10, "the mutations are too wild to test what they should"


def test_converters(tmp_path: Path) -> None:
    generator = random.Random(3)
    old = (
        "model_name_or_path: a/b\nbase_model: a/b\nstage: sft\nlora_rank: 8\nlora_target: all\ndataset: x,y\ndatasets:\n"
        "  - path: a\n    type: alpaca\nbf16: auto\nwarmup_steps: 3\nmax_steps: 5\neval_steps: 5\nreport_to: [wandb]\n"
        "adapter: lora\nlora_r: 8\nuse_peft: true\nmax_samples: 3\nsave_strategy: steps\nlearning_rate: 1e-4\n"
    )
    path = tmp_path / "old.yaml"
    for _ in range(150):
        path.write_bytes(mutate(generator, old).encode("utf-8"))
        for framework in CONVERTERS:
            try:
                convert_file(path, framework)
            except ConfigError:
                continue
