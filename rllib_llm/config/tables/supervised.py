"""Settings of supervised data (SFT, pretraining loss) and of direct preference optimisation."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.config.setting import Section, Settings, setting
from rllib_llm.numerics.losses import PREFERENCE_LOSSES


class Supervised(Settings):
    """The data set."""

    data: Any = setting(
        None,
        "a file (JSONL, Parquet, text), a data-set folder, a hub id, or the dotted "
        "path of a function returning rows",
        note="Or {path: ..., split: ..., limit: ..., kwargs: ...}.",
        trl=("train_dataset",),
        also=("dataset", "dataset_name", "train_data", "train_file"),
    )
    eval_data: Any = setting(
        None,
        "held-out rows, the same way",
        note="None: no evaluation.",
        trl=("eval_dataset",),
        also=("validation_data", "eval_file"),
    )
    max_length: int = setting(
        256,
        "what is kept of each text",
        unit="tokens",
        least=2,
        also=("max_seq_length", "max_seq_len", "model_max_length"),
        reason="every token but the first is predicted",
        remedy="Raise it to the tokens of your texts",
    )
    shuffle: bool = setting(
        True,
        "whether rows are drawn in a seeded order, new in every epoch",
        trl=("shuffle_dataset",),
    )


SUPERVISED = Section.of("training", Supervised)


class LossOn(Settings):
    """The loss."""

    loss_on: Literal["completion", "all"] = setting(
        "completion",
        "which tokens are targets",
        note='"completion" leaves prompts and user turns out of the loss; "all" does not.',
        trl=("completion_only_loss", "assistant_only_loss"),
        remedy="Use 'completion' to leave prompts out",
    )


LOSS_ON = Section.of("training", LossOn)


class RewardModel(Settings):
    """The scores."""

    center_rewards_coeff: float = setting(
        0.0,
        "the weight of the squared scores, which holds their mean near 0",
        note='Eisenstein et al. 2023, "Helping or Herding?"; 0: off, 0.01 is usual.',
        least=0,
        trl=("center_rewards_coefficient",),
        reason="it weighs a loss",
        remedy="Use 0 to switch it off",
    )
    normalization_data: Any = setting(
        None,
        "reference samples whose scores get mean 0 and standard deviation 1",
        note="Texts as for SFT, usually the policy's before training. Each is read to its "
        "first `max_length` tokens, EOS included. None: the held-out pairs.",
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
        also=("ptx_coef", "ptx_loss_coef", "gamma_ptx"),
        reason="it weighs a loss",
        remedy="Use 0 to switch it off",
    )
    ptx_data: Any = setting(
        None,
        "a file, data set, hub id or dotted path of pretraining texts",
        note="None: no pretraining loss.",
        also=("pretrain_data", "pretraining_data"),
    )
    ptx_eval_data: Any = setting(
        None,
        "held-out pretraining texts, the same way",
        note="Every evaluation reports their loss as eval/ptx_loss, in nats per token. None: "
        "not measured.",
    )
    ptx_batch_size: int = setting(
        8,
        "the pretraining texts per optimiser step and learner",
        unit="texts",
        least=1,
        reason="it counts texts",
        remedy="Raise it",
    )
    ptx_max_length: int = setting(
        128,
        "what is kept of each pretraining text",
        unit="tokens",
        least=2,
        reason="every token but the first is predicted",
        remedy="Raise it",
    )


PTX = Section.of("training", Ptx)


class Preferences(Settings):
    """The loss of preference pairs."""

    loss_type: str = setting(
        "sigmoid",
        "which loss is taken of a pair",
        note='"sigmoid": DPO. "ipo": the margin is led to 1/(2β) instead of ever upwards (Azar '
        'et al. 2023). "kto": each completion is judged for itself, against the policy\'s KL '
        "from the reference, for which two more forward passes are made (Ethayarajh et al. "
        '2024). "sigmoid_norm": DPO on log-probs per token, so that long completions weigh no '
        "more; with `reference_free` it is SimPO (Meng et al. 2024).",
        choices=PREFERENCE_LOSSES,
        remedy="Use 'sigmoid' for DPO",
    )
    ref_kl_coeff: float = setting(
        0.1,
        "β, how much a log-ratio to the reference counts",
        note="Lower lets the policy move farther away; τ of IPO. 0.1 to 0.5 for sums over "
        "tokens; per token about 2 to 10.",
        above=0,
        trl=("beta",),
        reason="log-ratios are multiplied by it",
        remedy="DPO's 0.1 is a start",
    )
    label_smoothing: float = setting(
        0.0,
        "the share of the pairs that are taken to be the wrong way round",
        note="Below 0.5 (conservative DPO); 0: none. For the sigmoid losses.",
        least=0,
        remedy="Use 0 for none",
    )
    target_margin: float = setting(
        0.0,
        "γ, what the rewards of a pair are to be apart",
        note="SimPO: about β/2; 0: none. For the sigmoid losses.",
        least=0,
        trl=("simpo_gamma",),
        reason="chosen completions are to be the better ones",
        remedy="Use 0 for none",
    )
    reference_free: bool = setting(
        False, "whether log-probs stand for log-ratios, without a reference"
    )


PREFERENCES = Section.of("training", Preferences)
