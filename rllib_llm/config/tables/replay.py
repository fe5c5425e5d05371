"""Groups that are learnt from more than once."""

from __future__ import annotations

from rllib_llm.config.setting import Condition, Section, Settings, setting
from rllib_llm.rollouts.replay import EVICTIONS

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
        "how many earlier groups each batch has beside its fresh ones",
        note="0: none. They are older than the policy: `off_policy` must be set.",
        unit="groups",
        least=0,
        short="groups",
        also=("replay_size", "num_replayed_groups"),
        remedy="Use 0 for none",
    )
    replay_capacity: int | None = setting(
        None,
        "how many groups the buffer holds; None: four batches",
        unit="groups",
        least=1,
        acts=(REPLAYS,),
        short="capacity",
        also=("buffer_size", "replay_buffer_capacity"),
    )
    replay_eviction: str = setting(
        "oldest",
        "which group goes where there is no room",
        note='"most_used": of those that were learnt from most often the oldest.',
        choices=EVICTIONS,
        acts=(REPLAYS,),
        short="eviction",
    )
    replay_max_uses: int = setting(
        4,
        "after how many, the first included, a group leaves the buffer",
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
        note="0: all alike.",
        least=0,
        acts=(REPLAYS,),
        short="recency",
        remedy="Use 0 to draw all alike",
    )


REPLAY = Section.of("replay", Replay)
