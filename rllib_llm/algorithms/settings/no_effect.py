"""Warnings about settings that do nothing under the others: a typo in a plan costs a night."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

_CRITIC = ("vf_clip_param", "vf_loss_coeff")


def warn_of_no_effect(config: Any) -> None:
    """One warning for every setting that was changed from its default and is not used."""
    default = type(config)()
    for name, why, remedy in _unused(config):
        if hasattr(config, name) and getattr(config, name) != getattr(default, name):
            warnings.warn(
                f"{name}={getattr(config, name)!r} has no effect {why}. {remedy}.", stacklevel=4
            )


def _unused(config: Any) -> Iterator[tuple[str, str, str]]:
    """(setting, why it is not used, remedy) under this config, changed or not."""
    yield "grad_clip_by", "here: gradients are clipped by their global norm", "Remove it"
    if config.lr_schedule == "constant":
        yield "lr_num_updates", "with lr_schedule='constant'", "Choose 'linear' or 'cosine'"
    yield "torch_compile_worker", "here: decoding has a loop of its own", "Remove it"
    what = "torch_compile_learner_what_to_compile"
    yield what, "here: it is the trunk's layers that are compiled", "Remove it"
    if config.num_learners < 2:
        yield "learner_strategy", f"with num_learners={config.num_learners}", "Use 2 or more"
    if config.num_learners == 0:
        yield "learner_timeout_s", "with num_learners=0: nobody is waited for", "Remove it"
    for name in config.ignored_settings:
        yield name, f"in {config.algo_class.__name__}", "Remove it"
    if hasattr(config, "ref_kl_in"):
        yield from _unused_kl(config)
        yield from _unused_policy(config)
        yield from _unused_sampling(config)


def _unused_sampling(config: Any) -> Iterator[tuple[str, str, str]]:
    if config.engine == "torch":
        yield "engine_settings", "with engine='torch'", "Choose 'vllm', or remove it"
    if config.in_evaluation or config.num_env_runners:
        if config.engine != "torch":
            yield "cuda_graphs", f"with engine={config.engine!r}", "Remove it"
        return
    where = "with num_env_runners=0: the driver's process samples and learns in turn"
    yield "pipeline_depth", where, "Use 1 or more"
    if config.engine == "vllm":
        why = "with num_env_runners=0: sampler and learner share one module"
        yield "engine", why, "Use 1 or more"


def _unused_kl(config: Any) -> Iterator[tuple[str, str, str]]:
    if config.ref_kl_target is None:
        yield "ref_kl_horizon", "without ref_kl_target: the coefficient is fixed", "Set a target"
    if not config.ref_kl_coeff:
        for name in ("ref_kl_target", "ref_kl_in", "ref_kl_estimator", "reference_in"):
            yield name, "with ref_kl_coeff=0: there is no KL", "Start from a coefficient above 0"
    if config.ref_kl_in == "reward":
        yield "ref_kl_unbiased", "with ref_kl_in='reward': it is for the loss", "Remove it"
    elif config.ref_kl_estimator == "full":
        yield "ref_kl_unbiased", "with ref_kl_estimator='full': nothing is sampled", "Remove it"
    elif config.ref_kl_estimator == "k1" and config.ref_kl_coeff and not config.ref_kl_unbiased:
        # The mean of grad log pi over pi's own tokens is 0, and k1's gradient is no more than that.
        why = "as k1 in the loss without ref_kl_unbiased: the mean of its gradient is 0"
        for name in ("ref_kl_in", "ref_kl_estimator"):
            yield name, why, "Choose 'k2' or 'k3', or set ref_kl_unbiased=True"


def _unused_policy(config: Any) -> Iterator[tuple[str, str, str]]:
    if config.critic == "none":
        for name in _CRITIC:
            yield name, "with critic='none'", "Remove it"
    exact = config.dtype == "float32" and config.autocast_dtype is None
    if not config.recompute_old_logprobs and (exact or config.critic == "none"):
        yield (
            "importance_sampling",
            "where the sampler's log-probs are the old ones: every weight is 1",
            "Set recompute_old_logprobs=True",
        )
    if config.critic != "separate":
        yield "critic_model", f"with critic={config.critic!r}", "Use critic='separate'"
    if config.importance_sampling is None:
        for name in ("importance_sampling_cap", "importance_sampling_level"):
            yield name, "with importance_sampling=None", "Choose 'truncate'"
