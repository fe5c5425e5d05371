"""On-policy distillation: the policy samples, a teacher says what it would have written (Agarwal et
al. 2024, "On-Policy Distillation of Language Models").

    samplers ─▶ completions ─┐
                             ├─▶ one batch ─▶ learners: divergence from the teacher at each token
    data ─▶ completions ─────┘   (`on_policy_share` of the first)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rllib_llm.algorithms.rlhf import RLHF
from rllib_llm.algorithms.rlhf_config import CriticFreeConfig
from rllib_llm.config.sections import wrong
from rllib_llm.data.texts import TextSource
from rllib_llm.envs.judges.reward_functions import UNREWARDED
from rllib_llm.envs.settings import CONVERSATION_ENV
from rllib_llm.rollouts.judged_batch import JudgedBatch, concatenate
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import DEFAULT_ENV, Section, Settings, setting, when

MIXED = when("on_policy_share", "is below 1", lambda share: share < 1, "Set on_policy_share")


class DataMixture(Settings):
    """Completions of a data set beside the policy's own."""

    on_policy_share: float = setting(
        1.0, "the share of the batch that the policy samples; the rest is distill_data's",
        note="GKD's λ. 0: nothing is sampled, as in SFT, but from the teacher's distributions.",
        least=0, most=1, trl="lmbda",
    )  # fmt: skip
    distill_data: Any = setting(
        None, "rows with prompt and completion, or messages, in any form that SFT reads",
        acts=(MIXED,),
    )  # fmt: skip


MIXTURE = Section.of("distillation", DataMixture)


class DistillationConfig(CriticFreeConfig):
    """The divergence from a teacher at each token that the policy wrote. Rewards are optional: they
    are measured. The settings are those of distillation beside other algorithms (`distill_coeff`).

    `on_policy_share` below 1 is GKD's mixture with a data set's completions, 0 alone is supervised
    learning from a teacher's distributions. `teacher="policy"` with `teacher_prompt` is
    self-distillation (SDFT, OPSD).
    """

    sections: tuple[Section, ...] = (*CriticFreeConfig.sections, MIXTURE)
    ignored_settings = (
        *CriticFreeConfig.ignored_settings,
        "gamma",
        "lambda_",
        "scale_by_std",
        "whiten_advantages",
        "whiten_rewards",
        "drop_zero_variance_groups",
        "reward_aggregation",
        "turn_advantages",
        "turn_advantage_coeff",
    )
    learner_path = "rllib_llm.learners.policy_learners:DistillationLearner"

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class or Distillation)
        self.num_completions = 1
        self.ref_kl_coeff = 0.0
        self.distill_coeff = 1.0

    @property
    def num_prompts_per_iteration(self) -> int:
        groups = self.total_train_batch_size // self.num_completions
        return max(1, groups - self.num_data_rows // self.num_completions)  # samplers need one

    @property
    def num_data_rows(self) -> int:
        """Rows of a batch that come from `distill_data`: whole groups."""
        groups = self.total_train_batch_size // self.num_completions
        return round((1 - self.on_policy_share) * groups) * self.num_completions

    def _settle(self) -> None:
        super()._settle()
        is_ours = self.env in (DEFAULT_ENV, CONVERSATION_ENV)
        if is_ours and not {"reward_functions", "reward_model"} & self.env_config.keys():
            self.env_config = {**self.env_config, "reward_functions": UNREWARDED}

    def mixture_rules(self) -> Iterator[Problem]:
        """There is data for the rest of a batch, and the teacher can judge it."""
        if self.on_policy_share == 1:
            return
        share = f"with on_policy_share={self.on_policy_share:g}"
        if self.distill_data is None:
            yield wrong(self, "distill_data", f"given {share}", "the rest of the batch is its rows",
                        "Name a data set, or set on_policy_share=1")  # fmt: skip
        if self.teacher_in == "environment":
            yield wrong(self, "teacher_in", f"'learner' {share}",
                        "no environment sees the data", "Use teacher_in='learner'")  # fmt: skip
        if self.ref_kl_coeff and self.reference_place == "environment":
            yield wrong(self, "reference_in", f"'learner' {share}",
                        "no environment sees the data", "Use reference_in='learner'")  # fmt: skip
        if self.distill_loss != "divergence":
            yield wrong(self, "distill_loss", f"'divergence' {share}",
                        "the policy gradient is of tokens that the policy sampled",
                        "Use distill_loss='divergence'")  # fmt: skip
        if self.env_config.get("teacher_prompt") is not None:
            yield Problem("env_config.teacher_prompt", f"be None {share}",
                          "the data has no prompts for the teacher", "Leave it out",
                          self.env_config["teacher_prompt"])  # fmt: skip

    rules = (*CriticFreeConfig.rules, mixture_rules)


class Distillation(RLHF):
    """RLlib Algorithm; see `DistillationConfig`. Adds to the results of `RLHF`: loss/distill_avg,
    train/teacher_kl (nats per token) and train/teacher_agreement (share of the tokens that both
    like best)."""

    config_class = DistillationConfig

    def make_rollouts(self) -> Any:
        source, config = super().make_rollouts(), self.config
        if not config.num_data_rows:
            return source
        tokenizer = config.load_tokenizer()
        texts = TextSource(
            config.distill_data, tokenizer=tokenizer, seed=config.seed or 0,
            max_length=config.env_config.get("max_prompt_len", 128) + config.max_new_tokens,
        )  # fmt: skip
        pad, samples = int(tokenizer.pad_token_id), config.on_policy_share > 0
        return MixedRollouts(source, texts, config.num_data_rows, pad, samples=samples)


class MixedRollouts:
    """A rollout source whose batches end with rows of a data set; `pad`: a token's id; `samples`:
    whether they begin with sampled ones."""

    def __init__(
        self, source: Any, texts: TextSource, num_rows: int, pad: int, *, samples: bool
    ) -> None:
        self._source, self._texts, self._num_rows = source, texts, num_rows
        self._pad, self._samples = pad, samples
        self._data_position = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def next(self) -> JudgedBatch:
        """The source's next batch and the next rows of the data, which no metric of samples
        counts."""
        data = data_rows(self._texts, self._data_position, self._num_rows, self._pad)
        self._data_position += self._num_rows
        if not self._samples:
            return data
        sampled = self._source.next()
        is_data = torch.zeros_like(sampled.columns[columns.VALID])
        of_prompts = {columns.IMAGE_ROW, columns.ENVIRONMENT, columns.POSITION,
                      *columns.TEACHER_PROMPTS}  # fmt: skip
        kept = sampled.columns.keys() & (data.columns.keys() | of_prompts)
        sampled.columns = {name: sampled.columns[name] for name in kept}
        sampled.columns[columns.FROM_DATA] = is_data
        batch = concatenate([sampled, data.to(is_data.device)])
        batch.num_replayed = sampled.num_replayed + self._num_rows
        return batch

    def state(self) -> dict[str, Any]:
        return {**self._source.state(), "data_position": self._data_position}

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)
        self._data_position = state.get("data_position", 0)


