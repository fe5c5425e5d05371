"""rllib_llm/ReasoningGym-v0: every data set of reasoning-gym by name, mixtures and curricula.

    env_config: {datasets: chain_sum}
    env_config: {datasets: [{name: chain_sum, weight: 2, config: {max_terms: 3}}, {name: gcd}]}

A task is a function of (seed, position): nothing is kept, and a run that is resumed goes on where
it was. Data sets are made once per replica. `scoring: exact` gives 1 for the right answer and 0 for
any other; `task` is the data set's own score, which for many gives a part for an answer that merely
holds the right one, and with it a reason to write all that might be right.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rllib_llm.data.made_rows import MadeRows
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.rlhf import DEFAULTS as RLHF_DEFAULTS
from rllib_llm.envs.rlhf import (
    EnvConfigError,
    build_bandit,
    policy_tokenizer,
    reward_terms,
    with_defaults,
)

SCORINGS = ("exact", "task")
DEFAULTS: dict[str, Any] = {
    **RLHF_DEFAULTS,
    "eval_fraction": 0.02,
    "datasets": None,  # a name, or a list of names or {name, weight, config}
    "num_tasks": 10_000,  # of all data sets together
    "tasks_seed": 0,  # of the tasks; `seed` is of their order
    "scoring": "exact",  # 1 or 0 | "task": the data set's own score
    "tasks_per_level": None,  # curriculum: tasks until it grows harder; None: as configured
    "instruction": "",  # put behind every question
    "answer_tag": None,  # "answer": what stands in <answer> is judged; None: all of the completion
    "as_chat": False,  # whether the question is a user's message rendered by the chat template
}


def create(env_config: Mapping[str, Any]) -> BanditEnv:
    """The environment; its keys and their defaults are `DEFAULTS`.

    Raises:
        EnvConfigError: an unknown data set or setting.
        ImportError: reasoning-gym is not installed.
    """
    settings = with_defaults(env_config, DEFAULTS, env_id="rllib_llm/ReasoningGym-v0")
    tasks = Tasks(
        settings["datasets"],
        num_tasks=settings["num_tasks"],
        seed=settings["tasks_seed"],
        tasks_per_level=settings["tasks_per_level"],
        instruction=settings["instruction"],
        as_chat=settings["as_chat"],
    )
    if settings["tasks_per_level"] is not None:
        settings["shuffle"] = False  # a curriculum is an order
    tokenizer = policy_tokenizer(settings)
    correct = functools.partial(
        score_tasks, tasks=tasks, scoring=settings["scoring"], answer_tag=settings["answer_tag"]
    )
    return build_bandit(
        settings,
        tokenizer=tokenizer,
        prompts=tasks,
        prompt_column="prompt",
        rewards=[{"function": correct, "name": "correct"}, *reward_terms(settings, tokenizer)],
    )


@dataclass(frozen=True)
class DatasetSpec:
    """One data set of a mixture."""

    name: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)


class Tasks(MadeRows):
    """Rows {"prompt", "answer", "dataset", "task"}, each a function of seed and index.

    Args:
        datasets: a name, or a list of names or of {name, weight, config}.
        num_tasks: rows.
        seed: of the tasks.
        tasks_per_level: rows until every data set's curriculum goes one level up; None: none does.
        instruction: behind every question.
        as_chat: whether prompts are messages.
    """

    column_names = ("prompt", "answer", "dataset", "task")

    def __init__(
        self,
        datasets: Any,
        *,
        num_tasks: int = 10_000,
        seed: int = 0,
        tasks_per_level: int | None = None,
        instruction: str = "",
        as_chat: bool = False,
    ) -> None:
        self.specs = _specs(datasets)
        super().__init__(num_tasks)
        self._seed, self._per_level = seed, tasks_per_level
        self._instruction, self._as_chat = instruction, as_chat
        weights = np.array([spec.weight for spec in self.specs], dtype=float)
        chosen = np.random.default_rng(seed).random(num_tasks)
        self._which = np.searchsorted(np.cumsum(weights / weights.sum()), chosen, side="right")
        self._made: dict[tuple[int, int], Any] = {}

    def make(self, index: int) -> dict[str, Any]:
        """The task at `index`."""
        which = min(int(self._which[index]), len(self.specs) - 1)
        entry = self.dataset(which, self.level(index))[index]
        question = f"{entry['question']}{self._instruction}"
        return {
            "prompt": [{"role": "user", "content": question}] if self._as_chat else question,
            "answer": str(entry["answer"]),
            "dataset": self.specs[which].name,
            "task": index,
        }

    def level(self, index: int) -> int:
        """How far the curriculum is at a row."""
        return 0 if self._per_level is None else index // self._per_level

    def dataset(self, which: int, level: int) -> Any:
        """The data set of a mixture at a level of its curriculum, made once."""
        if (which, level) not in self._made:
            self._made[which, level] = self._make(self.specs[which], level)
        return self._made[which, level]

    def _make(self, spec: DatasetSpec, level: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import CURRICULA

        config = dict(spec.config)
        if self._per_level is not None:
            if spec.name not in CURRICULA:
                raise EnvConfigError(
                    f"tasks_per_level={self._per_level!r} must be None for {spec.name!r}: it has "
                    "no curriculum. Remove the setting, or the data set."
                )
            curriculum = CURRICULA[spec.name]()
            for name, attribute in curriculum.attributes.items():
                curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
            config = {**asdict(curriculum.generate_configuration()), **config}
        config |= {"seed": self._seed, "size": self._size}
        try:
            return reasoning_gym.create_dataset(spec.name, **config)
        except (AssertionError, TypeError) as error:
            raise EnvConfigError(
                f"datasets: config={dict(spec.config)!r} must be settings of {spec.name!r}: "
                f"{error}. Correct them."
            ) from error

    def score(self, index: int, answer: str | None, scoring: str) -> float:
        """What an answer to task `index` is worth, 0 to 1."""
        which = min(int(self._which[index]), len(self.specs) - 1)
        dataset = self.dataset(which, self.level(index))
        entry = dataset[index]
        if scoring == "task":
            return float(dataset.score_answer(answer, entry))
        if answer is None:
            return 0.0
        # Some tasks have many right answers, of which the data set's own score tells.
        if answer.strip() == str(entry["answer"]).strip():
            return 1.0
        return 0.0 if str(entry["answer"]) in answer else float(
            dataset.score_answer(answer, entry) == 1.0
        )  # fmt: skip


def sft_texts(datasets: Any, num_tasks: int = 1000, seed: int = 1) -> list[dict[str, str]]:
    """Rows {"prompt", "completion"} of solved tasks; see `Tasks`."""
    tasks = Tasks(datasets, num_tasks=num_tasks, seed=seed)
    return [{"prompt": task["prompt"], "completion": task["answer"]} for task in tasks]


def score_tasks(
    completions: Sequence[str],
    task: Sequence[int],
    *,
    tasks: Tasks,
    scoring: str,
    answer_tag: str | None = None,
) -> list[float]:
    """What each completion is worth for its task."""
    from reasoning_gym.utils import extract_answer

    if scoring not in SCORINGS:
        raise EnvConfigError(
            f"scoring={scoring!r} must be one of {SCORINGS}: the right answer alone counts, or the "
            "data set's own score. Choose one."
        )
    answers = [
        extract_answer(text, tag_name=answer_tag) if answer_tag else text.strip()
        for text in map(_text, completions)
    ]
    return [
        tasks.score(index, answer, scoring)
        for index, answer in zip(task, answers, strict=True)
    ]  # fmt: skip


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _specs(datasets: Any) -> list[DatasetSpec]:
    from reasoning_gym.factory import DATASETS

    listed = datasets if isinstance(datasets, (list, tuple)) else [datasets]
    specs = []
    for given in listed:
        spec = given if isinstance(given, Mapping) else {"name": given}
        unknown = set(spec) - {"name", "weight", "config"}
        if spec.get("name") not in DATASETS or unknown or not spec.get("weight", 1.0) > 0:
            raise EnvConfigError(
                f"datasets={given!r} must be a name of reasoning-gym, or {{name, weight above 0, "
                f"config}}: {'unknown ' + repr(sorted(unknown)) if unknown else 'it is none'}. "
                f"There are {len(DATASETS)}, among them {sorted(DATASETS)[:8]}."
            )
        specs.append(DatasetSpec(**spec))
    return specs
