"""What the settings of `RLHFConfig` may be."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from rllib_llm.algorithms.settings.checks import check_range, is_number, require
from rllib_llm.engines.params import SamplingParams
from rllib_llm.numerics.losses import POLICY_LOSSES, REDUCTIONS

CRITICS = ("shared", "separate", "none")


def check_choices(config: Any) -> None:
    """Raises ValueError for a name that is not known."""
    choices = {
        "critic": CRITICS,
        "ref_kl_in": ("reward", "loss"),
        "ref_kl_estimator": ("k1", "k2", "k3", "full"),
        "policy_loss": tuple(POLICY_LOSSES),
        "loss_reduction": tuple(REDUCTIONS),
        "importance_sampling": (None, "truncate", "mask"),
        "importance_sampling_level": ("token", "sequence"),
        "weights_transport": ("store", "cuda_ipc", "nixl"),
    }
    for name, allowed in choices.items():
        require(
            getattr(config, name) in allowed, name, getattr(config, name), f"one of {allowed}",
            "no other is known", "Choose one of them",
        )  # fmt: skip


def check_sampling(config: Any) -> None:
    """Raises ValueError for completions that cannot be sampled, or not be shared out."""
    total, group = config.total_train_batch_size, config.num_completions
    require(
        group >= 1, "num_completions", group, "at least 1", "it counts completions of a prompt",
        "Use 1 for a single one",
    )  # fmt: skip
    require(
        total % group == 0, "train_batch_size_per_learner", config.train_batch_size_per_learner,
        f"such that all learners' rows ({total}) are a multiple of num_completions={group}",
        "the completions of a prompt stay together", f"Use {max(1, total // group) * group}",
    )  # fmt: skip
    size = config.minibatch_size
    require(
        size is None or size <= config.train_batch_size_per_learner, "minibatch_size", size,
        f"at most train_batch_size_per_learner={config.train_batch_size_per_learner}",
        "a mini-batch is a part of the batch", "Lower it, or set None for the whole batch",
    )  # fmt: skip
    stops = config.stop_token_ids
    is_list = isinstance(stops, list | tuple) and all(isinstance(i, Integral) for i in stops)
    require(
        stops is None or is_list,
        "stop_token_ids", stops, "a list of token ids, or None",
        "any of them ends a completion", "Write [2] for a single one",
    )  # fmt: skip
    SamplingParams(  # checks the rest
        pad_token_id=0,
        stop_token_ids=tuple(stops or ()),
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
    )


def check_ranges(config: Any) -> None:
    """Raises ValueError for a number outside its range."""
    check_range(
        config, "sampling_batch_size", "evaluation_duration", least=1,
        reason="it counts completions", remedy="Raise it",
    )  # fmt: skip
    check_range(
        config, "log_samples_every", "num_logged_samples", least=0,
        reason="it counts", remedy="Use 0 for none",
    )  # fmt: skip
    check_range(
        config, "ref_kl_coeff", "vf_loss_coeff", least=0, reason="it weighs a part of the loss",
        remedy="Use 0 to switch it off",
    )  # fmt: skip


def check_transport(config: Any) -> None:
    """Raises ValueError where weights cannot go the way they are told to."""
    check_range(
        config, "weights_keep", least=1, reason="receivers ask for the latest weights",
        remedy="Use 1",
    )  # fmt: skip
    if config.weights_transport == "store" or config.in_evaluation:
        return
    share = "Give learner and samplers fractions of one GPU"
    sharded = config.num_learners > 1 and config.learner_strategy == "fsdp"
    on_gpu = {
        "num_gpus_per_learner": (config.num_gpus_per_learner, "above 0", "they stay there", share),
        "num_gpus_per_env_runner": (
            config.num_gpus_per_env_runner, "above 0", "they are read there", share,
        ),
    }  # fmt: skip
    rules = {
        "num_env_runners": (config.num_env_runners, "above 0", "others share the module", "Use 1"),
        **(on_gpu if config.weights_transport == "cuda_ipc" else {}),
        "engine": (config.engine == "torch", "'torch'", "others load from host memory", "Use it"),
        "learner_strategy": (not sharded, "'ddp'", "no learner has all weights", "Use 'ddp'"),
        "weights_checksum": (
            not config.weights_checksum, "False", "it is computed in host memory", "Leave it out",
        ),
        "weights_name": (
            config.weights_name is None, "None", "who follows reads from the store", "Leave it out",
        ),
    }  # fmt: skip
    for name, (right, rule, reason, remedy) in rules.items():
        require(
            bool(right), name, getattr(config, name),
            f"{rule} with weights_transport={config.weights_transport!r}", reason,
            f"{remedy}, or weights_transport='store'",
        )  # fmt: skip


def check_loss(config: Any) -> None:
    """Raises ValueError for numbers of an RLHF config that a loss or a score cannot use."""
    not_negative = (lambda x: x >= 0, "at least 0")
    positive = (lambda x: x > 0, "above 0")
    share = (lambda x: 0 <= x <= 1, "in [0, 1]")
    rules = {
        "clip_param": (*not_negative, "ratios are held to 1 - it and 1 + it", "PPO uses 0.2"),
        "clip_param_high": (*not_negative, "ratios are held to 1 + it", "DAPO uses 0.28"),
        "vf_clip_param": (*positive, "values are held to the old ones +- it", "None: no clipping"),
        "gamma": (*share, "later rewards are discounted by it", "Use 1 for completions"),
        "lambda_": (*share, "later TD errors are discounted by it", "Use 0.95"),
        "target_kl": (*positive, "epochs stop when the policy is farther away", "None: never"),
        "ref_kl_target": (*positive, "the coefficient is steered by kl/target - 1", "None: fixed"),
        "ref_kl_horizon": (*positive, "it is divided by", "Use 10000"),
        "importance_sampling_cap": (*positive, "it is the largest weight", "Use 2"),
        "score_clip": (*positive, "scores are held to +- it", "None: no clipping"),
        "missing_eos_penalty": (*not_negative, "it is taken off the score", "0: none"),
        "length_penalty": (*not_negative, "it is taken off the score per token", "0: none"),
        "overlong_buffer": (
            lambda x: 0 <= x <= config.max_new_tokens, f"in 0..max_new_tokens"
            f"={config.max_new_tokens}", "it is the last so many tokens", "0: no punishment",
        ),
        "dual_clip": (
            lambda x: x > 1 and config.policy_loss != "cispo",
            f"above 1, or None with policy_loss={config.policy_loss!r}",
            "it bounds ratios of negative advantages, which cispo does not have in its loss",
            "Ye et al. use 3",
        ),
    }  # fmt: skip
    for name, (holds, rule, reason, remedy) in rules.items():
        value = getattr(config, name)
        right = value is None or is_number(value) and holds(value)
        require(right, name, value, rule, reason, remedy)
