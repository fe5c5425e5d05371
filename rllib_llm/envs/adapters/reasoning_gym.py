"""rllib_llm/ReasoningGym-v0: every data set of reasoning-gym by name, mixtures and curricula.

    env_config: {datasets: chain_sum}
    env_config: {datasets: [{name: chain_sum, weight: 2, config: {max_terms: 3}}, {name: gcd}]}

A task is a function of (seed, position), so a resumed run continues where it was. Data sets
are made once per replica, and a task is remembered until it is scored: some take long to make (of
sokoban up to seconds). `scoring: task` is the data set's own score, which for
many gives a part for an answer that merely holds the right one; `exact` gives 1 where that score is
full and 0 elsewhere. Answers are scored in contained processes: data sets evaluate some of them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rllib_llm.data.rows import MadeRows
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.judges.reward_functions import Invalid, Judge
from rllib_llm.envs.rlhf import DEFAULTS as RLHF_DEFAULTS
from rllib_llm.envs.rlhf import build_bandit, policy_tokenizer, reward_terms, with_defaults
from rllib_llm.envs.sandbox import WorkerPool
from rllib_llm.envs.settings import check_values, declared
from rllib_llm.shared.dotted import as_list
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.setting import Settings, setting

SCORE = f"{Path(__file__).with_name('reasoning_gym_score.py')}:score"
_SHOWN = 200  # characters of an error
_NONSENSE = "no answer"
_REMEMBERED = 4096  # tasks


class TaskSettings(Settings):
    """Tasks of reasoning-gym, and how they are scored."""

    datasets: Any = setting(None, "a name, or a list of names or {name, weight, config}")
    num_tasks: int = setting(10_000, "the number of tasks of all data sets together", least=1)
    tasks_seed: int = setting(0, "the seed of the tasks; `seed` is that of their order", least=0)
    scoring: Literal["task", "exact"] = setting(
        "task", "the data set's own score, or 1 where that is full and 0 elsewhere"
    )
    score_workers: int = setting(2, "the number of processes that score", least=1)
    score_deadline_s: float = setting(
        10.0, "the time limit of scoring an answer", unit="seconds", above=0
    )
    tasks_per_level: int | None = setting(
        None, "the number of tasks until the curriculum grows harder; None: as configured", least=1
    )
    instruction: str = setting("", "a text behind every question", may_be_empty=True)
    answer_tag: str | None = setting(
        None, "the tag whose content is judged, such as answer; None: all of the completion"
    )
    as_chat: bool = setting(
        False, "whether the question is a user's message rendered by the chat template"
    )


_OWN = declared(TaskSettings)
DEFAULTS = {**RLHF_DEFAULTS, **_OWN, "eval_fraction": 0.02}


def create(env_config: Mapping[str, Any]) -> BanditEnv:
    """The environment; its keys and their defaults are `DEFAULTS`."""
    settings = with_defaults(env_config, DEFAULTS)
    tasks = Tasks(
        settings["datasets"], num_tasks=settings["num_tasks"], seed=settings["tasks_seed"],
        tasks_per_level=settings["tasks_per_level"], instruction=settings["instruction"],
        as_chat=settings["as_chat"],
    )  # fmt: skip
    if settings["tasks_per_level"] is not None:
        settings["shuffle"] = False  # a curriculum is an order
    tokenizer = policy_tokenizer(settings)
    pool = WorkerPool(
        SCORE, isolated=True, num_workers=settings["score_workers"],
        deadline_s=settings["score_deadline_s"],
    )  # fmt: skip
    how = {name: settings[name] for name in ("scoring", "answer_tag")}
    correct = Scorer(tasks, pool=pool, **how)
    return build_bandit(
        settings, tokenizer=tokenizer, prompts=tasks, prompt_column="prompt",
        rewards=[{"function": correct, "name": "correct"}, *reward_terms(settings, tokenizer)],
    )  # fmt: skip


@dataclass(frozen=True)
class DatasetSpec:
    """One data set of a mixture."""

    name: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict)


class Tasks(MadeRows):
    """Rows {"prompt", "answer", "dataset", "task"}, each a function of seed and index; its settings
    are `DEFAULTS`'."""

    column_names = ("prompt", "answer", "dataset", "task")

    def __init__(
        self, datasets: Any, *, num_tasks: int = 10_000, seed: int = 0,
        tasks_per_level: int | None = None, instruction: str = "", as_chat: bool = False,
    ) -> None:  # fmt: skip
        self.specs = _specs(datasets)
        check_values(_OWN, num_tasks=num_tasks, tasks_seed=seed, tasks_per_level=tasks_per_level)
        super().__init__(num_tasks)
        self._seed, self._per_level = seed, tasks_per_level
        self._instruction, self._as_chat = instruction, as_chat
        weights = np.array([spec.weight for spec in self.specs], dtype=float)
        chosen = np.random.default_rng(seed).random(num_tasks)
        self._which = np.searchsorted(np.cumsum(weights / weights.sum()), chosen, side="right")
        self._made: dict[tuple[int, int], Any] = {}
        self.__setstate__(vars(self))
        self._check_levels()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_remembered": None}  # no cache is pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        packed = functools.lru_cache(_REMEMBERED)
        self._remembered = packed(lambda *task: _packed(self._entry(*task)))

    def _check_levels(self) -> None:
        """Makes a row of each data set at every level that tasks will reach."""
        for which in sorted(set(self._which.clip(max=len(self.specs) - 1).tolist())):
            highest = self.level(self._size - 1)
            if highest:  # a curriculum stays as it is from its last level on
                known = self._curriculum(which).attributes.values()
                highest = min(highest, max((len(each.levels) for each in known), default=1) - 1)
            for level in range(highest + 1):
                entry = self._entry(which, level, 0)
            with contextlib.suppress(Exception):  # an answer that it cannot read
                if self.dataset(which, level).score_answer(_NONSENSE, entry) >= 1.0:
                    name = self.specs[which].name
                    text = f"datasets: {name!r} gives its full score to {_NONSENSE!r}: leave it out"
                    warnings.warn(f"{text}.", stacklevel=3)

    def make(self, index: int) -> dict[str, Any]:
        """The task at `index`."""
        which, entry = self.entry(index)
        question = f"{entry['question']}{self._instruction}"
        answer = entry["answer"]
        return {
            "prompt": [{"role": "user", "content": question}] if self._as_chat else question,
            "answer": None if answer is None else str(answer),
            "dataset": self.specs[which].name, "task": index,
        }  # fmt: skip

    def entry(self, index: int) -> tuple[int, Any]:
        """Which data set the task at `index` is of, and a copy of reasoning-gym's own record of
        it."""
        which, packed = self._found(index)
        return which, pickle.loads(base64.b64decode(packed))

    def _found(self, index: int) -> tuple[int, str]:
        which = min(int(self._which[index]), len(self.specs) - 1)
        return which, self._remembered(which, self.level(index), index)

    def _entry(self, which: int, level: int, index: int) -> Any:
        try:
            return self.dataset(which, level)[index]
        except Problems:
            raise
        except Exception as error:  # noqa: BLE001  (of a data set: its settings make no task)
            spec = self.specs[which]
            place = "" if self._per_level is None else f" at level {level} of its curriculum"
            reason = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
            rule = f"be settings of {spec.name!r}{place}"
            raise Problems("datasets.config", rule, reason, value=dict(spec.config)) from error

    def level(self, index: int) -> int:
        """The curriculum's level at a row."""
        return 0 if self._per_level is None else index // self._per_level

    def dataset(self, which: int, level: int) -> Any:
        """The data set of a mixture at a level of its curriculum, made once."""
        import reasoning_gym

        if (which, level) not in self._made:
            config, name = self._config(which, level), self.specs[which].name
            self._made[which, level] = reasoning_gym.create_dataset(name, **config)
        return self._made[which, level]

    def packed(self, index: int) -> dict[str, str]:
        """The task at `index`, packed for the scoring process."""
        which, entry = self._found(index)
        config = self._config(which, self.level(index))
        return {"name": self.specs[which].name, "config": _packed(config), "entry": entry}

    def _config(self, which: int, level: int) -> dict[str, Any]:
        config = dict(self.specs[which].config)
        if self._per_level is not None:
            curriculum = self._curriculum(which)
            for name, attribute in curriculum.attributes.items():
                curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
            made = curriculum.generate_configuration()
            config = {**{each.name: getattr(made, each.name) for each in fields(made)}, **config}
        return {**config, "seed": self._seed, "size": self._size}

    def _curriculum(self, which: int) -> Any:
        from reasoning_gym.factory import CURRICULA

        name = self.specs[which].name
        require(name in CURRICULA, "tasks_per_level", self._per_level, f"be None for {name!r}",
                "it has no curriculum")  # fmt: skip
        return CURRICULA[name]()  # type: ignore[operator]


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def sft_texts(datasets: Any, num_tasks: int = 1000, seed: int = 1) -> list[dict[str, str]]:
    """Rows {"prompt", "completion"} of solved tasks, those left out that come without an answer;
    see `Tasks`.

    Raises:
        Problems: none has an answer.
    """
    tasks = Tasks(datasets, num_tasks=num_tasks, seed=seed)
    rows = [(task["prompt"], task["answer"]) for task in tasks if task["answer"] is not None]
    require(rows, "datasets", datasets, "have a data set with answers",
            "reasoning-gym only judges answers to these")  # fmt: skip
    return [{"prompt": prompt, "completion": answer} for prompt, answer in rows]


