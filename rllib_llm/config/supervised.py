"""Settings of supervised data (SFT, pretraining loss) and of direct preference optimisation."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.numerics.losses import PREFERENCE_LOSSES
from rllib_llm.shared.setting import Section, Settings, setting


class Supervised(Settings):
    """The data set."""

    data: Any = setting(
        None,
        "a file (JSONL, Parquet, text), a data-set folder, a hub id, or the dotted "
        "path of a function returning rows",
        note="Or {path: ..., split: ..., limit: ..., kwargs: ...}.",
        trl="train_dataset",
        also="dataset dataset_name train_data train_file",
    )
    eval_data: Any = setting(
        None,
        "held-out rows in the same form",
        note="None: no evaluation.",
        trl="eval_dataset",
        also="validation_data eval_file",
    )
    max_length: int = setting(
        256,
        "how much of each text is kept",
        unit="tokens",
        least=2,
        also="max_seq_length max_seq_len model_max_length",
        reason="every token but the first is predicted",
        remedy="Write 256, or the tokens of your longest text",
    )
    shuffle: bool = setting(
        True,
        "whether rows are drawn in a seeded random order, new in every epoch",
        trl="shuffle_dataset",
    )


SUPERVISED = Section.of("training", Supervised)


class LossOn(Settings):
    """The loss."""

    loss_on: Literal["completion", "all"] = setting(
        "completion",
        "the tokens in the loss",
        note='"completion": without prompts and user turns; "all": every token.',
        trl="completion_only_loss assistant_only_loss",
    )


LOSS_ON = Section.of("training", LossOn)


class RewardModel(Settings):
    """The scores."""

    center_rewards_coeff: float = setting(
        0.0,
        "the weight of the squared scores, which keeps their mean near 0",
        note='Eisenstein et al. 2023, "Helping or Herding?"; 0: off, 0.01 is usual.',
        least=0,
        trl="center_rewards_coefficient",
    )
    normalization_data: Any = setting(
        None,
        "reference texts on which scores are normalised to mean 0 and standard deviation 1",
        note="In the same form as SFT data, usually the policy's samples before training; each "
        "is truncated to `max_length` tokens, EOS included. None: the held-out pairs.",
    )


REWARD_MODEL = Section.of("training", RewardModel)


class Ptx(Settings):
    """The pretraining loss."""

    ptx_coeff: float = setting(
        0.0,
        "γ, the weight of the mean cross-entropy of pretraining tokens",
        note="InstructGPT: 27.8 against a loss summed differently; here 0.05 to 1 is a start. "
        "0: only measured.",
        least=0,
        also="ptx_coef ptx_loss_coef gamma_ptx",
    )
    ptx_data: Any = setting(
        None,
        "a file, data set, hub id or dotted path of pretraining texts",
        note="None: no pretraining loss.",
        also="pretrain_data pretraining_data",
    )
    ptx_eval_data: Any = setting(
        None,
        "held-out pretraining texts in the same form",
        note="Every evaluation reports their loss as eval/ptx_loss, in nats per token. None: "
        "not measured.",
    )
    ptx_batch_size: int = setting(
        8, "the pretraining texts per optimiser step and learner", unit="texts", least=1
    )
    ptx_max_length: int = setting(
        128, "how much of each pretraining text is kept", unit="tokens", least=2
    )


PTX = Section.of("training", Ptx)


class Preferences(Settings):
    """The loss of preference pairs."""

    loss_type: str = setting(
        "sigmoid",
        "the loss of a pair",
        note='"sigmoid": DPO. "ipo": drives the margin to 1/(2β) instead of ever upwards (Azar '
        'et al. 2023). "kto": scores each completion by itself, against the policy\'s KL to '
        "the reference, which takes two more forward passes (Ethayarajh et al. 2024). "
        '"sigmoid_norm": DPO on log-probs per token, so that long completions weigh no '
        "more; with `reference_free` it is SimPO (Meng et al. 2024).",
        choices=PREFERENCE_LOSSES,
    )
    ref_kl_coeff: float = setting(
        0.1,
        "β, the weight of log-ratios to the reference",
        note="Lower values let the policy move farther away; τ of IPO. 0.1 to 0.5 for sums over "
        "tokens; about 2 to 10 per token.",
        above=0,
        trl="beta",
        remedy="DPO's 0.1 is a start",
    )
    label_smoothing: float = setting(
        0.0,
        "the assumed share of wrongly labelled pairs",
        note="Below 0.5 (conservative DPO); 0: none. For the sigmoid losses.",
        least=0,
    )
    target_margin: float = setting(
        0.0,
        "γ, the target margin between the rewards of a pair",
        note="SimPO: about β/2; 0: none. For the sigmoid losses.",
        least=0,
        trl="simpo_gamma",
    )
    reference_free: bool = setting(
        False, "whether log-probs replace log-ratios, without a reference"
    )


PREFERENCES = Section.of("training", Preferences)
