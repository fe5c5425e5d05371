"""What is kept of all that was sampled."""

from __future__ import annotations

from typing import Literal

from rllib_llm.config.setting import Condition, Section, Settings, setting

STORED = Condition("store_rollouts is on", lambda c: c.store_rollouts, "with store_rollouts=False")


class Rollouts(Settings):
    """What is kept of all that was sampled."""

    store_rollouts: bool = setting(
        True,
        "whether every completion is kept as a row of Parquet in the trial's folder",
        note="Trained, rejected, failed and held-out ones, with tokens, log-probs, rewards and "
        "advantages, written in the background: `rllib rollouts RUN` shows them.",
        short="store",
    )
    store_on_error: Literal["go_on", "stop"] = setting(
        "go_on",
        "what a run does when rollouts cannot be written, the disk being full, say",
        note='"go_on": it says so once and keeps no more; "stop": it ends with the error.',
        acts=(STORED,),
        short="on_error",
    )


ROLLOUTS = Section.of("rollouts", Rollouts)
