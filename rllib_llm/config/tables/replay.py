"""Groups that are learnt from more than once."""

from __future__ import annotations

from rllib_llm.config.setting import Condition, Section, Setting
from rllib_llm.rollouts.replay_buffer import EVICTIONS

REPLAYS = Condition(
    "replay_groups is above 0",
    lambda c: bool(c.replay_groups),
    "with replay_groups=0: nothing is replayed",
    "Set replay_groups",
)

REPLAY = Section(
    "replay",
    "Groups that are learnt from more than once.",
    (
        Setting(
            name="replay_groups",
            short="groups",
            type=int,
            default=0,
            least=0,
            unit="groups",
            meaning="how many earlier groups each batch has beside its fresh ones",
            note="0: none. They are older than the policy: `off_policy` must be set.",
            remedy="Use 0 for none",
            also=("replay_size", "num_replayed_groups"),
        ),
        Setting(
            name="replay_capacity",
            short="capacity",
            type=int | None,
            default=None,
            least=1,
            unit="groups",
            meaning="how many groups the buffer holds; None: four batches",
            acts=(REPLAYS,),
            also=("buffer_size", "replay_buffer_capacity"),
        ),
        Setting(
            name="replay_eviction",
            short="eviction",
            type=str,
            default="oldest",
            choices=EVICTIONS,
            meaning="which group goes where there is no room",
            note='"most_used": of those that were learnt from most often the oldest.',
            acts=(REPLAYS,),
        ),
        Setting(
            name="replay_max_uses",
            short="max_uses",
            type=int,
            default=4,
            least=2,
            unit="updates",
            meaning="after how many, the first included, a group leaves the buffer",
            remedy="Use 2 to replay each once",
            acts=(REPLAYS,),
            also=("max_samples", "max_reuse"),
        ),
        Setting(
            name="replay_recency",
            short="recency",
            type=float,
            default=0.0,
            least=0,
            meaning="α: the i-th oldest group is drawn with weight i^α",
            note="0: all alike.",
            remedy="Use 0 to draw all alike",
            acts=(REPLAYS,),
        ),
    ),
)
