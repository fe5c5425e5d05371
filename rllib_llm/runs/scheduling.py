"""Tune schedulers and searchers by name, their arguments checked."""

from __future__ import annotations

import inspect
from typing import Any

from rllib_llm.runs.search_space import to_tune
from rllib_llm.runs.yaml_experiments import Experiment
from rllib_llm.shared.errors import UserError, suggestion, unknown_key

SHORT_NAMES = {"asha": "async_hyperband"}


def make_scheduler(experiment: Experiment) -> Any:
    """Return the Tune scheduler that the experiment names, None for first in, first out.

    Raises:
        UserError: unknown name or argument.
    """
    from ray.tune.schedulers import SCHEDULER_IMPORT, create_scheduler

    if not experiment.scheduler:
        _no_orphan(experiment, "scheduler")
        return None
    name = _choice(experiment, "scheduler", SCHEDULER_IMPORT)
    arguments = _arguments(experiment, "scheduler_config", SCHEDULER_IMPORT[name])
    if name != "fifo" and not (experiment.metric or arguments.get("metric")):
        raise UserError(
            name=f"{experiment.name}.metric",
            rule="be set",
            reason=f"scheduler {experiment.scheduler!r} compares trials by it",
            remedy="Write `metric: objective/scores` and `mode: max`",
        )
    if name == "pbt":
        from rllib_llm.runs.resumable_pbt import ResumablePBT

        return ResumablePBT(**arguments)
    return create_scheduler(name, **arguments)


def make_searcher(experiment: Experiment) -> Any:
    """Return the Tune searcher that the experiment names, None for grid and random search.

    Raises:
        UserError: unknown name or argument, or its package is not installed.
    """
    from ray.tune.search import SEARCH_ALG_IMPORT, create_searcher

    if not experiment.search_alg:
        _no_orphan(experiment, "search")
        return None
    name = _choice(experiment, "search_alg", SEARCH_ALG_IMPORT)
    arguments = _arguments(experiment, "search_config", SEARCH_ALG_IMPORT[name])
    try:
        return create_searcher(name, **arguments)
    except (ImportError, AssertionError) as error:
        raise UserError(
            name=f"{experiment.name}.search_alg",
            value=name,
            rule="be installed",
            reason=error,
            remedy="Install its package, or drop the key for grid and random search",
        ) from error


def _choice(experiment: Experiment, key: str, known: dict[str, Any]) -> str:
    value = str(getattr(experiment, key)).lower()
    value = SHORT_NAMES.get(value, value)
    if value not in known:
        raise UserError(
            name=f"{experiment.name}.{key}",
            value=value,
            rule="be a name that Ray Tune knows",
            reason="it is not",
            remedy=suggestion(value, [*known, *SHORT_NAMES]),
        )
    return value


def _arguments(experiment: Experiment, key: str, target: Any) -> dict[str, Any]:
    if inspect.isfunction(target):  # Tune imports some of them late, through a function
        target = target()
    arguments = to_tune(getattr(experiment, key), f"{experiment.name}.{key}")
    allowed = list(inspect.signature(target.__init__).parameters)[1:]
    for name in arguments:
        if name not in allowed:
            raise unknown_key(f"{experiment.name}.{key}", name, allowed)
    return arguments


def _no_orphan(experiment: Experiment, kind: str) -> None:
    """Refuse arguments for something that is not chosen: they would have no effect."""
    key = f"{kind}_config"
    if getattr(experiment, key):
        owner = "scheduler" if kind == "scheduler" else "search_alg"
        raise UserError(
            name=f"{experiment.name}.{key}",
            rule=f"come with {owner}",
            reason="alone it has no effect",
            remedy=f"Name the {owner}, or drop it",
        )
