"""The ``method`` section: the training method, a tagged union on ``type``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from halftune.config.sections import LISTED, TYPED, Flag, Int, Number
from halftune.config.sections.method_base import (
    AnswerMethod,
    ConversationMethod,
    Method,
    PairMethod,
    RecordName,
    ReferenceMethod,
)
from halftune.config.sections.model import ModelSection, TeacherSection
from halftune.config.sections.rewards import RewardFunctionSection, ServerSection


class SftMethod(ConversationMethod):
    """Supervised fine-tuning on conversations."""

    title: ClassVar[str] = "Supervised fine-tuning"
    learns: ClassVar[str] = "the labelled tokens of conversations"

    type: Literal["sft"] = "sft"
    """Supervised fine-tuning."""

    loss: Literal["nll", "dft", "eaft"] = "nll"
    """`dft` weights the loss of each token with its probability (dynamic fine-tuning, arXiv:2508.05629), `eaft` with
    the entropy of the model's likeliest tokens (arXiv:2601.02151); the evaluation loss is the plain one."""

    eaft_alpha: Annotated[Number, Field(gt=0)] = 1.0
    """Exponent of the entropy, with `loss: eaft`."""

    eaft_tokens: Annotated[Int, Field(ge=2)] = 20
    """Number of most likely tokens for the entropy, with `loss: eaft`."""

    eaft_scale: Annotated[Number, Field(gt=0)] = 3.0
    """Divisor of the entropy in nats, with `loss: eaft`. LLaMA-Factory uses 3 (about ln 20), axolotl 1."""


class PretrainMethod(Method):
    """Continued pre-training on plain text: every token is trained, documents are cut into `data.max_length` pieces."""

    title: ClassVar[str] = "Pre-training"
    learns: ClassVar[str] = "every token of documents"
    records: ClassVar[tuple[RecordName, ...]] = ("document", "conversation")

    type: Literal["pretrain"]
    """Causal language modelling on plain text."""

    @property
    def labelled_share(self) -> float:
        return 1.0


DpoLoss = Literal["sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero",
                  "apo_down", "sigmoid_norm"]  # fmt: skip


class DpoMethod(PairMethod, ReferenceMethod, AnswerMethod):
    """Direct preference optimisation (arXiv:2305.18290) on pairs of answers."""

    title: ClassVar[str] = "Preference optimisation (DPO)"

    type: Literal["dpo"]
    """Direct preference optimisation: the model before training is the reference, and `data.max_length` limits each of
    the two answers with its prompt."""

    beta: Annotated[Number, Field(gt=0)] = 0.1
    """Strength of the constraint to the reference model; larger values keep the model closer to it."""

    loss: DpoLoss = "sigmoid"
    """Loss of a pair. `sigmoid` is that of the paper; docs/reference/losses.md has the formulas."""

    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs in the wrong order, for the losses sigmoid, robust and exo_pair."""

    sft_weight: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the chosen answer's cross-entropy, averaged over its tokens, added to the loss of the pair."""


class SimpoMethod(PairMethod, AnswerMethod):
    """SimPO (arXiv:2405.14734) on pairs of answers: no reference model, log-probabilities per token."""

    title: ClassVar[str] = "Preference optimisation (SimPO)"

    type: Literal["simpo"]
    """Preference optimisation without a reference model; `data.max_length` limits each of the two answers with its
    prompt."""

    beta: Annotated[Number, Field(gt=0)] = 2.0
    """Factor of the log-probability per token."""

    gamma: Annotated[Number, Field(ge=0)] = 1.0
    """Target margin between the rewards of the chosen and the rejected answer."""

    sft_weight: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the chosen answer's cross-entropy, averaged over its tokens, added to the loss of the pair."""


class OrpoMethod(PairMethod, AnswerMethod):
    """ORPO (arXiv:2403.07691) on pairs of answers: fine-tuning on the chosen answer, and its odds over the other."""

    title: ClassVar[str] = "Preference optimisation (ORPO)"

    type: Literal["orpo"]
    """Supervised fine-tuning on the chosen answer, with the odds ratio to the rejected one; no reference model.
    `data.max_length` limits each of the two answers with its prompt."""

    beta: Annotated[Number, Field(gt=0)] = 0.1
    """Weight of the odds ratio (λ in the paper)."""


