"""GRPO and on-policy distillation (GKD) of TRL, and GRPO of axolotl, whose ``trl`` section has TRL's keys."""

from __future__ import annotations

from typing import Any

from halftune.convert.draft import Draft, is_off
from halftune.convert.trainer import number

RENAMED = {
    "num_generations": "method.num_generations",
    "max_completion_length": "method.max_completion_length",
    "num_iterations": "method.num_iterations",
    "importance_sampling_level": "method.importance_sampling",
    "mask_truncated_completions": "method.mask_truncated",
    "top_k": "method.top_k",
}
NUMBERS = {
    "temperature": "method.temperature",
    "top_p": "method.top_p",
    "beta": "method.beta",
    "epsilon": "method.epsilon",
    "epsilon_high": "method.epsilon_high",
}
LOSSES = ("grpo", "dr_grpo", "dapo")
SCALES = {"group": True, True: True, "none": False, False: False}
# TRL's own reward functions → ours, and what differs.
REWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "accuracy_reward": ({"function": "same_maths"}, "compares with the column answer; there, solution"),
    "think_format_reward": (
        {"function": "matches", "pattern": r"(?s)<think>(?!.*<think>).*?</think>.*"},
        "the same pattern, on the whole answer",
    ),
    "get_soft_overlong_punishment": (
        {"function": "overlong", "soft_tokens": 256},
        "the penalty ends at max_completion_length; there, at 1,280 tokens",
    ),
}
_LONGEST_PROMPT = 1024
_NO_MODEL = "a model as reward is not supported; name a function in reward_funcs"
_OTHER = "this part of the loss is not supported yet"
OFF = {
    **dict.fromkeys(("entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold", "delta"), _OTHER),
    "rollout_func": "answers come from the model or a vLLM server",
    "generation_kwargs": "sampling has temperature, top_p and top_k",
    "min_p": "sampling has temperature, top_p and top_k",
    "replay_buffer_size": "answers are used once",
    "use_data_producer": "answers are sampled before each step, by the present weights",
    "async_prefetch": "answers are sampled before each step, by the present weights",
    "vllm_structured_outputs_regex": "answers are sampled freely",
    "vllm_guided_decoding_regex": "answers are sampled freely",
}
# Keys of one of these parts, or without an effect on what is learned.
NONE = (
    "log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal", "remove_unused_columns",
    "ds3_gather_for_generation", "cache_implementation", "use_liger_loss", "use_liger_kernel", "reward_num_workers",
    "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "ref_model_mixup_alpha",
    "ref_model_sync_steps", "replay_recompute_logps", "use_transformers_paged",
    "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length",
    "vllm_enable_sleep_mode", "vllm_model_impl", "vllm_group_port", "vllm_lora_sync", "vllm_sync_interval",
    "vllm_mode",
)  # fmt: skip


def is_grpo(draft: Draft) -> bool:
    """Whether a TRL config is GRPO's; the trainer is named on the command line, not here."""
    return any(key in draft.left for key in ("num_generations", "reward_funcs", "num_iterations"))


def of_trl(draft: Draft) -> None:
    """GRPO's keys of a TRL config.

    Raises:
        Refusal: rewards that are not functions, or a part of another method.
    """
    draft.unsupported(("reward_model_name_or_path", "reward_model_path"), _NO_MODEL)
    for key in ("normalize_advantages", "reward_clip_range"):
        if key in draft.left:
            raise draft.refuse(key, "RLOO's trainer is not supported; GRPO with leave_one_out: true is its estimator")
    draft.put("method.type", "grpo")
    draft.rename(RENAMED)
    for key, ours in NUMBERS.items():
        draft.move(key, ours, number)
    draft.default("method.num_generations", 8, "num_generations")
    draft.default("method.max_completion_length", 512, "max_completion_length")
    _loss(draft)
    _rewards(draft)
    _server(draft)
    if str(draft.left.get("multi_objective_aggregation") or "sum_then_normalize") == "sum_then_normalize":
        draft.drop({"multi_objective_aggregation": "rewards are summed, then normalised"})
    draft.drop({"multi_objective_aggregation": "GDPO is not supported yet"}, "refused")
    if draft.left.get("repetition_penalty") == 1.0:
        draft.none("repetition_penalty", "is off")
    if draft.left.get("top_entropy_quantile") == 1.0:
        draft.none("top_entropy_quantile", "is off")
    draft.idle({"num_generations_eval": draft.get("method.num_generations")}, "is num_generations")
    draft.drop({"num_generations_eval": "an evaluation has as many answers as a step"}, "changed")
    reference = dict.fromkeys(("use_bias_correction_kl", "sync_ref_model"), _OTHER)
    if not draft.get("method.beta"):
        draft.drop(dict.fromkeys(reference, "beta is 0: there is no reference"))
    draft.move("chat_template_kwargs", "model.chat_template_kwargs")
    draft.drop({"repetition_penalty": "sampling has none", "top_entropy_quantile": _OTHER}, "refused")
    draft.drop({**OFF, **reference}, "refused")
    draft.drop(dict.fromkeys(NONE, "nothing that is learned depends on it"))


