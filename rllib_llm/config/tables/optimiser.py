"""The optimiser, its schedule, and how a batch is cut into its steps."""

from __future__ import annotations

from typing import Literal

from rllib_llm.config.setting import Condition, Section, Settings, setting

DECAY = Condition(
    "lr_schedule is not 'constant'",
    lambda c: c.lr_schedule != "constant",
    "with lr_schedule='constant'",
    "Choose 'linear' or 'cosine'",
)
NEVER_CLIPPED_SO = Condition(
    "never",
    lambda c: False,
    "here: gradients are clipped by their global norm",
    never=True,
)
SHARE = "it says how much goes through the model at a time"
LEAVE_OUT = "Raise it, or use null to leave it out"


class Optimiser(Settings):
    """The optimiser, and how a batch is cut into its steps."""

    lr: float = setting(
        1e-5,
        "the peak learning rate",
        least=0,
        trl=("learning_rate",),
        also=("learning_rate", "lr_rate", "step_size", "actor_lr", "actor_learning_rate"),
        reason="schedules here count optimiser updates, not environment steps",
        remedy="Use lr_schedule, lr_num_warmup_updates and lr_num_updates",
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        "the decay of the learning rate to 0 after warm-up",
        trl=("lr_scheduler_type",),
        also=("lr_scheduler", "scheduler_type"),
    )
    lr_num_warmup_updates: int = setting(
        0,
        "the length of the linear warm-up",
        note=(
            "Step u (from 0) of n uses (u + 1)/(n + 1) of `lr`; the first step is not at 0, as "
            "in transformers."
        ),
        unit="optimiser steps",
        least=0,
        trl=("warmup_steps",),
        also=("num_warmup_steps", "lr_warmup_steps", "warmup_ratio"),
        remedy="Use 0 for none",
    )
    lr_num_updates: int | None = setting(
        None,
        "the step at which the decay reaches 0; later steps change nothing",
        unit="optimiser steps",
        least=1,
        acts=(DECAY,),
        also=("num_training_steps", "lr_decay_steps"),
    )
    adam_betas: tuple[float, float] = setting(
        (0.9, 0.999),
        "the decay rates of AdamW's two moments",
        trl=("adam_beta1", "adam_beta2"),
        also=("betas",),
    )
    adam_epsilon: float = setting(
        1e-5,
        "AdamW's ε, added to the root of the second moment",
        note=(
            '1e-5 as in the original RLHF code (vwxyzjn, "The N implementation details of RLHF '
            'with PPO").'
        ),
        above=0,
        also=("adam_eps", "eps"),
        reason="gradients are divided by it",
        remedy="Use 1e-8",
    )
    weight_decay: float = setting(
        0.0,
        "AdamW's decoupled weight decay",
        note="Not applied to norms and biases, as in transformers' Trainer.",
        least=0,
        reason="it shrinks the weights",
        remedy="Use 0 for none",
    )
    grad_clip: float | None = setting(
        1.0,
        "the maximum global norm of gradients",
        above=0,
        trl=("max_grad_norm",),
        also=("clip_grad", "gradient_clipping", "grad_norm"),
        reason="gradients are divided by it",
        remedy="Use null for none",
    )
    grad_clip_by: str = setting(
        "global_norm", "the kind of gradient clipping", acts=(NEVER_CLIPPED_SO,)
    )
    num_epochs: int = setting(
        1,
        "the number of passes of an iteration over its batch",
        least=1,
        trl=("num_iterations", "num_ppo_epochs"),
        rllib=("num_sgd_iter",),
        also=("ppo_epochs", "num_policy_epochs", "mu"),
        reason="an iteration without rows or passes learns nothing",
        remedy="Raise it",
    )
    train_batch_size_per_learner: int = setting(
        64,
        "the number of completions, texts or pairs per learner in an iteration",
        unit="rows",
        least=1,
        trl=("generation_batch_size",),
        rllib=("train_batch_size",),
        also=("batch_size", "rollout_batch_size", "train_batch"),
        reason="an iteration without rows or passes learns nothing",
        remedy="Raise it",
    )
    minibatch_size: int | None = setting(
        None,
        "the number of rows per optimiser step and learner",
        note="None: all. A default above the batch size means the whole batch.",
        unit="rows",
        least=1,
        trl=("gradient_accumulation_steps",),
        rllib=("sgd_minibatch_size",),
        also=("mini_batch_size", "ppo_mini_batch_size", "local_mini_batch_size"),
        reason=SHARE,
        remedy=LEAVE_OUT,
    )
    minibatch_tokens: int | None = setting(
        None,
        "the number of tokens per optimiser step and learner, instead of minibatch_size",
        note=(
            "Counts prompt and completion without padding, so short rows give more rows per step."
        ),
        unit="tokens",
        least=1,
        reason=SHARE,
        remedy=LEAVE_OUT,
    )
    micro_batch_size: int | None = setting(
        None,
        "the number of rows per forward and backward pass",
        note="Does not change the gradients.",
        unit="rows",
        least=1,
        trl=("per_device_train_batch_size",),
        also=("per_gpu_train_batch_size", "micro_train_batch_size"),
        reason=SHARE,
        remedy=LEAVE_OUT,
    )
    micro_batch_tokens: int | None = setting(
        16_384,
        "the number of tokens per forward and backward pass, padding included",
        note="Rows of similar length are grouped. Set None to use micro_batch_size.",
        unit="tokens",
        least=1,
        also=("ppo_max_token_len_per_gpu", "max_tokens_per_batch"),
        reason=SHARE,
        remedy=LEAVE_OUT,
    )
    refused_batch_dir: str | None = setting(
        None,
        "the folder for mini-batches with a non-finite loss",
        note="None: a new temporary folder, named in the log.",
    )


OPTIMISER = Section.of("training", Optimiser)