class CpoMethod(PairMethod, AnswerMethod):
    """CPO (arXiv:2401.08417) on pairs of answers: no reference model."""

    title: ClassVar[str] = "Preference optimisation (CPO)"

    type: Literal["cpo"]
    """Preference optimisation without a reference model; `data.max_length` limits each of the two answers with its
    prompt."""

    beta: Annotated[Number, Field(gt=0)] = 0.1
    """Factor of the difference of the log-probabilities."""

    sft_weight: Annotated[Number, Field(ge=0)] = 1.0
    """Weight of the chosen answer's cross-entropy, averaged over its tokens, added to the loss of the pair."""


class RewardMethod(PairMethod):
    """A reward model on pairs of answers: one score per conversation (Bradley-Terry)."""

    title: ClassVar[str] = "Reward model"
    learns: ClassVar[str] = "scores of pairs of a chosen and a rejected answer, both in one forward pass"
    head: ClassVar[Literal["tokens", "score"]] = "score"

    type: Literal["reward"]
    """A reward model: the output layer is replaced by one that scores the last token, and `data.max_length` limits each
    of the two answers with its prompt."""

    center_coefficient: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the squared sum of a pair's scores in the loss (arXiv:2312.09244), which keeps scores near zero."""

    @property
    def labelled_share(self) -> float:
        return 0.0  # no logits of the vocabulary


class KtoMethod(ReferenceMethod, AnswerMethod):
    """Kahneman-Tversky optimisation (arXiv:2402.01306) on answers that are rated good or bad."""

    title: ClassVar[str] = "Preference optimisation (KTO)"
    learns: ClassVar[str] = "answers that are rated good or bad, a group of them in one forward pass"
    records: ClassVar[tuple[RecordName, ...]] = ("rated",)

    type: Literal["kto"]
    """Kahneman-Tversky optimisation: the model before training is the reference. A row has `label` or `kto_tag`:
    true for a good answer."""

    beta: Annotated[Number, Field(gt=0)] = 0.1
    """Strength of the constraint to the reference model; larger values keep the model closer to it."""

    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """`kto` compares with an estimate of the KL divergence from mismatched answers; `apo_zero_unpaired`
    (arXiv:2408.06266) compares with zero."""

    desirable_weight: Annotated[Number, Field(ge=0)] = 1.0
    """Weight of good answers in the loss."""

    undesirable_weight: Annotated[Number, Field(ge=0)] = 1.0
    """Weight of bad answers in the loss."""

    group_size: Annotated[Int, Field(ge=2)] = 4
    """Rows that estimate the KL divergence together: each prompt also gets the answer of another row of its group. A
    group is one example of a batch. TRL's groups are its `per_device_train_batch_size`."""

    @property
    def rows(self) -> int:
        return self.group_size if self.loss == "kto" else 1

    @property
    def segments(self) -> int:  # type: ignore[override]
        return 2 * self.group_size if self.loss == "kto" else 1


