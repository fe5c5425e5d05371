"""Stages that learn from a data set instead of an environment: SFT and reward models.

Their batches are drawn by the driver: rows `position .. position + batch - 1` of the data set in
its seeded order, epoch after epoch.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from gymnasium.spaces import Discrete
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
from rllib_llm.algorithms.language_model_config import LanguageModelConfig
from rllib_llm.config.sections import given, wrong
from rllib_llm.data.mixture import MixedSource, batches_of
from rllib_llm.data.texts import BatchSource
from rllib_llm.overseer.phases import EVALUATING, LEARNING
from rllib_llm.shared.errors import Problem, Problems
from rllib_llm.shared.setting import Section, Settings, setting

PIPELINE_STATE = "rllib_llm"
EVALUATION_BATCH = 64  # rows scored at once


class DataSet(Settings):
    """The data set."""

    data: Any = setting(
        None, "a file (JSONL, Parquet, text), a data-set folder, a hub id, or the dotted path of a "
        "function returning rows", note="Or {path: ..., split: ..., limit: ..., kwargs: ...}; a "
        "list of {path: ..., weight: ...} mixes several by their weights.", trl="train_dataset",
        also="dataset dataset_name train_data train_file",
    )  # fmt: skip
    eval_data: Any = setting(
        None, "held-out rows in the same form", note="None: no evaluation.", trl="eval_dataset",
        also="validation_data eval_file",
    )  # fmt: skip
    max_length: int = setting(
        256, "how much of each text is kept", unit="tokens", least=2,
        also="max_seq_length max_seq_len model_max_length",
        reason="every token but the first is predicted",
        remedy="Write 256, or the tokens of your longest text",
    )  # fmt: skip
    shuffle: bool = setting(
        True, "whether rows are drawn in a seeded random order, new in every epoch",
        trl="shuffle_dataset",
    )  # fmt: skip


SUPERVISED = Section.of("training", DataSet)


class SupervisedConfig(LanguageModelConfig):
    """Settings of the data set of supervised stages."""

    sections: tuple[Section, ...] = (*LanguageModelConfig.sections, SUPERVISED)
    source_class: Callable[..., BatchSource] | None = None  # what reads the data

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        self._is_online = False  # no environment, no samplers
        # RLHF's 1e-5 is large beside the gradients of a nearly learnt text.
        self.adam_epsilon = 1e-8
        self.evaluation_duration = 256
        self.evaluation_interval = None
        # No environment gives spaces; nothing here depends on them.
        texts = Repeated(Discrete(2), 1)
        self.observation_space, self.action_space = texts, texts

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {"temperature": 1.0, "critic": "none"}

    def make_source(self, data: Any, **settings: Any) -> BatchSource | MixedSource:
        """The rows of `data`, tokenised; `settings`: tokenizer, max_length and shuffle."""
        source = given(
            type(self).source_class, f"{type(self).__name__}.source_class", "a class or a function",
            "it reads the data", "Set it in the class, or override make_source",
        )  # fmt: skip
        reads: dict[str, Any] = {
            "model": self.pretrained_model, "chat_template": self.chat_template
        }
        return batches_of(source, data, seed=self.seed or 0, **reads, **settings)

    def longest_text(self) -> int:
        """The number of tokens kept of each text: at most the model's context length."""
        from rllib_llm.modules.model_source import num_positions

        positions = num_positions(self.given_model())
        return min(self.max_length, positions or self.max_length)

    def data_rules(self) -> Iterator[Problem]:
        """There is data to learn from, and to evaluate on."""
        if self.data is None:
            yield Problem("data", "be a data set", "it is what is learnt from",
                          "Name a file, a hub id or a dotted path")  # fmt: skip
        if self.evaluation_interval and self.eval_data is None:
            yield wrong(self, "eval_data",
                        f"given with evaluation_interval={self.evaluation_interval}",
                        "evaluation needs held-out rows",
                        "Name a data set, or set evaluation_interval: null")  # fmt: skip

    rules = (*LanguageModelConfig.rules, data_rules)


