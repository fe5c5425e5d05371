"""The stage that the doctor's rules read: an experiment with its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rllib_llm.data.rows import Rows
from rllib_llm.data.sources import is_mixture, is_quick_to_read, load_rows
from rllib_llm.envs.registry import ENVIRONMENTS, default_settings
from rllib_llm.runs.experiments import Experiment, StandIn
from rllib_llm.runs.search_space import planned_iterations
from rllib_llm.shared.dotted import named_model
from rllib_llm.shared.errors import Problem

MAX_ROWS = 20_000  # of a data set that are looked at


@dataclass
class Stage:
    """An experiment with valid settings.

    config: of the first point of its search space.
    env: every setting of its environment with the defaults, {} where it is not one of ours.
    entry: of one of several environments, its name.
    num_prompts: of an iteration, those of its environment; 0 where it learns from texts.
    """

    experiment: Experiment
    config: Any
    env: Mapping[str, Any] = field(default_factory=dict)
    entry: str = ""
    num_prompts: float = 0.0

    def __post_init__(self) -> None:
        if not self.entry and self.is_rlhf:
            self.num_prompts = self.config.num_prompts_per_iteration

    @property
    def is_rlhf(self) -> bool:
        """Whether it samples completions; else it learns from texts."""
        from rllib_llm.algorithms.rlhf_config import RLHFConfig

        return isinstance(self.config, RLHFConfig)

    @cached_property
    def prompts(self) -> Rows | None:
        """The first rows of its prompts, where they are quick to read."""
        return first_rows(self.env.get("prompts"), "prompts")

    @property
    def is_conversation(self) -> bool:
        """Whether its environment is a conversation, whose judged texts and lengths are known only
        there."""
        return bool(self.env) and "max_prompt_len" not in self.env

    @property
    def num_samplers(self) -> int:
        """Sampler processes."""
        return int(getattr(self.config, "num_env_runners", 0) or 0) if self.is_rlhf else 0

    @property
    def num_learners(self) -> int:
        """Learner processes."""
        return int(self.config.num_learners or 0)

    @property
    def num_planned_iterations(self) -> int | None:
        """Iterations until `stop`, where that counts them."""
        return planned_iterations(self.experiment.stop, self.config)

    def models(self) -> dict[str, str]:
        """Every model that is read, by the setting that names it, where it is a local folder; of
        one of several environments, those of its own."""
        return {
            setting: str(Path(value).expanduser())
            for setting, value in self._named_models().items()
            if isinstance(value, str) and Path(value).expanduser().is_dir()
        }

    def maker(self, setting: str) -> Experiment | None:
        """The earlier experiment that makes that model, which another stands in for so far."""
        model = self._named_models()[setting]
        return model.made_by if isinstance(model, StandIn) else None

    def _named_models(self) -> dict[str, Any]:
        of_run = {
            "model": self.config.pretrained_model,
            "critic_model": getattr(self.config, "critic_model", None),
        }
        named = {
            **({} if self.entry else of_run),
            "reward_model": self.env.get("reward_model"),
            "reference": self.env.get("reference"),
            "teacher": getattr(self.config, "teacher", None),
        }
        return {setting: named_model(value).get("model") for setting, value in named.items()}


def can_be_read(data: Any) -> bool:
    """Whether data is there now, and quick to read."""
    return data is not None and "${" not in str(data) and is_quick_to_read(data)


def first_rows(data: Any, name: str) -> Rows | None:
    """The first rows of a data set that is quick to read, None of another, or of a mixture."""
    if not can_be_read(data) or is_mixture(data):
        return None
    rows = load_rows(data, name=name)
    return rows if len(rows) <= MAX_ROWS else Rows(rows[:MAX_ROWS], rows.description)


def env_settings(config: Any) -> dict[str, Any]:
    """Every setting of a config's environment, with the defaults, where it is one of ours.
    `chat_template` is also the one that an earlier experiment saves with the model.

    Raises:
        Problems: a setting that it does not have.
    """
    from rllib_llm.envs.rlhf import with_defaults

    if config.env not in ENVIRONMENTS:
        return {}
    env = with_defaults(config.env_config, default_settings(config.env))
    env["model"] = env.get("model") or config.pretrained_model
    saved = getattr(config.pretrained_model, "chat_template", None)
    env["chat_template"] = env.get("chat_template") or config.chat_template or saved
    env["template_settings"] = env.get("template_settings") or config.template_settings
    return env


def parts_of(stage: Stage) -> Iterator[Stage]:
    """The stages of each of its environments if it has several, else itself."""
    if not stage.is_rlhf or not stage.config.envs:
        yield stage
        return
    weights = stage.config.weights_of_envs()
    for (name, own), weight in zip(stage.config.env_configs().items(), weights, strict=True):
        num_prompts = stage.num_prompts * weight / sum(weights)
        yield replace(
            stage, config=own, env=env_settings(own), entry=name, num_prompts=num_prompts
        )


def of_each_env(
    rule: Callable[..., Iterable[Problem]], stage: Stage, **settings: Any
) -> Iterator[Problem]:
    """Problems that a rule finds in a stage, or in each of its environments if it has several."""
    for part in parts_of(stage):
        for problem in rule(part, **settings):
            yield problem.within(f"envs.{part.entry}") if part.entry else problem