class GrpoMethod(Method):
    """Group-relative policy optimisation (arXiv:2402.03300): the model answers prompts, and functions reward it."""

    title: ClassVar[str] = "Reinforcement learning (GRPO)"
    learns: ClassVar[str] = "the model's own answers to prompts, by their rewards relative to the group's"
    records: ClassVar[tuple[RecordName, ...]] = ("prompt", "conversation")
    generates: ClassVar[bool] = True

    type: Literal["grpo"]
    """Reinforcement learning on groups of answers; the batch size counts prompts, and `data.max_length` limits prompt
    and answer together."""

    rewards: Annotated[tuple[RewardFunctionSection, ...], LISTED, Field(min_length=1)]
    """Functions that reward an answer; their weighted sum counts."""

    num_generations: Annotated[Int, Field(ge=2)] = 8
    """Answers to each prompt: a group."""

    max_completion_length: Annotated[Int, Field(ge=1)] = 256
    """Longest answer in tokens."""

    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Temperature of sampling, and of the log-probabilities in the loss."""

    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Top-p (nucleus) sampling."""

    top_k: Annotated[Int, Field(ge=0)] = 0
    """Sample from the k most likely tokens; 0: all tokens."""

    beta: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the model without its adapter; 0: not computed."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """Mean over tokens: `grpo` of each answer and then over answers; `dr_grpo` over `max_completion_length` tokens an
    answer (arXiv:2503.20783); `dapo` over all tokens of the batch (arXiv:2503.14476)."""

    scale_rewards: Flag = True
    """Divide advantages by the standard deviation of the group's rewards; Dr. GRPO does not."""

    num_iterations: Annotated[Int, Field(ge=1)] = 1
    """Updates of the weights for each batch of answers, within one step."""

    epsilon: Annotated[Number, Field(gt=0, lt=1)] = 0.2
    """From the second update on: tokens whose probability ratio to the sampling weights has left 1 ± `epsilon`, in the
    direction of the advantage, have no gradient."""

    epsilon_high: Annotated[Number, Field(gt=0)] | None = None
    """Another upper bound (0.28 in DAPO); `epsilon` by default."""

    importance_sampling: Literal["token", "sequence"] = "token"
    """`token`: a probability ratio for each token. `sequence`: their geometric mean (GSPO, arXiv:2507.18071)."""

    leave_one_out: Flag = False
    """Subtract the mean reward of the other answers of the group, as RLOO (arXiv:2402.14740)."""

    mask_truncated: Flag = False
    """Exclude answers that reach `max_completion_length` from the loss."""

    dynamic_sampling: Annotated[Int, Field(ge=0)] = 0
    """Where all answers to a prompt have the same reward, another prompt of the training data, drawn at random, takes
    its place, at most this many times (DAPO). Groups that are still equal are left out of the loss."""

    server: ServerSection | None = None
    """A vLLM server that samples the answers; by default, the trained model samples them."""

    @property
    def segments(self) -> int:  # type: ignore[override]
        return self.num_generations

    @property
    def answer_tokens(self) -> int:
        return self.max_completion_length


class DistillMethod(ConversationMethod):
    """Knowledge distillation: the model learns a teacher's probabilities of every token (arXiv:2306.13649, eq. 1)."""

    title: ClassVar[str] = "Distillation"
    learns: ClassVar[str] = "a teacher's probabilities at the labelled tokens of conversations"

    type: Literal["distill"]
    """Distillation: at every labelled token, the model learns the probabilities that a teacher gives to all tokens."""

    teacher: TeacherSection
    """The teacher model, or its name."""

    beta: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """0: forward KL divergence KL(teacher ‖ model). 1: reverse, KL(model ‖ teacher). Between: the generalised
    Jensen-Shannon divergence to the mixture with this share of the teacher, as in GKD."""

    temperature: Annotated[Number, Field(gt=0)] = 1.0
    """Divides the logits of both models before the divergence."""

    divergence_weight: Annotated[Number, Field(gt=0)] = 1.0
    """Weight of the divergence in the loss."""

    sft_weight: Annotated[Number, Field(ge=0)] = 0.0
    """Weight of the cross-entropy of answers in the data, added to the divergence."""

    sft_loss: Literal["nll", "dft"] = "nll"
    """With `sft_weight`: the cross-entropy, or each token's weighted with its probability. `dft` with the model itself
    as teacher is anchored fine-tuning (ASFT, arXiv:2509.23753)."""

    on_policy: Annotated[Number, Field(ge=0, le=1)] = 0.0
    """Share of the examples whose last answer is replaced by the model's own in every step (λ in GKD)."""

    max_completion_length: Annotated[Int, Field(ge=1)] = 256
    """With `on_policy`: the longest answer of the model in tokens."""

    sampling_temperature: Annotated[Number, Field(gt=0)] = 1.0
    """With `on_policy`: the temperature of sampling."""

    @property
    def samples_answers(self) -> bool:
        return self.on_policy > 0

    @property
    def growth(self) -> int:  # type: ignore[override]
        return self.max_completion_length if self.on_policy else 0

    @property
    def teacher_model(self) -> ModelSection:
        return ModelSection(**self.teacher.model_dump())


MethodSection = Annotated[
    SftMethod
    | PretrainMethod
    | DpoMethod
    | RewardMethod
    | KtoMethod
    | SimpoMethod
    | OrpoMethod
    | CpoMethod
    | GrpoMethod
    | DistillMethod,
    Field(discriminator="type"),
    TYPED,
]

METHOD_SECTIONS: dict[str, type[Method]] = {
    get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(MethodSection)[0])
}
"""The sections by their ``type``."""
