"""What supervised stages and the pretraining share learn from."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.config.setting import Section, Settings, setting


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
