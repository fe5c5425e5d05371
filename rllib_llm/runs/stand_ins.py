"""What a later stage takes from an earlier one, before that is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_llm.runs.algorithms import algorithm_class
from rllib_llm.runs.experiment import Experiment
from rllib_llm.runs.yaml_experiments import references, substitute
from rllib_llm.shared.errors import UserError


class StandIn(str):
    """The model that an earlier experiment starts from, in place of the one that it will make."""


def with_stand_ins(experiments: list[Experiment]) -> list[Experiment]:
    """Return the experiments with `${name.model}` replaced by the model that `name` starts from.

    Raises:
        UserError: an experiment uses another's result that will not be saved.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    stand_ins: dict[str, Any] = {}
    filled = []
    for experiment in experiments:
        for name, product in references(vars(experiment)):
            if product == "rollouts":
                _check_keeps_rollouts(by_name[name], experiment.name)
            elif by_name[name].checkpoint_config.get("checkpoint_at_end") is False:
                raise UserError(
                    name=f"{name}.checkpoint_config.checkpoint_at_end",
                    value=False,
                    rule="be true",
                    reason=f"{experiment.name!r} uses ${{{name}.{product}}}",
                    remedy="Drop the key",
                )
        config = substitute(
            experiment.config, lambda ref, _: stand_ins.get(ref, f"${{{ref}}}"), experiment.name
        )
        model = model_of(config)
        if isinstance(model, str):
            stand_ins[f"{experiment.name}.model"] = StandIn(model)
        filled.append(experiment.replace(config=config))
    return filled


def _check_keeps_rollouts(experiment: Experiment, user: str) -> None:
    from rllib_llm.algorithms.rlhf import RLHF

    name = experiment.name
    if not issubclass(algorithm_class(experiment.run, name), RLHF):
        raise UserError(
            where=f"{user}",
            name=f"${{{name}.rollouts}}",
            rule="be of an experiment that samples",
            reason=f"{name}.run={experiment.run!r} does not",
            remedy="Name one of GRPO, PPOPtx, ..",
        )
    section = experiment.config.get("rollouts")
    section = section if isinstance(section, dict) else {}
    kept = experiment.config.get("store_rollouts", section.get("store", True))
    if kept is False:
        raise UserError(
            name=f"{name}.config.store_rollouts",
            value=False,
            rule="be true",
            reason=f"{user!r} uses ${{{name}.rollouts}}",
            remedy="Drop the key",
        )


def model_of(config: Mapping[str, Any]) -> Any:
    """What the experiment starts from, wherever in its config it stands."""
    section = config.get("language_model")
    return config.get("model") or (section.get("model") if isinstance(section, dict) else None)