class Scorer(Judge):
    """A reward function: reasoning-gym's score of each completion; its settings are `DEFAULTS`'.

    An answer that its data set cannot score twice, in time or at all, is worth 0 where the data set
    can score its own answer, and is `Invalid` where it cannot.
    """

    wants_texts = True

    def __init__(
        self, tasks: Tasks, *, pool: WorkerPool, scoring: str = "task",
        answer_tag: str | None = None,
    ) -> None:  # fmt: skip
        check_values(_OWN, scoring=scoring)
        self._tasks, self._scoring, self._answer_tag, self._pool = tasks, scoring, answer_tag, pool

    def __call__(self, completions: Sequence[str], task: Sequence[int]) -> list[Any]:
        """A number from 0 to 1 for each completion, or `Invalid`."""
        from reasoning_gym.utils import extract_answer

        tag = self._answer_tag
        packed = functools.lru_cache(maxsize=None)(self._tasks.packed)
        calls = [
            {**packed(index), "answer": extract_answer(text, tag_name=tag) if tag else text.strip()}
            for index, text in zip(task, completions, strict=True)
        ]
        scores = self._scored(calls)
        failed = [i for i, score in enumerate(scores) if isinstance(score, Invalid)]
        known = {task[i]: {**calls[i], "answer": self._tasks[task[i]]["answer"]} for i in failed}
        # Once more beside the data sets' own answers: on a busy machine these are late as well.
        again = self._scored([*(calls[i] for i in failed), *known.values()])
        own = dict(zip(known, again[len(failed) :], strict=True))
        for i, score in zip(failed, again, strict=False):
            is_to_blame = isinstance(score, Invalid) and not isinstance(own[task[i]], Invalid)
            scores[i] = 0.0 if is_to_blame else score
        if self._scoring == "task":
            return scores
        return [s if isinstance(s, Invalid) else float(s >= 1.0) for s in scores]

    def _scored(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [
            each if type(each) in (int, float, Invalid) else Invalid(f"its score is {each!r:.80}")
            for each in self._pool.map(calls)
        ]


def _specs(datasets: Any) -> list[DatasetSpec]:
    from reasoning_gym.factory import DATASETS

    given = as_list(datasets)
    specs = [dict(each) if isinstance(each, Mapping) else {"name": each} for each in given]
    require(specs, "datasets", datasets, "name a data set of reasoning-gym")
    for spec in specs:
        name, weight, config = spec.get("name"), spec.get("weight", 1.0), spec.get("config", {})
        for fits, key, value, rule in (
            (spec.keys() <= {"name", "weight", "config"}, "", spec, "have name, weight, config"),
            (isinstance(name, str) and name in DATASETS, ".name", name,
             f"be one of {len(DATASETS)} of reasoning-gym, such as {sorted(DATASETS)[:8]}"),
            (isinstance(weight, int | float) and not isinstance(weight, bool)
             and 0 < weight < math.inf, ".weight", weight, "be a number above 0"),
            (isinstance(config, Mapping) and config.keys().isdisjoint(("seed", "size")), ".config",
             config, "be a mapping without seed and size, which tasks_seed and num_tasks set"),
        ):  # fmt: skip
            require(fits, f"datasets{key}", value, rule)
    return [DatasetSpec(**spec) for spec in specs]
