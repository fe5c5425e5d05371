"""What a run waits for, from the shares of its learner's time, and which setting changes that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Phases of the process that learns.
LEARNING, PUBLISHING, EVALUATING = "learning", "publishing weights", "evaluating"
SAVING, BETWEEN, STARTING, PAUSED = "saving", "between iterations", "starting", "paused"
WAITING = "waiting for samplers"
FOR_COMPLETIONS, FOR_JUDGES = "waiting for completions", "waiting for judges"
FOR_TOOLS, FOR_WEIGHTS = "waiting for tools", "waiting for weights"
# Whose work each phase is; the others are of the run as a whole.
OWNERS: Mapping[str, str] = {
    LEARNING: "learner",
    WAITING: "sampler",
    FOR_COMPLETIONS: "sampler",
    FOR_JUDGES: "judge",
    FOR_TOOLS: "judge",
    FOR_WEIGHTS: "weights",
    PUBLISHING: "weights",
    EVALUATING: "evaluation",
    SAVING: "checkpoints",
}
REMEDIES: Mapping[str, str] = {
    "sampler": "raise num_env_runners (rllib scale) or sampling_batch_size, or lower "
    "max_new_tokens",
    "judge": "make the reward function async or faster, quantise the reward model, or raise "
    "num_env_runners: each sampler judges its own completions",
    "tools": "make the tools faster or raise how many conversations run at once; num_env_runners "
    "adds processes that wait at the same time",
    "learner": "raise num_learners, lower num_epochs, use mixed_precision='bf16' or lora; "
    "sampling ahead (max_staleness) hides the sampler's part, not this one",
    "evaluation": "raise evaluation_interval, lower evaluation_duration, or raise "
    "evaluation_num_env_runners",
    "checkpoints": "raise checkpoint_interval_s, or store runs on a faster disk",
    "weights": "use lora, dtype='bfloat16' or another weights_transport; background publishing and "
    "max_staleness hide it",
}  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """Who holds a run up.

    bound: "sampler", "judge", "learner", "weights", "evaluation" or "checkpoints"; ""
        before there is anything to tell.
    share: of the time of iterations that it takes.
    """

    bound: str
    share: float
    text: str


def diagnose(seconds: Mapping[str, float]) -> Diagnosis:
    """The diagnosis of the learner's `seconds` by phase, of a few iterations."""
    by_owner: dict[str, float] = {}
    for phase, value in seconds.items():
        owner = OWNERS.get(phase)
        if owner is not None:
            by_owner[owner] = by_owner.get(owner, 0.0) + value
    total = sum(by_owner.values())
    if total <= 0:
        return Diagnosis("", 0.0, "nothing is known before the first iteration has ended")
    bound = max(by_owner, key=by_owner.__getitem__)
    share = by_owner[bound] / total
    longest = max(
        (phase for phase, owner in OWNERS.items() if owner == bound),
        key=lambda phase: seconds.get(phase, 0.0),
    )
    remedy = REMEDIES["tools" if longest == FOR_TOOLS else bound]
    doing = "learns" if bound == "learner" else f"is {longest}"
    text = f"{bound}-bound: the run {doing} {share:.0%} of the time; to change it, {remedy}"
    return Diagnosis(bound, share, text)
