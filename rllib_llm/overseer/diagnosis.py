"""Where a process spends its time, what limits its run, and which setting helps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rllib_llm.overseer.phases import (
    BETWEEN,
    EVALUATING,
    FOR_COMPLETIONS,
    FOR_JUDGES,
    FOR_TOOLS,
    FOR_WEIGHTS,
    LEARNING,
    PUBLISHING,
    SAVING,
    STARTING,
    WAITING,
)

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
    "sampler": "raise num_env_runners or sampling_batch_size, or lower max_new_tokens",
    "judge": "make the reward function async or faster, quantise the reward model, or raise "
    "num_env_runners: each sampler judges its completions",
    "tools": "make the tools faster, or raise num_env_runners or the conversations run at once",
    "learner": "raise num_learners, lower num_epochs, use mixed_precision='bf16' or lora",
    "evaluation": "raise evaluation_interval or evaluation_num_env_runners, or lower "
    "evaluation_duration",
    "checkpoints": "raise checkpoint_interval_s, or store runs on a faster disk",
    "weights": "use lora, dtype='bfloat16' or another weights_transport; max_staleness hides it",
}  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on what limits a run's speed.

    bound: "sampler", "judge", "learner", "weights", "evaluation" or "checkpoints"; ""
        before there is anything to tell.
    share: of the time of iterations that it takes.
    """

    bound: str
    share: float
    text: str


def diagnose(seconds: Mapping[str, float], has_samplers: bool = False) -> Diagnosis:
    """The diagnosis of the learner's `seconds` by phase, of a few iterations; `has_samplers`: there
    are sampler processes, whose number can be changed."""
    by_owner = dict.fromkeys(OWNERS.values(), 0.0)
    for phase, owner in OWNERS.items():
        by_owner[owner] += seconds.get(phase, 0.0)
    total = sum(by_owner.values())
    if total <= 0:
        return Diagnosis("", 0.0, "nothing is known before the first iteration has ended")
    starting = seconds.get(STARTING, 0.0)
    if starting > total:
        took = f"({starting:.0f} s of {starting + total:.0f} s)"
        return Diagnosis("", 0.0, f"starting took most of the time so far {took}; what limits the "
                         "run shows some iterations later")  # fmt: skip
    bound = max(by_owner, key=by_owner.__getitem__)
    share = by_owner[bound] / total
    phases = [phase for phase, owner in OWNERS.items() if owner == bound]
    phases.sort(key=lambda phase: -seconds.get(phase, 0.0))
    remedy = REMEDIES["tools" if phases[0] == FOR_TOOLS else bound]
    if bound == "sampler" and has_samplers:
        remedy += "; rllib scale adds samplers at once, up to sampling_parts"
    # In the words of the phases, which `rllib status` lists with their shares.
    least = by_owner[bound] / 10
    most = " and ".join(phase for phase in phases if seconds.get(phase, 0.0) >= least)
    most_time = 2 * by_owner[bound] > total + seconds.get(BETWEEN, 0.0)
    part = "most time" if most_time else "the largest part of what can be changed"
    text = f"{bound}-bound: {part} goes into {most}; to change it, {remedy}"
    return Diagnosis(bound, share, text)
