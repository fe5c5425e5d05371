"""Settings of asynchronous training: staleness, schedules, filters of groups; corrections for
tokens sampled by older weights or by another engine; replay of groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from rllib_llm.config.sampling import takes_rows
from rllib_llm.config.sections import wrong
from rllib_llm.numerics.kl import KL_ESTIMATORS
from rllib_llm.numerics.off_policy import WEIGHT_LEVELS, WEIGHT_MODES
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import Condition, Section, Settings, is_set, setting, when

STREAMS = Condition(
    "groups stream (max_staleness above 0, or schedule='free')", lambda c: c.streams,
    "with max_staleness=0 and schedule='lockstep': each batch is sampled when it is wanted",
    "Set max_staleness=1",
)  # fmt: skip
FREE = when(
    "schedule", "is 'free'", lambda s: s == "free", "Set schedule='free'",
    ", where time decides nothing",
)  # fmt: skip
OVERSAMPLES = when("oversample", "is above 1", lambda ratio: ratio > 1, "Set oversample=1.25")
BY_ROW = Condition(
    "the engine takes rows (no server does) and num_env_runners is 1 or more",
    lambda c: takes_rows(c) and bool(c.num_env_runners),
    "with engine={config.engine!r} and num_env_runners={config.num_env_runners}: whole groups are "
    "sampled with one version", "Use engine='torch' and num_env_runners=1",
)  # fmt: skip
FILTERED = Condition(
    "filters are set", lambda c: bool(c.filters) or "filters" in str(c.envs),
    "with filters={config.filters!r}", "Set filters=['reward_spread']",
)  # fmt: skip


class Streaming(Settings):
    """Sampling ahead of the learner, and which groups are learnt from."""

    max_staleness: int = setting(
        0, "the maximum age of the weights that sampled a group",
        note="0: samplers wait while the learner trains; 1 or more: they continue, and "
        "`off_policy` corrects for the older data.", unit="updates", least=0,
        also="pipeline_depth async_rollout max_off_policy_steps max_head_offpolicyness "
        "max_weight_staleness staleness_threshold max_trajectory_age_steps",
        reason="it counts updates", remedy="Use 0 to wait, 1 to overlap sampling and learning",
    )  # fmt: skip
    schedule: Literal["lockstep", "free"] = setting(
        "lockstep", "the weights that sample a group", note='"lockstep": those that the group\'s '
        'position says, so a run is the same bit for bit whatever time and faults do; "free": the '
        'newest.', reason="it decides which weights sample a group",
    )  # fmt: skip
    in_flight: Literal["finish", "recompute", "keep"] = setting(
        "finish", "the treatment of completions in flight when new weights arrive",
        note='"finish": they finish on their own weights beside new ones, which needs a second '
        'copy of the weights (with vLLM new ones wait); "recompute": they continue on the new '
        'weights with a recomputed KV cache; "keep": with the old cache. Each token records its '
        "version.", acts=(FREE, BY_ROW), also="pause_mode",
    )  # fmt: skip
    mask_stale_prefix: bool = setting(
        False, "whether, in completions sampled by several versions, only the tokens of the last "
        "version are trained", acts=(FREE, BY_ROW),
        also="mask_offpolicy_in_partial_rollout",
    )  # fmt: skip
    window: int = setting(
        1, "the number of groups, counted from the oldest untrained one, from which the next is "
        "chosen", note="1: strict order. Above it, finished groups may overtake unfinished ones, "
        "and a group's age is at most max_staleness + ⌈(window − 1)/P⌉ for P groups per iteration.",
        unit="groups", least=1, acts=(FREE,), also="window_size",
    )  # fmt: skip
    on_stale: Literal["train", "drop"] = setting(
        "train", "the treatment of groups older than max_staleness when their turn comes, since "
        "others overtook them", note='"drop": count them as rejected (`rollouts/rejected/stale`).',
        acts=(FREE,),
    )  # fmt: skip
    oversample: float = setting(
        1.0, "the ratio of groups in flight to those of an iteration",
        note="1.25: start a quarter more prompts than needed; with schedule='free' the first to "
        "finish are trained and the rest carried over to the next iteration, so that nothing is "
        "lost. `window` is then at least the number started for one iteration.", least=1,
        also="over_sampling_batch_size oversample_ratio",
    )  # fmt: skip
    oversample_keep: Literal["first", "best_spread", "best_score"] = setting(
        "first", "the groups that are trained of those started",
        note='"best_spread": all are waited for, and those with the largest standard deviation of '
        'scores are trained; "best_score": those with the largest mean. The others are counted as '
        "rejected (`rollouts/rejected/not_best`). Either is a bias: some prompts are trained less "
        "often than they occur, and a metric of trained groups is not one of all.",
        acts=(OVERSAMPLES,), also="rollout_sampling_mode n_best keep_best",
    )  # fmt: skip
    filters: list[Any] | None = setting(
        None, "the filters of groups to train on", note="Names, such as `reward_spread`, "
        "which is DAPO's dynamic sampling, dotted paths of functions of one group that return "
        "(keep, reason), or {name: ..., and settings}. Other prompts are sampled instead of "
        "rejected ones.",
        also="dynamic_sampling filter_groups dynamic_sampling_filter_path",
        remedy="Write ['reward_spread']",
    )  # fmt: skip
    max_resampling: float = setting(
        20.0, "how many batches of groups in a row filters may reject before the run ends with an "
        "error", unit="batches", least=1, acts=(FILTERED,), also="max_num_gen_batches",
    )  # fmt: skip
    groups_per_lease: int | None = setting(
        None, "the number of consecutive prompts that a sampler takes at once",
        note="None: an eighth of an iteration's. They are sampled as one batch: larger leases "
        "decode faster, smaller ones distribute more evenly.", unit="groups", least=1,
        acts=(STREAMS,),
    )  # fmt: skip


STREAMING = Section.of("streaming", Streaming)


OFF_POLICIES = ("bypass", "decoupled", "decoupled_loglinear")

CHOSEN = when("off_policy", "is set", is_set, "Set off_policy='decoupled'")
DECOUPLED = when(
    "off_policy", "is 'decoupled' or 'decoupled_loglinear'",
    lambda mode: mode in ("decoupled", "decoupled_loglinear"), "Set off_policy='decoupled'",
    ": the ratio is to the sampler's own log-probs",
)  # fmt: skip
WEIGHED = when("off_policy_weights", "is set", is_set, "Choose 'truncate'")
REJECTS = when("rejection", "is set", is_set, "Set rejection='k3'")


class OffPolicy(Settings):
    """Corrections for data that older weights sampled."""

    off_policy: str | None = setting(
        None, "the correction of off-policy data; None: the data is fresh",
        note='"decoupled": the learner computes the log-probs of the policy before the update, '
        "relative to which ratios are clipped, and weights each token by its probability "
        'there over the sampler\'s (AReaL, Fu et al. 2025); "decoupled_loglinear": the same '
        "without that forward pass, interpolating between the sampler's and the current "
        'log-probs by the token\'s age (A-3PO); "bypass": ratios are relative to the '
        "sampler's log-probs, whatever their age. With None, old log-probs are the "
        "sampler's too; in half precision ratios are relative to the learner's own.",
        choices=OFF_POLICIES, also="recompute_old_logprobs use_decoupled_loss rollout_correction "
        "prox_logp_method bypass_mode", remedy="Use 'decoupled'",
    )  # fmt: skip
    off_policy_weights: str | None = setting(
        "truncate", "the treatment of importance weights outside the bounds; None: all weights are "
        "1",
        note='"truncate": clip them to the bounds; "mask": leave the token (or completion) out '
        "of the loss, but not out of its denominator.", choices=WEIGHT_MODES, acts=(DECOUPLED,),
        trl="vllm_importance_sampling_correction",
        also="importance_sampling behav_imp_weight_mode rollout_is",
    )  # fmt: skip
    off_policy_level: str = setting(
        "token", "the unit of an importance weight", note='"sequence": a whole completion; '
        'unbiased, but far from 1 for long ones.', choices=WEIGHT_LEVELS, acts=(DECOUPLED, WEIGHED),
        trl="vllm_importance_sampling_mode",
    )  # fmt: skip
    off_policy_lower: float = setting(
        0.0, "the smallest importance weight", note="IcePop masks below 0.5.", least=0,
        acts=(DECOUPLED, WEIGHED),
    )  # fmt: skip
    off_policy_upper: float = setting(
        2.0, "the largest importance weight (Yao et al. 2025: 2)", above=0,
        acts=(DECOUPLED, WEIGHED), trl="vllm_importance_sampling_cap",
        also="importance_sampling_cap tis_imp_ratio_cap behav_imp_weight_cap rollout_is_threshold",
    )  # fmt: skip
    rejection: str | None = setting(
        None, "the estimator of the KL to the sampler's policy by which tokens are left out of the "
        "loss; None: none is", note="Denominators still count rejected tokens. k1 is minus the "
        "log-ratio; k3 is never negative.",
        choices=KL_ESTIMATORS, acts=(CHOSEN,), also="rollout_rs", remedy="Use 'k3'",
    )  # fmt: skip
    rejection_level: Literal["sequence", "token"] = setting(
        "sequence", "the unit of rejection", note='"sequence": completions, by the mean over their '
        'tokens; "token": single tokens.', acts=(CHOSEN, REJECTS),
    )  # fmt: skip
    rejection_lower: float | None = setting(
        None, "the lower bound of rejection; None: none", unit="nats", acts=(CHOSEN, REJECTS)
    )
    rejection_upper: float | None = setting(
        None, "the upper bound of rejection; None: none",
        note="0.05 suits the mean k3 of completions.", unit="nats", acts=(CHOSEN, REJECTS),
        also="rollout_rs_threshold",
    )  # fmt: skip


OFF_POLICY = Section.of("training", OffPolicy)


REPLAYS = when("replay_groups", "is above 0", bool, "Set replay_groups", ": nothing is replayed")


class Replay(Settings):
    """Groups that are learnt from more than once."""

    replay_groups: int = setting(
        0, "the number of replayed groups in each batch, in addition to its fresh ones",
        note="0: none. They are older than the policy, so `off_policy` must be set.", unit="groups",
        least=0, short="groups", also="replay_size num_replayed_groups",
    )  # fmt: skip
    replay_capacity: int | None = setting(
        None, "the capacity of the replay buffer; None: four batches",
        note="A full buffer evicts its oldest group.", unit="groups", least=1, acts=(REPLAYS,),
        short="capacity", also="buffer_size replay_buffer_capacity",
    )  # fmt: skip
    replay_max_uses: int = setting(
        4, "the number of updates, including the first, after which a group leaves the buffer",
        unit="updates", least=2, acts=(REPLAYS,), short="max_uses", also="max_samples max_reuse",
    )  # fmt: skip
    replay_recency: float = setting(
        0.0, "α: the i-th oldest group is drawn with weight i^α", note="0: uniformly.", least=0,
        acts=(REPLAYS,), short="recency",
    )  # fmt: skip


REPLAY = Section.of("replay", Replay)


# --- what must hold between them --------------------------------------------------------------


def streaming_rules(config: Any) -> Iterator[Problem]:
    """Samplers can be ahead of the learner in this way."""
    if config.filters:
        from rllib_llm.rollouts.filters import Filters  # few runs need it

        if "reward_spread" in Filters(config.filters).names and config.num_completions == 1:
            yield wrong(config, "num_completions", "at least 2 with the filter 'reward_spread'",
                        "one score has no spread, so every group would be rejected",
                        "Set num_completions: 8, say, or leave the filter out")  # fmt: skip
    is_ahead = (config.streams or config.oversample > 1
                or config.weights_publish_every > 1)  # fmt: skip
    if is_ahead and config.weights_transport != "store":
        yield wrong(config, "weights_transport", "'store' where samplers are ahead of the learner",
                    "older weights have to stay where they are")  # fmt: skip


def off_policy_rules(config: Any) -> Iterator[Problem]:
    """Something lies between the bounds, and data of older weights is corrected."""
    if config.off_policy_lower >= config.off_policy_upper:
        yield wrong(config, "off_policy_lower",
                    f"below off_policy_upper={config.off_policy_upper!r}",
                    "weights are held between them", "Use 0 for no bound")  # fmt: skip
    lower, upper = config.rejection_lower, config.rejection_upper
    if config.rejection is not None and lower is None and upper is None:
        yield wrong(config, "rejection_upper", f"a number with rejection={config.rejection!r}",
                    "without a bound nothing is rejected",
                    "Set 0.05, say, for the mean k3 of completions")  # fmt: skip
    elif config.rejection is not None and None not in (lower, upper) and lower >= upper:
        yield wrong(config, "rejection_lower", f"below rejection_upper={upper!r}",
                    "what lies between them is kept", "Leave one out")  # fmt: skip
    groups, capacity = config.replay_groups, config.replay_capacity
    carries = config.oversample > 1 and config.oversample_keep == "first"
    older = {"max_staleness": config.max_staleness > 0, "oversample": carries,
             "replay_groups": groups > 0,
             "weights_publish_every": config.weights_publish_every > 1}  # fmt: skip
    for name in (name for name, is_older in older.items() if is_older and not config.off_policy):
        yield wrong(config, "off_policy", f"set with {name}={getattr(config, name)!r}",
                    "tokens of older weights bias the plain loss, and training may collapse",
                    "Set off_policy='decoupled', or 'bypass' to clip the ratio to the sampler's "
                    "log-probs")  # fmt: skip
    if groups and capacity is not None and capacity < groups:
        yield wrong(config, "replay_capacity", f"at least replay_groups={groups!r}",
                    "they are drawn from it",
                    f"Set {groups!r} or more, or None for four batches")  # fmt: skip
