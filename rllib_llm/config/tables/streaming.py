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
        "the maximum age of the weights that sampled a group",
        note=(
            "0: samplers wait while the learner trains; 1 or more: they continue, and "
            "`off_policy` corrects for the older data."
        ),
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
        "the weights that sample a group",
        note=(
            '"lockstep": determined by the group\'s position, so a run is the same bit for bit '
            'whatever the timing, the number of samplers and the faults; "free": the newest '
            "available."
        ),
        acts=(STREAMS,),
        remedy="Use 'lockstep'",
    )
    in_flight: Literal["finish", "recompute", "keep"] = setting(
        "finish",
        "the treatment of completions in flight when new weights arrive",
        note=(
            '"finish": they finish on their own weights while new ones start on the new '
            'weights, which needs a second copy of the weights; "recompute": they continue on '
            'the new weights with a recomputed KV cache; "keep": on the new weights with the '
            "old cache. Each token records the version that sampled it."
        ),
        acts=(STREAMS, FREE, BY_ROW),
        also=("pause_mode",),
        remedy="Use 'finish'",
    )
    mask_stale_prefix: bool = setting(
        False,
        "whether, in completions sampled by several versions, only the tokens of the last "
        "version are trained",
        acts=(STREAMS, FREE, BY_ROW),
        also=("mask_offpolicy_in_partial_rollout",),
    )
    window: int = setting(
        1,
        "the number of groups, counted from the oldest untrained one, from which the next "
        "is chosen",
        note=(
            "1: strict order. Above it, finished groups may overtake unfinished ones, and a "
            "group's age is at most max_staleness + ⌈(window − 1)/P⌉ for P groups per "
            "iteration."
        ),
        unit="groups",
        least=1,
        acts=(STREAMS, FREE),
        also=("window_size",),
        reason="it counts groups",
        remedy="Use 1",
    )
    on_stale: Literal["train", "drop"] = setting(
        "train",
        "the treatment of groups older than max_staleness when their turn comes, since "
        "others overtook them",
        note='"drop": count them as rejected (`rollouts/rejected/stale`).',
        acts=(STREAMS, FREE),
        remedy="Use 'train'",
    )
    oversample: float = setting(
        1.0,
        "the ratio of groups in flight to those of an iteration",
        note=(
            "1.25: start a quarter more prompts than needed; with schedule='free' the first to "
            "finish are trained and the rest carried over to the next iteration, so that "
            "nothing is lost. `window` is then at least the number started for one iteration."
        ),
        least=1,
        also=("over_sampling_batch_size", "oversample_ratio"),
        remedy="Use 1",
    )
    filters: list[Any] | None = setting(
        None,
        "the filters of groups to train on",
        note=(
            "Names (`reward_spread`, `least_reward`, `length`, `distinct`), dotted paths of "
            "functions of one group that return (keep, reason), or {name: ..., and settings}. "
            "Other prompts are sampled instead of rejected ones; ['reward_spread'] is DAPO's "
            "dynamic sampling."
        ),
        also=("dynamic_sampling", "filter_groups", "dynamic_sampling_filter_path"),
        remedy="Write ['reward_spread']",
    )
    max_resampling: float = setting(
        20.0,
        "how many batches of groups in a row filters may reject before the run ends with an error",
        unit="batches",
        least=1,
        acts=(FILTERED,),
        also=("max_num_gen_batches",),
        remedy="Use 20",
    )
    groups_per_lease: int | None = setting(
        None,
        "the number of consecutive prompts that a sampler takes at once",
        note=(
            "None: an eighth of an iteration's. They are sampled as one batch: larger leases "
            "decode faster, smaller ones distribute more evenly."
        ),
        unit="groups",
        least=1,
        acts=(STREAMS,),
        reason="it counts groups",
        remedy="Leave it at None",
    )


STREAMING = Section.of("streaming", Streaming)
