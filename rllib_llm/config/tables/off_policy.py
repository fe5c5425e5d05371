"""Corrections for tokens sampled by older weights or by another engine; replay of groups."""

from __future__ import annotations

from typing import Literal

from rllib_llm.config.setting import Condition, Section, Settings, setting
from rllib_llm.numerics.kl import KL_ESTIMATORS
from rllib_llm.numerics.off_policy import WEIGHT_LEVELS, WEIGHT_MODES
from rllib_llm.rollouts.replay import EVICTIONS

OFF_POLICIES = ("bypass", "decoupled", "decoupled_loglinear")

CHOSEN = Condition(
    "off_policy is set",
    lambda c: c.off_policy is not None,
    "with off_policy=None",
    "Set off_policy='decoupled'",
)
DECOUPLED = Condition(
    "off_policy is 'decoupled' or 'decoupled_loglinear'",
    lambda c: c.off_policy in ("decoupled", "decoupled_loglinear"),
    "with off_policy={config.off_policy!r}: the ratio is to the sampler's own log-probs",
    "Set off_policy='decoupled'",
)
WEIGHED = Condition(
    "off_policy_weights is set",
    lambda c: c.off_policy_weights is not None,
    "with off_policy_weights=None",
    "Choose 'truncate'",
)
REJECTS = Condition(
    "rejection is set",
    lambda c: c.rejection is not None,
    "with rejection=None",
    "Set rejection='k3'",
)


class OffPolicy(Settings):
    """Corrections for data that older weights sampled."""

    off_policy: str | None = setting(
        None,
        "the correction of off-policy data; None: the data is fresh",
        note=(
            '"decoupled": the learner computes the log-probs of the policy before the update, '
            "relative to which ratios are clipped, and weights each token by its probability "
            'there over the sampler\'s (AReaL, Fu et al. 2025); "decoupled_loglinear": the same '
            "without that forward pass, interpolating between the sampler's and the current "
            'log-probs by the token\'s age (A-3PO); "bypass": ratios are relative to the '
            "sampler's log-probs, whatever their age. With None, old log-probs are the "
            "sampler's too, but with a critic in half precision they are recomputed."
        ),
        choices=OFF_POLICIES,
        also=(
            "recompute_old_logprobs",
            "use_decoupled_loss",
            "rollout_correction",
            "prox_logp_method",
            "bypass_mode",
        ),
        remedy="Use 'decoupled'",
    )
    off_policy_weights: str | None = setting(
        "truncate",
        "the treatment of importance weights outside the bounds; None: all weights are 1",
        note=(
            '"truncate": clip them to the bounds; "mask": leave the token (or completion) out '
            "of the loss, but not out of its denominator."
        ),
        choices=WEIGHT_MODES,
        acts=(DECOUPLED,),
        trl=("vllm_importance_sampling_correction",),
        also=("importance_sampling", "behav_imp_weight_mode", "rollout_is"),
        remedy="Use 'truncate'",
    )
    off_policy_level: str = setting(
        "token",
        "the unit of an importance weight",
        note='"sequence": a whole completion; unbiased, but far from 1 for long ones.',
        choices=WEIGHT_LEVELS,
        acts=(DECOUPLED, WEIGHED),
        trl=("vllm_importance_sampling_mode",),
    )
    off_policy_lower: float = setting(
        0.0,
        "the smallest importance weight",
        note="IcePop masks below 0.5.",
        least=0,
        acts=(DECOUPLED, WEIGHED),
        remedy="Use 0 for no bound",
    )
    off_policy_upper: float = setting(
        2.0,
        "the largest importance weight (Yao et al. 2025: 2)",
        above=0,
        acts=(DECOUPLED, WEIGHED),
        trl=("vllm_importance_sampling_cap",),
        also=(
            "importance_sampling_cap",
            "tis_imp_ratio_cap",
            "behav_imp_weight_cap",
            "rollout_is_threshold",
        ),
        reason="it is the largest weight",
        remedy="Use 2",
    )
    rejection: str | None = setting(
        None,
        "the estimator of the KL to the sampler's policy by which tokens are left out of "
        "the loss; None: none is",
        note=(
            "Denominators still count rejected tokens (`off_policy/rejected_share`). k1 is "
            "minus the log-ratio; k3 is never negative."
        ),
        choices=KL_ESTIMATORS,
        acts=(CHOSEN,),
        also=("rollout_rs",),
        remedy="Use 'k3'",
    )
    rejection_level: Literal["sequence", "token"] = setting(
        "sequence",
        "the unit of rejection",
        note=('"sequence": completions, by the mean over their tokens; "token": single tokens.'),
        acts=(CHOSEN, REJECTS),
    )
    rejection_lower: float | None = setting(
        None, "the lower bound of rejection; None: none", unit="nats", acts=(CHOSEN, REJECTS)
    )
    rejection_upper: float | None = setting(
        None,
        "the upper bound of rejection; None: none",
        note="0.05 suits the mean k3 of completions.",
        unit="nats",
        acts=(CHOSEN, REJECTS),
        also=("rollout_rs_threshold",),
    )


OFF_POLICY = Section.of("training", OffPolicy)


REPLAYS = Condition(
    "replay_groups is above 0",
    lambda c: bool(c.replay_groups),
    "with replay_groups=0: nothing is replayed",
    "Set replay_groups",
)


class Replay(Settings):
    """Groups that are learnt from more than once."""

    replay_groups: int = setting(
        0,
        "the number of replayed groups in each batch, in addition to its fresh ones",
        note="0: none. They are older than the policy, so `off_policy` must be set.",
        unit="groups",
        least=0,
        short="groups",
        also=("replay_size", "num_replayed_groups"),
        remedy="Use 0 for none",
    )
    replay_capacity: int | None = setting(
        None,
        "the capacity of the replay buffer; None: four batches",
        unit="groups",
        least=1,
        acts=(REPLAYS,),
        short="capacity",
        also=("buffer_size", "replay_buffer_capacity"),
    )
    replay_eviction: str = setting(
        "oldest",
        "the group that a full buffer evicts",
        note='"most_used": the oldest of those trained most often.',
        choices=EVICTIONS,
        acts=(REPLAYS,),
        short="eviction",
    )
    replay_max_uses: int = setting(
        4,
        "the number of updates, including the first, after which a group leaves the buffer",
        unit="updates",
        least=2,
        acts=(REPLAYS,),
        short="max_uses",
        also=("max_samples", "max_reuse"),
        remedy="Use 2 to replay each once",
    )
    replay_recency: float = setting(
        0.0,
        "α: the i-th oldest group is drawn with weight i^α",
        note="0: uniformly.",
        least=0,
        acts=(REPLAYS,),
        short="recency",
        remedy="Use 0 to draw all alike",
    )


REPLAY = Section.of("replay", Replay)
