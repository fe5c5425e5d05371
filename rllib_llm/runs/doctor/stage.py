"""One experiment as the rules look at it: its settings, and the config they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rllib_llm.data.rows import Rows
from rllib_llm.runs.experiment import Experiment

MAX_ROWS = 20_000  # of a data set that are looked at


@dataclass
class Stage:
    """An experiment whose settings were accepted.

    config: of the first point of its search space.
    env: every setting of its environment with the defaults, {} where it is not one of ours.
    """

    experiment: Experiment
    config: Any
    env: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self.experiment.name

    @property
    def is_rlhf(self) -> bool:
        """Whether it samples completions; else it learns from texts."""
        from rllib_llm.algorithms.rlhf_config import RLHFConfig

        return isinstance(self.config, RLHFConfig)

    @property
    def is_conversation(self) -> bool:
        """Whether its environment answers: only there is known what is judged, and how long it
        gets."""
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
        stop = self.experiment.stop
        if "training_iteration" in stop:
            return int(stop["training_iteration"])
        if "episode" in stop:
            return -(-int(stop["episode"]) // self.config.total_train_batch_size)
        return None

    def models(self) -> dict[str, str]:
        """Every model that is read, by the setting that names it, where it is a local folder."""
        return {
            setting: str(Path(value).expanduser())
            for setting, value in self._named_models().items()
            if isinstance(value, str) and Path(value).expanduser().is_dir()
        }

    def is_made_before(self, setting: str) -> bool:
        """Whether an earlier experiment makes that model, which another stands in for so far."""
        from rllib_llm.runs.stand_ins import StandIn

        return isinstance(self._named_models()[setting], StandIn)

    def _named_models(self) -> dict[str, Any]:
        named = {
            "model": self.config.pretrained_model,
            "critic_model": getattr(self.config, "critic_model", None),
            "reward_model": self.env.get("reward_model"),
            "reference": self.env.get("reference"),
        }
        return {
            setting: value.get("model") if isinstance(value, Mapping) else value
            for setting, value in named.items()
        }


def first_rows(data: Any, name: str) -> Rows | None:
    """The first rows of a data set that is quick to read, None of another."""
    from rllib_llm.data.sources import is_quick_to_read, load_rows

    if data is None or "${" in str(data) or not is_quick_to_read(data):
        return None
    rows = load_rows(data, name=name)
    return rows if len(rows) <= MAX_ROWS else Rows(rows[:MAX_ROWS], rows.description)


def make_stage(experiment: Experiment) -> Stage | None:
    """The stage of an experiment with our algorithm and sound settings, else None."""
    from rllib_llm.algorithms.language_model_config import LanguageModelConfig
    from rllib_llm.config.schema import build_config
    from rllib_llm.envs.registry import ENVIRONMENTS, default_settings
    from rllib_llm.envs.rlhf import with_defaults
    from rllib_llm.runs.algorithms import algorithm_class
    from rllib_llm.runs.plan import search_space
    from rllib_llm.runs.search_space import examples

    algo_class = algorithm_class(experiment.run, experiment.name)
    settings = examples(search_space(experiment), limit=1)[0]
    config = build_config(algo_class, settings, f"{experiment.name}.config")  # type: ignore[arg-type]
    if not isinstance(config, LanguageModelConfig):
        return None
    env: dict[str, Any] = {}
    name = getattr(config, "env", None)
    if name in ENVIRONMENTS:
        env = with_defaults(config.env_config, default_settings(name), env_id=name)
        env["model"] = env.get("model") or config.pretrained_model
        env["chat_template"] = env.get("chat_template") or config.chat_template
    return Stage(experiment, config, env)
