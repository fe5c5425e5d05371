"""Settings of asynchronous training: staleness, schedules, filters of groups."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.config.setting import Condition, Section, Settings, setting

STREAMS = Condition(
    "groups stream (max_staleness above 0, filters, or oversample above 1)",
    lambda c: c.streams,
    "with max_staleness=0, no filters and oversample=1: each batch is sampled when it is wanted",
    "Set max_staleness=1",
)
FREE = Condition(
    "schedule is 'free'",
    lambda c: c.schedule == "free",
    "with schedule='lockstep', where time decides nothing",
    "Set schedule='free'",
)
BY_ROW = Condition(
    "engine is 'torch' and num_env_runners is 1 or more",
    lambda c: c.engine == "torch" and bool(c.num_env_runners),
    "with engine={config.engine!r} and num_env_runners={config.num_env_runners}: whole groups are "
    "sampled with one version",
    "Use engine='torch' and num_env_runners=1",
)
FILTERED = Condition(
    "filters are set", lambda c: bool(c.filters), "without filters", "Set filters=['reward_spread']"
)


class Streaming(Settings):
    """Sampling ahead of the learner, and which groups are learnt from."""

    max_staleness: int = setting(
        0,
        "how much older than the learner's the weights that sampled a group may be",
        note="0: samplers wait while the learner learns; 1 or more: they go on, and "
        "`off_policy` says how the older data is corrected.",
        unit="updates",
        least=0,
        also=(
            "pipeline_depth",
            "async_rollout",
            "max_off_policy_steps",
            "max_head_offpolicyness",
            "max_weight_staleness",
            "staleness_threshold",
            "max_trajectory_age_steps",
        ),
        reason="it counts updates",
        remedy="Use 0 to wait, 1 to overlap sampling and learning",
    )
    schedule: Literal["lockstep", "free"] = setting(
        "lockstep",
        "which weights sample a group",
        note='"lockstep": those that follow from its place in the order, so that a run is the '
        "same bit for bit whatever the timing, the number of samplers and the faults; "
        '"free": the newest there are.',
        acts=(STREAMS,),
        remedy="Use 'lockstep'",
    )
    in_flight: Literal["finish", "recompute", "keep"] = setting(
        "finish",
        "what becomes of completions that are being sampled when new weights come",
        note='"finish": they go on with the weights that they began with, beside new ones that '
        'begin on the new weights, which takes a second copy of them; "recompute": they go on '
        'with the new weights, their KV cache computed again; "keep": with the new weights '
        "and the old cache. Each token carries the version that sampled it.",
        acts=(STREAMS, FREE, BY_ROW),
        also=("pause_mode",),
        remedy="Use 'finish'",
    )
    mask_stale_prefix: bool = setting(
        False,
        "whether of a completion that several versions sampled only the tokens of the "
        "last are learnt from",
        acts=(STREAMS, FREE, BY_ROW),
        also=("mask_offpolicy_in_partial_rollout",),
    )
    window: int = setting(
        1,
        "among how many groups, from the oldest that is not learnt from yet, the next is chosen",
        note="1: strict order, no prompt overtakes another; above it finished groups may "
        "overtake unfinished ones, and a group's age is at most max_staleness + "
        "⌈(window − 1)/P⌉ for P groups of an iteration.",
        unit="groups",
        least=1,
        acts=(STREAMS, FREE),
        also=("window_size",),
        reason="it counts groups",
        remedy="Use 1",
    )
    on_stale: Literal["train", "drop"] = setting(
        "train",
        "what becomes of groups that are older than max_staleness when their turn "
        "comes, since others overtook them",
        note='"drop": they are counted as rejected (`rollouts/rejected/stale`).',
        acts=(STREAMS, FREE),
        remedy="Use 'train'",
    )
    oversample: float = setting(
        1.0,
        "the groups on their way, over those that an iteration learns from",
        note="1.25: a quarter more prompts are begun than are needed; with schedule='free' the "
        "first that are finished are learnt from, and the rest carried over to the next "
        "iteration. Nothing is thrown away. `window` is then at least as wide as all that are "
        "begun for one.",
        least=1,
        also=("over_sampling_batch_size", "oversample_ratio"),
        remedy="Use 1",
    )
    filters: list[Any] | None = setting(
        None,
        "which groups are learnt from",
        note="Names (`reward_spread`, `least_reward`, `length`, `distinct`), dotted paths of "
        "functions of one group that return (keep, reason), or {name: ..., and settings}. "
        "Other prompts are sampled in the place of what is refused; ['reward_spread'] is "
        "DAPO's dynamic sampling.",
        also=("dynamic_sampling", "filter_groups", "dynamic_sampling_filter_path"),
        remedy="Write ['reward_spread']",
    )
    max_resampling: float = setting(
        20.0,
        "how many groups in a row filters may refuse, over those of an iteration, "
        "before the run ends with an error",
        unit="batches",
        least=1,
        acts=(FILTERED,),
        also=("max_num_gen_batches",),
        remedy="Use 20",
    )
    groups_per_lease: int | None = setting(
        None,
        "how many consecutive prompts a sampler takes at once",
        note="None: an eighth of an iteration's. They are sampled as one batch: more of them "
        "are quicker to decode, fewer share out more evenly.",
        unit="groups",
        least=1,
        acts=(STREAMS,),
        reason="it counts groups",
        remedy="Leave it at None",
    )


STREAMING = Section.of("streaming", Streaming)
