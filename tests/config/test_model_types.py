"""Which model types are refused and why; every decoder of transformers is read, however its config spells the sizes."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from halftune.config.facts.families import FAMILIES, OWN, Family, check_causal, family_of
from halftune.config.facts.model import ModelFacts, facts_from_config, read_model_facts
from halftune.config.sections.model import ModelSection
from halftune.core.errors import ModelError

# Their sizes are ours where they mean the same: with latent attention, head_dim is queries' two parts together; a
# LongCat layer holds two attentions; Gemma 4's layers differ and the config gives no one number.
ELSEWISE = {"head_dim": "kv_lora_rank", "num_layers": "zero_expert_num"}
SIZES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}


def small(**sizes: Any) -> dict[str, Any]:
    return {"vocab_size": 300, **sizes}


def asked(folder: Path, config: PreTrainedConfig) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    return read_model_facts(ModelSection(name_or_path=str(folder)))


@pytest.mark.slow
def test_every_causal_config_of_transformers(tmp_path: Path) -> None:
    """Each default config is read with transformers' own sizes, or is refused as what it is."""
    wrong, refused = [], set()
    for kind in dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING):
        # The assistant has no default; other tests register classes of their own.
        if kind.__name__ == "Gemma4AssistantConfig" or not kind.__module__.startswith("transformers."):
            continue
        config = kind()
        try:
            facts = asked(tmp_path, config)
        except ModelError as error:
            refused.add(config.model_type)
            wrong += [str(error)] if "encoder" not in error.what else []
            continue
        text = config.get_text_config(decoder=True).to_dict()
        wrong += [
            f"{kind.__name__}.{theirs}: {getattr(facts, ours)}, not {text[theirs]}"
            for ours, theirs in SIZES.items()
            if isinstance(text.get(theirs), int) and not text.get(ELSEWISE.get(ours, ""))
            if text[theirs] != getattr(facts, ours)
        ]
    assert not wrong
    not_causal = {name for name, family in FAMILIES.items() if family.kind != "decoder"}
    assert refused <= not_causal | {"musicgen", "musicgen_melody"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (small(model_type="bloom", n_embed=64, n_layer=3, n_head=4), (64, 3, 4, 16, 256)),
        (small(model_type="xglm", d_model=64, num_layers=3, attention_heads=4, ffn_dim=96), (64, 3, 4, 16, 96)),
        (small(model_type="gpt_neo", hidden_size=64, num_layers=3, num_heads=4), (64, 3, 4, 16, 256)),
        (small(model_type="trocr", d_model=64, decoder_layers=3, decoder_attention_heads=4, decoder_ffn_dim=96),
         (64, 3, 4, 16, 96)),
        (small(model_type="xlm", causal=True, emb_dim=64, n_layers=3, n_heads=4), (64, 3, 4, 16, 256)),
        (small(model_type="dbrx", d_model=64, n_layers=3, n_heads=4, ffn_config={"ffn_hidden_size": 96}),
         (64, 3, 4, 16, 96)),
        (small(model_type="zamba", hidden_size=64, num_hidden_layers=3, num_attention_heads=4, attention_head_dim=32),
         (64, 3, 4, 32, 256)),
        (small(model_type="gemma3n", text_config={"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                                                  "intermediate_size": [96, 96, 80]}), (64, 3, 4, 16, 96)),
        (small(model_type="blt", global_config={"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}),
         (64, 3, 4, 16, 256)),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)  # fmt: skip
def test_sizes_by_other_names(raw: dict[str, Any], expected: tuple[int, ...]) -> None:
    check_causal(raw, where="x", trust_remote_code=False)
    facts = facts_from_config(raw, "x")
    found = (facts.hidden_size, facts.num_layers, facts.num_heads, facts.head_dim, facts.intermediate_size)
    assert found == expected


@pytest.mark.parametrize("heads", ["num_key_value_heads", "num_kv_heads", "kv_n_heads"])
@pytest.mark.parametrize(
    ("experts", "each"),
    [
        ("num_local_experts", "num_experts_per_tok"),
        ("num_experts", "moe_topk"),
        ("n_routed_experts", "num_experts_per_token"),
        ("moe_num_experts", "moe_top_k"),
    ],
)
def test_key_heads_and_experts_by_other_names(heads: str, experts: str, each: str) -> None:
    sizes = {"d_model": 64, "n_layers": 3, "n_heads": 4, heads: 2, experts: 8, each: 3}
    facts = facts_from_config(small(model_type="unheard-of", **sizes), "x")
    assert (facts.num_kv_heads, facts.num_experts, facts.num_experts_per_token) == (2, 8, 3)


def test_groups_of_settings_are_read() -> None:
    groups = {"attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.1}, "ffn_config": {"moe_num_experts": 8, "moe_top_k": 3}}
    facts = facts_from_config(small(model_type="dbrx", d_model=64, n_layers=3, n_heads=4, **groups), "x")
    assert (facts.num_kv_heads, facts.attention_dropout) == (2, 0.1)
    assert (facts.num_experts, facts.num_experts_per_token) == (8, 3)


@pytest.mark.parametrize("model_type", ["t5", "bart", "whisper", "marian", "vision-encoder-decoder"])
@pytest.mark.parametrize("said", [{}, {"is_encoder_decoder": True}])
def test_encoder_decoders_are_refused(model_type: str, said: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="is an encoder-decoder") as caught:
        check_causal({"model_type": model_type, **said}, where="x", trust_remote_code=False)
    assert "use a decoder" in caught.value.remedy


def test_the_families_named_are_what_transformers_says() -> None:
    """A type in our list is, by default, an encoder-decoder in transformers (or unknown to this version)."""
    for name in ("t5", "bart", "whisper", "led", "speech_to_text"):
        assert CONFIG_MAPPING[name]().is_encoder_decoder


def test_every_row_is_of_a_model_type_that_exists() -> None:
    if Version(transformers.__version__) >= Version("5.23"):  # older ones lack the newest types
        assert not FAMILIES.keys() - {*CONFIG_MAPPING_NAMES, *OWN}
    assert not [name for name, family in FAMILIES.items() if family.operators and not family.hybrid]
    operators = {operator for family in FAMILIES.values() for operator in family.operators}
    assert not [name for name in operators if find_spec(f"halftune_kernels.ops.{name}") is None]


def test_a_familys_row_is_found_by_its_text_part() -> None:
    assert family_of("gemma3_text") is family_of("gemma3") is FAMILIES["gemma3"]
    assert family_of("llava", "gemma2") is FAMILIES["gemma2"]
    assert family_of("no_such_type") == Family()


def test_the_decoder_of_a_pair_alone_is_taken() -> None:
    check_causal({"model_type": "bart", "is_encoder_decoder": False}, where="x", trust_remote_code=False)
    check_causal({"model_type": "bert", "is_decoder": True}, where="x", trust_remote_code=False)
    check_causal({"model_type": "xlnet", "attn_type": "uni"}, where="x", trust_remote_code=False)


@pytest.mark.parametrize("model_type", ["bert", "big_bird", "xlnet", "xlm", "cpmant", "reformer"])
def test_what_looks_both_ways_is_refused(model_type: str) -> None:
    with pytest.raises(ModelError, match="is an encoder, not a causal"):
        check_causal({"model_type": model_type}, where="x", trust_remote_code=False)


def test_what_is_made_for_images_is_not_called_unknown() -> None:
    with pytest.raises(ModelError, match="no causal language model for resnet"):
        check_causal({"model_type": "resnet"}, where="x", trust_remote_code=False)
