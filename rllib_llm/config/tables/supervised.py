"""What supervised stages and the pretraining share learn from."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.setting import Section, Setting

SUPERVISED = Section(
    "training",
    "The data set.",
    (
        Setting(
            name="data",
            type=Any,
            default=None,
            meaning="a file (JSONL, Parquet, text), a data-set folder, a hub id, or the dotted "
            "path of a function returning rows",
            note="Or {path: ..., split: ..., limit: ..., kwargs: ...}.",
            trl=("train_dataset",),
            also=("dataset", "dataset_name", "train_data", "train_file"),
        ),
        Setting(
            name="eval_data",
            type=Any,
            default=None,
            meaning="held-out rows, the same way",
            note="None: no evaluation.",
            trl=("eval_dataset",),
            also=("validation_data", "eval_file"),
        ),
        Setting(
            name="max_length",
            type=int,
            default=256,
            least=2,
            unit="tokens",
            meaning="what is kept of each text",
            reason="every token but the first is predicted",
            remedy="Raise it to the tokens of your texts",
            also=("max_seq_length", "max_seq_len", "model_max_length"),
        ),
        Setting(
            name="shuffle",
            type=bool,
            default=True,
            meaning="whether rows are drawn in a seeded order, new in every epoch",
            trl=("shuffle_dataset",),
        ),
    ),
)

LOSS_ON = Setting(
    name="loss_on",
    type=str,
    default="completion",
    choices=("completion", "all"),
    meaning="which tokens are targets",
    note='"completion" leaves prompts and user turns out of the loss; "all" does not.',
    remedy="Use 'completion' to leave prompts out",
    trl=("completion_only_loss", "assistant_only_loss"),
)

REWARD_MODEL = Section(
    "training",
    "The scores.",
    (
        Setting(
            name="center_rewards_coeff",
            type=float,
            default=0.0,
            least=0,
            meaning="the weight of the squared scores, which holds their mean near 0",
            note='Eisenstein et al. 2023, "Helping or Herding?"; 0: off, 0.01 is usual.',
            reason="it weighs a loss",
            remedy="Use 0 to switch it off",
            trl=("center_rewards_coefficient",),
        ),
        Setting(
            name="normalization_data",
            type=Any,
            default=None,
            meaning="reference samples whose scores get mean 0 and standard deviation 1",
            note="Texts as for SFT, usually the policy's before training. Each is read to its "
            "first `max_length` tokens, EOS included. None: the held-out pairs.",
        ),
    ),
)

PTX = Section(
    "training",
    "The pretraining loss.",
    (
        Setting(
            name="ptx_coeff",
            type=float,
            default=0.0,
            least=0,
            meaning="γ, the weight of the mean cross-entropy of pretraining tokens",
            note="InstructGPT: 27.8 against a loss summed differently; here 0.1 to 1 is a start. "
            "0: only measured.",
            reason="it weighs a loss",
            remedy="Use 0 to switch it off",
            also=("ptx_coef", "ptx_loss_coef", "gamma_ptx"),
        ),
        Setting(
            name="ptx_data",
            type=Any,
            default=None,
            meaning="a file, data set, hub id or dotted path of pretraining texts",
            note="None: no pretraining loss.",
            also=("pretrain_data", "pretraining_data"),
        ),
        Setting(
            name="ptx_eval_data",
            type=Any,
            default=None,
            meaning="held-out pretraining texts, the same way",
            note="Every evaluation reports their loss as eval/ptx_loss, in nats per token. None: "
            "not measured.",
        ),
        Setting(
            name="ptx_batch_size",
            type=int,
            default=8,
            least=1,
            unit="texts",
            meaning="the pretraining texts per optimiser step and learner",
            reason="it counts texts",
            remedy="Raise it",
        ),
        Setting(
            name="ptx_max_length",
            type=int,
            default=128,
            least=2,
            unit="tokens",
            meaning="what is kept of each pretraining text",
            reason="every token but the first is predicted",
            remedy="Raise it",
        ),
    ),
)