class Supervised(LanguageModelAlgorithm):
    """Subclasses define the config's `make_source` and the learner's `evaluate_batch`."""

    config: SupervisedConfig

    def setup(self, config) -> None:
        self.position = 0  # rows handed out so far
        self.num_updates = 0
        super().setup(config)

    def read_data(self) -> None:
        """Reads the data sets and the tokenizer that makes tokens of them."""
        config = self.config
        self.tokenizer = config.load_tokenizer()
        self.max_length = config.longest_text()
        settings = {"tokenizer": self.tokenizer, "max_length": self.max_length}
        self._source = config.make_source(config.data, shuffle=config.shuffle, **settings)
        self._eval_source: BatchSource | MixedSource | None = None
        if config.eval_data is not None:
            self._eval_source = config.make_source(config.eval_data, shuffle=False, **settings)
            num_rows, num_read = len(self._eval_source), config.evaluation_duration
            if num_read < num_rows:
                text = f"evaluation_duration={num_read} is less than the {num_rows} held-out rows"
                warnings.warn(f"{text}: the others are never evaluated.", stacklevel=2)

    @classmethod
    def _should_create_evaluation_env_runners(cls, eval_config) -> bool:
        return False

    def training_step(self) -> None:
        if self.position == 0 and self.config.evaluation_interval and self.eval_metrics is None:
            self.evaluate()
        num_rows = self.config.total_train_batch_size
        with self.phase(LEARNING, f"learning from {num_rows} rows"):
            rows = self._source.batch(self.position, num_rows)
            self.update_learners(rows, num_rows)
        self.position += num_rows
        self.num_updates += 1
        self._log(num_rows, rows, self.phase.took[LEARNING])

    def _log(self, num_rows: int, rows: dict[str, Any], seconds: float) -> None:
        groups = self.learner_metrics()
        num_tokens = sum(int(mask.sum()) for name, mask in rows.items() if name.endswith("_mask"))
        rates = {"tokens_per_s": num_tokens / seconds, "samples_per_s": num_rows / seconds}
        groups["throughput"] = {**rates, "iteration_seconds": seconds}
        groups.setdefault("train", {})["truncated_share"] = self._source.truncated_share
        self.note(groups, self.position, num_rows / seconds)
        self.known_metrics["epoch"] = self.position / len(self._source)

    def evaluate(self, parallel_train_future=None) -> dict[str, Any]:
        """Means over the first `evaluation_duration` held-out rows, as RLlib's `evaluate`, and the
        `iteration` after which they are."""
        when = "" if self.position else " before training"
        with self.phase(EVALUATING, f"{EVALUATING}{when}"):
            self.eval_metrics = {**self.held_out_means(), "iteration": self.num_updates}
        return dict(self.eval_metrics)

    def held_out_means(self) -> dict[str, float]:
        """The metrics of an evaluation, without recording it.

        Raises:
            Problems: there is no `eval_data`.
        """
        source = self._eval_source
        if source is None:
            raise Problems("eval_data", "be a data set", "evaluation needs held-out rows",
                           "Name a file, a hub id or a dotted path", None)  # fmt: skip
        num_rows = min(self.config.evaluation_duration, len(source))
        totals = self.totals(source, num_rows, lambda learner, batch: learner.evaluate_batch(batch))
        return self.summarize(totals)

    def totals(
        self, source: BatchSource | MixedSource, num_rows: int,
        sums: Callable[..., dict[str, float]],
    ) -> Counter[str]:
        """The sums that learners give of the first rows of `source`, by (learner, batch=...)."""
        totals: Counter[str] = Counter()
        for position in range(0, num_rows, EVALUATION_BATCH):
            batch = source.batch(position, min(EVALUATION_BATCH, num_rows - position))
            call = functools.partial(sums, batch=batch)
            for result in self.learner_group.foreach_learner(call):
                totals.update(result.get())
        return totals

    def summarize(self, totals: Counter[str]) -> dict[str, float]:
        """Means by name from the learners' `<name>_sum` and `<name>_count`."""
        names = [key.removesuffix("_sum") for key in totals if key.endswith("_sum")]
        return {
            name: totals[f"{name}_sum"] / totals[f"{name}_count"]
            for name in names
            if totals[f"{name}_count"]
        }

    def get_state(self, components=None, *, not_components=None, **kwargs) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        names = ("position", "num_updates", "eval_metrics")
        state[PIPELINE_STATE] = {name: getattr(self, name) for name in names}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if PIPELINE_STATE in state:
            self.position = state[PIPELINE_STATE]["position"]
            so_far = self.position // self.config.total_train_batch_size  # of older checkpoints
            self.num_updates = state[PIPELINE_STATE].get("num_updates", so_far)
            self.eval_metrics = state[PIPELINE_STATE]["eval_metrics"]
