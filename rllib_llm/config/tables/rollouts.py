"""What is kept of all that was sampled."""

from __future__ import annotations

from rllib_llm.config.setting import Condition, Section, Setting

STORED = Condition("store_rollouts is on", lambda c: c.store_rollouts, "with store_rollouts=False")

ROLLOUTS = Section(
    "rollouts",
    "What is kept of all that was sampled.",
    (
        Setting(
            name="store_rollouts",
            short="store",
            type=bool,
            default=True,
            meaning="whether every completion is kept as a row of Parquet in the trial's folder",
            note="Trained, rejected, failed and held-out ones, with tokens, log-probs, rewards and "
            "advantages, written in the background: `rllib rollouts RUN` shows them.",
        ),
        Setting(
            name="store_on_error",
            short="on_error",
            type=str,
            default="go_on",
            choices=("go_on", "stop"),
            meaning="what a run does when rollouts cannot be written, the disk being full, say",
            note='"go_on": it says so once and keeps no more; "stop": it ends with the error.',
            acts=(STORED,),
        ),
    ),
)
