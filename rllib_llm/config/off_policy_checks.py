"""Corrections of older data, checked before anything starts."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.checks import require


def check_off_policy(config: Any) -> None:
    """Raises ValueError for bounds between which nothing lies, and for older data without a
    correction."""
    require(
        config.off_policy_lower < config.off_policy_upper, "off_policy_lower",
        config.off_policy_lower, f"below off_policy_upper={config.off_policy_upper!r}",
        "weights are held between them", "Use 0 for no bound",
    )  # fmt: skip
    lower, upper = config.rejection_lower, config.rejection_upper
    if config.rejection is not None:
        require(
            lower is not None or upper is not None, "rejection_upper", upper,
            f"a number with rejection={config.rejection!r}", "without a bound nothing is rejected",
            "Set 0.05, say, for the mean k3 of completions",
        )  # fmt: skip
        require(
            lower is None or upper is None or lower < upper, "rejection_lower", lower,
            f"below rejection_upper={upper!r}", "what lies between them is kept", "Leave one out",
        )  # fmt: skip
    for name, is_older in (
        ("max_staleness", config.max_staleness > 0), ("oversample", config.oversample > 1),
    ):  # fmt: skip
        require(
            not is_older or config.off_policy is not None, "off_policy", config.off_policy,
            f"set with {name}={getattr(config, name)!r}",
            "tokens of older weights bias the plain loss, and training may collapse",
            "Set off_policy='decoupled', or 'bypass' to clip the ratio to the sampler's log-probs",
        )  # fmt: skip


def check_replay(config: Any) -> None:
    """Raises ValueError for replayed groups without a correction, or more than the buffer holds."""
    groups, capacity = config.replay_groups, config.replay_capacity
    if not groups:
        return
    require(
        config.off_policy is not None, "off_policy", config.off_policy,
        f"set with replay_groups={groups!r}",
        "replayed tokens are of older weights and bias the plain loss",
        "Set off_policy='decoupled'",
    )  # fmt: skip
    require(
        config.critic == "none" or config.off_policy == "decoupled", "off_policy",
        config.off_policy, f"'decoupled' with replay_groups={groups!r} and a critic",
        "only then are old values computed again, by the critic as it is", "Set it",
    )  # fmt: skip
    require(
        capacity is None or capacity >= groups, "replay_capacity", capacity,
        f"at least replay_groups={groups!r}", "they are drawn from it", "Raise it",
    )  # fmt: skip
