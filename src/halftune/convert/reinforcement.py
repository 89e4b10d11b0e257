"""GRPO and on-policy distillation (GKD) of TRL, and GRPO of axolotl, whose ``trl`` section has TRL's keys."""

from __future__ import annotations

from halftune.convert.draft import Draft, is_off, number, table

_LONGEST_PROMPT = 1024


def is_grpo(draft: Draft) -> bool:
    """Whether a TRL config is GRPO's; the trainer is named on the command line, not here."""
    return any(key in draft.left for key in ("num_generations", "reward_funcs", "num_iterations"))


def of_trl(draft: Draft) -> None:
    """GRPO's keys of a TRL config.

    Raises:
        Refusal: rewards that are not functions, or a part of another method.
    """
    draft.follow("reinforcement.models")
    for key in ("normalize_advantages", "reward_clip_range"):
        if key in draft.left:
            raise draft.refuse(key, "RLOO's trainer is not supported; GRPO with leave_one_out: true is its estimator")
    draft.put("method.type", "grpo")
    draft.follow("reinforcement.grpo")
    _rewards(draft)
    _server(draft)
    draft.follow("reinforcement.parts")
    if draft.left.get("num_generations_eval") == draft.get("method.num_generations"):
        draft.none("num_generations_eval", "is num_generations")
    draft.follow("reinforcement.grpo_end", "reinforcement.grpo_refused", "reinforcement.none")


def of_axolotl(draft: Draft) -> None:
    """GRPO of axolotl, with the keys of its ``trl`` section.

    Raises:
        Refusal: as :func:`of_trl`.
    """
    draft.none("rl", "method.type: grpo")
    section = draft.take("trl")
    draft.left.update(section if isinstance(section, dict) else {})
    of_trl(draft)


def _rewards(draft: Draft) -> None:
    """Reward functions by name; of a module, from its file. Functions get the same arguments here.

    Raises:
        Refusal: there are none.
    """
    names = draft.left.get("reward_funcs")
    names = [names] if isinstance(names, str) else names
    if not names:
        raise draft.refuse("reward_funcs", "is missing: GRPO learns from functions that reward an answer")
    weights = draft.take("reward_weights") or [1.0] * len(names)
    made, reasons = [], []
    for name, weight in zip(map(str, names), weights, strict=False):
        module, _, function = name.rpartition(".")
        usual = "prompts and completions are texts; there, messages where prompts are conversations"
        own = {"function": function, "file": f"{module.replace('.', '/')}.py"}
        reward, why = table("reinforcement", "rewards").get(name, (own, usual))
        made.append(reward if weight == 1 else {**reward, "weight": number(weight)})
        reasons.append(f"{name}: {why}")
    draft.changed("reward_funcs", "method.rewards", made, "; ".join(reasons))


def _server(draft: Draft) -> None:
    """A vLLM server; in the trainer's own process, the model itself samples the same answers."""
    used, alone = draft.left.get("use_vllm"), draft.left.get("vllm_mode") == "server"
    names = ("base_url", "host", "port", "timeout")
    url, host, port, seconds = (draft.take(f"vllm_server_{name}") for name in names)
    if used and (url or alone):
        draft.put("method.server.url", url or f"http://{host or '0.0.0.0'}:{port or 8000}")
        if seconds:
            draft.put("method.server.timeout_seconds", number(seconds))
    draft.follow("reinforcement.vllm")
    _weights(draft)


def _weights(draft: Draft) -> None:
    """Weights of a server's answers, which are cut here; the model's own answers need none."""
    correction, server = "vllm_importance_sampling_correction", draft.get("method.server")
    draft.drop("vllm_importance_sampling_cap vllm_importance_sampling_clip_max", "belongs to vLLM")
    if server and draft.left.get(correction) is False:
        draft.translated(correction, "method.server.max_weight", None)
    elif server:
        draft.follow("reinforcement.cut")
    more = "vllm_importance_sampling_mode vllm_importance_sampling_clip_min"
    draft.drop(f"{correction} {more}", "answers have no weights")


def dropout(draft: Draft) -> None:
    """Dropout of the adapter in GRPO, and in GKD, where it is off by default; call it when the adapter is known."""
    key, kind = "disable_dropout", draft.get("method.type")
    if kind not in ("grpo", "distill"):
        return
    if draft.left.get(key, kind == "distill") and draft.get("adapter.dropout"):
        draft.put("adapter.dropout", 0.0)
    draft.drop(key, "adapter.dropout: 0")


def finish_grpo(draft: Draft) -> None:
    """Batches count prompts here, answers there; rows hold prompt and answer. Call it after the trainer's keys."""
    batch, passes = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    answers = int(draft.get(batch) or 8) * (steps := int(draft.get(passes) or 1))
    if (every := draft.take("steps_per_generation")) not in (None, steps):
        draft.refused("steps_per_generation", f"{every}: answers are sampled before each step")
    together = draft.take("generation_batch_size")
    if together is not None and together % answers:
        draft.refused("generation_batch_size", f"{together}: answers are sampled before each step, {answers} a device")
    elif together is not None:
        draft.none("generation_batch_size", f"the answers of a step, with {together // answers} devices")
    size = int(draft.get("method.num_generations"))
    draft.put(batch, 1)
    draft.put(passes, max(1, answers // size))
    why = f"a batch counts prompts, of {size} answers each; there, answers"
    if answers % size:
        why += f": {answers} on a device, which {size} does not divide"
    draft.changed("per_device_train_batch_size", passes, draft.get(passes), why)
    if is_off(draft.source.get("max_length")):
        _longest(draft)
    draft.put("data.overlong", "drop")


def _longest(draft: Draft) -> None:
    """Prompt and answer together."""
    given = draft.take("max_prompt_length")
    why = "a row with a longer prompt is left out; there, the prompt is cut"
    if not given:
        given, why = _LONGEST_PROMPT, f"prompts have up to {_LONGEST_PROMPT:,} tokens; there, any length"
    longest = int(given) + int(draft.get("method.max_completion_length"))
    draft.changed("max_prompt_length", "data.max_length", longest, why)


def is_gkd(draft: Draft) -> bool:
    """Whether a TRL config is that of on-policy distillation."""
    return draft.has("teacher_model_name_or_path")


def of_gkd(draft: Draft) -> None:
    """The keys of TRL's GKDConfig."""
    draft.put("method.type", "distill")
    draft.follow("reinforcement.gkd")
    draft.put("method.sampling_temperature", draft.get("method.temperature"))
    draft.put("method.train_on", "last")
    draft.assume("lmbda", 0.5)
    draft.follow("reinforcement.gkd_answers")