def of_axolotl(draft: Draft) -> None:
    """GRPO of axolotl, with the keys of its ``trl`` section.

    Raises:
        Refusal: as :func:`of_trl`.
    """
    draft.none("rl", "method.type: grpo")
    section = draft.take("trl")
    draft.left.update(section if isinstance(section, dict) else {})
    draft.drop({"vllm": "the server is started by itself"})
    of_trl(draft)


def _loss(draft: Draft) -> None:
    loss = draft.left.get("loss_type")
    if loss in LOSSES:
        draft.translated("loss_type", "method.loss", loss)
    draft.drop({"loss_type": "this loss is not supported yet"}, "refused")
    scale = draft.left.get("scale_rewards")
    if scale in SCALES:
        draft.translated("scale_rewards", "method.scale_rewards", SCALES[scale])
    draft.drop({"scale_rewards": "rewards are scaled by their group, or not at all"}, "refused")


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
        reward, why = REWARDS.get(name, ({"function": function, "file": f"{module.replace('.', '/')}.py"}, ""))
        why = why or "prompts and completions are texts; there, messages where prompts are conversations"
        made.append(reward if weight == 1 else {**reward, "weight": number(weight)})
        reasons.append(f"{name}: {why}")
    draft.changed("reward_funcs", "method.rewards", made, "; ".join(reasons))


def _server(draft: Draft) -> None:
    """A vLLM server; in the trainer's own process, the model itself samples the same answers."""
    used, mode = draft.take("use_vllm"), draft.left.get("vllm_mode") or "colocate"
    url, host = draft.take("vllm_server_base_url"), draft.take("vllm_server_host")
    port, seconds = draft.take("vllm_server_port"), draft.take("vllm_server_timeout")
    if used and (mode == "server" or url):
        draft.put("method.server", {"url": url or f"http://{host or '0.0.0.0'}:{port or 8000}"})
        why = "the server is vLLM's own, started with --enable-lora; there, it is TRL's"
        draft.changed("use_vllm", "", None, why)
        if seconds:
            draft.put("method.server.timeout_seconds", number(seconds))
    elif used:
        draft.none("use_vllm", "answers are sampled by the model in training")
    for key in ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"):
        if used and mode == "server" and draft.has(key):
            draft.translated(key, "method.server.max_weight", number(draft.take(key)))
        elif key in draft.left:
            draft.none(key, "belongs to vLLM")
    _weights(draft, server=draft.get("method.server") is not None)


def _weights(draft: Draft, *, server: bool) -> None:
    """Weights of a server's answers, which are cut here; the model's own answers need none."""
    correction, mode, lowest = (f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_min"))
    if server and draft.left.get(correction) is False:
        draft.translated(correction, "method.server.max_weight", None)
        server = False
    why = "weights of answers of a server are cut at max_weight"
    if server:
        draft.idle({correction: True, mode: "token_truncate"}, why)
        draft.drop(dict.fromkeys((correction, mode, lowest), why), "changed")
    draft.drop(dict.fromkeys((correction, mode, lowest), "answers have no weights"))


def dropout(draft: Draft) -> None:
    """Dropout of the adapter in GRPO, and in GKD, where it is off by default; call it when the adapter is known."""
    key, kind = "disable_dropout", draft.get("method.type")
    if kind not in ("grpo", "distill"):
        return
    if draft.left.get(key, kind == "distill") and draft.get("adapter.dropout"):
        draft.put("adapter.dropout", 0.0)
    draft.drop({key: "adapter.dropout: 0"})


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
        given = draft.take("max_prompt_length")
        longest = int(given or _LONGEST_PROMPT) + int(draft.get("method.max_completion_length"))
        why = f"prompts have up to {_LONGEST_PROMPT:,} tokens; there, any length"
        why = "a row with a longer prompt is left out; there, the prompt is cut" if given else why
        draft.changed("max_prompt_length", "data.max_length", longest, why)
    draft.put("data.overlong", "drop")


def is_gkd(draft: Draft) -> bool:
    """Whether a TRL config is that of on-policy distillation."""
    return draft.has("teacher_model_name_or_path")


def of_gkd(draft: Draft) -> None:
    """The keys of TRL's GKDConfig."""
    draft.put("method.type", "distill")
    draft.move("teacher_model_name_or_path", "method.teacher", lambda name: {"name_or_path": str(name)})
    draft.drop({"teacher_model_init_kwargs": "the plan decides how the teacher is loaded"}, "changed")
    draft.drop({"seq_kd": "the teacher writes no answers: generate them first, and train on them"}, "refused")
    draft.move("temperature", "method.temperature", number)
    draft.default("method.temperature", 0.9, "temperature")
    draft.put("method.sampling_temperature", draft.get("method.temperature"))
    draft.put("method.train_on", "last")
    draft.move("beta", "method.beta", number)
    draft.default("method.beta", 0.5, "beta")
    share = draft.take("lmbda")
    why = "this share of the examples of each batch; there, of the batches"
    share = 0.5 if share is None else number(share)
    if share in (0, 1):
        draft.translated("lmbda", "method.on_policy", share)
    else:
        draft.changed("lmbda", "method.on_policy", share, why)
    if draft.get("method.on_policy"):
        draft.move("max_new_tokens", "method.max_completion_length")
        draft.default("method.max_completion_length", 128, "max_new_tokens")
    draft.drop({"max_new_tokens": "no answers are sampled"})
