"""What became of every prompt and of every kill, from the ledgers of `chaos_run.py`."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]


def prompt_account(
    events: Iterable[Event], num_iterations: int, num_prompts: int, num_completions: int
) -> dict[str, Any]:
    """Counts of prompts, and every violation, for a run that ended after `num_iterations`.

    handed_out: sent to samplers, by every driver process.
    completed: of them, those whose whole group came back to the driver.
    trained: of them, those that an update was finished with.
    kept: of them, those in the weights that the run ended with, each once.
    returned: handed out and not kept: handed out again after a restart.
    """
    seen = Counter()
    updates: dict[int, list[list[int]]] = defaultdict(list)
    for event in events:
        if event["event"] == "handed_out":
            seen["handed_out"] += event["num_prompts"]
        elif event["event"] == "completed":
            seen["completed"] += len(event["rows"]) // num_completions
        elif event["event"] == "updated":
            seen["trained"] += len(event["rows"]) // num_completions
            updates[event["version"]].append(event["rows"])
    violations = []
    for version in range(1, num_iterations + 1):
        first = (version - 1) * num_prompts * num_completions
        expected = list(range(first, first + num_prompts * num_completions))
        if not updates[version]:
            violations.append(f"iteration {version} was never learnt from")
        for rows in updates[version]:
            if sorted(rows) != expected:
                violations.append(f"iteration {version} learnt from rows {sorted(rows)}")
    kept = num_iterations * num_prompts
    return {
        "handed_out": seen["handed_out"], "completed": seen["completed"],
        "trained": seen["trained"], "kept": kept, "returned": seen["handed_out"] - kept,
        "violations": violations,
    }  # fmt: skip


def token_account(events: Iterable[Event]) -> dict[str, Any]:
    """Tokens of the last iteration by what became of them, and each iteration in which they do not
    add up: generated = trained + rejected + carried; groups rejected, by reason. {} where groups do
    not stream."""
    told = [event for event in events if event["event"] == "tokens"]
    if not told:
        return {}
    names = ("tokens_trained", "tokens_rejected", "tokens_carried")
    wrong = [
        event["time"] for event in told
        if event["tokens_generated"] != sum(event[name] for name in names)
    ]  # fmt: skip
    last = {name: told[-1][name] for name in ("tokens_generated", *names)}
    reasons = {name: value for name, value in told[-1].items() if name.startswith("rejected/")}
    return {**last, **reasons, "violations": wrong}


def kill_account(events: Sequence[Event], kills: Sequence[Event]) -> dict[str, Any]:
    """By kind of kill: how many, and the seconds lost, median and largest.

    Lost is the time from the kill until the run is one iteration further than it was, less the
    usual time of an iteration. Kills that come before the run has recovered share the time.
    """
    steps = [event for event in events if event["event"] == "iteration"]
    usual = usual_seconds(steps)
    lost: dict[str, list[float]] = defaultdict(list)
    for episode in _episodes(steps, kills):
        seconds = max(0.0, episode["recovered"] - episode["kills"][0]["time"] - usual)
        for kill in episode["kills"]:
            lost[kill["what"]].append(seconds / len(episode["kills"]))
    return {
        "usual_iteration_seconds": round(usual, 2),
        "by_kind": {
            what: {
                "count": len(values),
                "median_seconds_lost": round(statistics.median(values), 1),
                "max_seconds_lost": round(max(values), 1),
            }
            for what, values in sorted(lost.items())
        },
    }


def usual_seconds(steps: Sequence[Event]) -> float:
    """Median time between two iterations of one driver process."""
    gaps = [b["time"] - a["time"] for a, b in zip(steps, steps[1:], strict=False)
            if a["pid"] == b["pid"]]  # fmt: skip
    return statistics.median(gaps) if gaps else 0.0


def _episodes(steps: Sequence[Event], kills: Sequence[Event]) -> list[dict[str, Any]]:
    episodes: list[dict[str, Any]] = []
    for kill in kills:
        if episodes and kill["time"] < episodes[-1]["recovered"]:
            episodes[-1]["kills"].append(kill)
            version = max(one["version"] for one in episodes[-1]["kills"])
        else:
            version = kill["version"]
            episodes.append({"kills": [kill]})
        after = [step["time"] for step in steps
                 if step["time"] > kill["time"] and step["version"] > version]  # fmt: skip
        episodes[-1]["recovered"] = min(after, default=float("inf"))
    return [episode for episode in episodes if episode["recovered"] < float("inf")]