def data_rows(texts: TextSource, position: int, num_rows: int, pad: int) -> JudgedBatch:
    """Rows `position ..` of a data set as completions that a policy wrote; `pad`: a token's id."""
    batch = texts.batch(position, num_rows)
    targets = batch[columns.LOSS_MASK]
    begins = targets.int().argmax(dim=1)
    place = torch.arange(targets.shape[1])
    is_prompt = place < begins.unsqueeze(1)
    is_answer = batch[columns.ATTENTION_MASK] & ~is_prompt

    def taken(values: torch.Tensor, mask: torch.Tensor) -> list[list[Any]]:
        return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]

    ids = batch[columns.INPUT_IDS]
    prompts = columns.pad_left(taken(ids, is_prompt), pad)
    answers = columns.pad_right(taken(ids, is_answer), pad)
    loss_mask = columns.pad_right(taken(targets, is_answer), False, torch.bool)[0]
    numbers = -1 - torch.arange(position, position + num_rows)  # of no prompt
    nothing = torch.zeros(num_rows)
    return JudgedBatch(
        {
            columns.PROMPT_IDS: prompts[0], columns.PROMPT_MASK: prompts[1],
            columns.COMPLETION_IDS: answers[0], columns.COMPLETION_MASK: answers[1],
            columns.LOSS_MASK: loss_mask, columns.SAMPLER_LOGPROBS: torch.zeros(loss_mask.shape),
            columns.WEIGHTS_VERSION: torch.full(loss_mask.shape, -1, dtype=torch.int32),
            columns.SCORES: nothing, columns.VALID: torch.ones(num_rows, dtype=torch.bool),
            columns.FINISHED: torch.ones(num_rows, dtype=torch.bool),
            columns.FROM_DATA: torch.ones(num_rows, dtype=torch.bool),
            columns.PROMPT_INDEX: numbers, columns.ROW_ID: numbers, columns.GROUP: numbers,
            columns.REPLICA: torch.zeros(num_rows, dtype=torch.int32),
        },
        rewards=nothing, pad_token_id=pad, num_replayed=num_rows,
    )  # fmt: skip
