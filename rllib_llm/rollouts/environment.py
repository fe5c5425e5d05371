"""The interface between sampler and environment: prompts for a request, scores of completions."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rllib_llm.envs.actions import Judgement, told_columns
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.rollouts.request import SampleRequest
from rllib_llm.shared import columns

MAX_JUDGING = 16  # batches of completions that are judged at the same time


def unjudged(completions: Mapping[str, torch.Tensor], error: Exception) -> Judgement:
    """The judgement of completions none of which could be judged."""
    rewards = torch.zeros(len(completions[columns.COMPLETION_IDS]))
    scores = {columns.SCORES: rewards, columns.VALID: torch.zeros_like(rewards, dtype=torch.bool)}
    return Judgement(rewards, scores, cause=str(error))


class SamplingEnvironment:
    """A vector environment whose prompts are requested by position.

    Args:
        env: a `gymnasium.vector.VectorEnv` that keeps the contract of `BanditEnv`.
        replica: which of the run's environments it is.
    """

    def __init__(self, env: Any, replica: int = 0) -> None:
        self.env, self._replica = env, replica
        # Others than `BanditEnv` hand out prompts and judge in turns.
        self._turns = threading.RLock()
        self._places: queue.SimpleQueue[SamplingEnvironment] | None = None

    def _judging_places(self) -> queue.SimpleQueue[SamplingEnvironment]:
        """Environments that judge in threads beside this one; one that overrides judging is never
        called by two threads at once."""
        places: queue.SimpleQueue[SamplingEnvironment] = queue.SimpleQueue()
        if not isinstance(self.env, BanditEnv):
            places.put(self)
            return places
        for _ in range(MAX_JUDGING if type(self.env) is BanditEnv else 1):
            places.put(SamplingEnvironment(self.env.fork(), self._replica))
        return places

    @contextlib.contextmanager
    def judging(self, request: SampleRequest) -> Iterator[SamplingEnvironment]:
        """An environment that has handed out the prompts of `request` and judges completions of
        them, whatever this one does meanwhile; waits for one that is free. Others than `BanditEnv`
        judge serially: one batch at a time, and no prompts are handed out meanwhile.
        """
        with self._turns:
            if self._places is None:
                self._places = self._judging_places()
        place = self._places.get()
        try:
            with self._turns if place is self else contextlib.nullcontext():
                place.prompts(request)
                yield place
        finally:
            self._places.put(place)

    def replica_column(self, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """`columns.REPLICA` for as many rows as `like` has."""
        return {columns.REPLICA: torch.full_like(like, self._replica, dtype=torch.int32)}

    def prompts(self, request: SampleRequest) -> dict[str, torch.Tensor]:
        """The prompts of a request, those of a group adjacent, and which they are."""
        n = request.num_completions
        options = {
            "position": request.position,
            "num_prompts": request.num_prompts,
            "num_completions": n,
        }
        with self._turns:
            self.env.return_texts = request.return_texts
            observation, infos = self.env.reset(options=options)
        device = observation[columns.PROMPT_IDS].device
        positions = torch.arange(request.position, request.position + request.num_prompts)
        first = request.position * n
        row_ids = torch.arange(first, first + request.num_prompts * n)
        return {
            **observation,
            columns.PROMPT_INDEX: infos[columns.PROMPT_INDEX],
            columns.ROW_ID: row_ids.to(device),
            columns.GROUP: positions.repeat_interleave(n).to(device),
            **self.replica_column(row_ids.to(device)),
        }

    def judge(self, completions: Mapping[str, torch.Tensor], global_step: int) -> Judgement:
        """The results of `step` for completions of the last prompts.

        Args:
            completions: columns of them.
            global_step: updates behind the weights that made them, for reward functions that ask.

        What is learnt from is `infos["scores"]`. An environment that gives none is learnt from by
        its rewards, all rows of which count unless `infos["valid"]` says otherwise. One that said
        a part of the completions itself tells which tokens were sampled (see `told_columns`).
        Components, metrics and texts are there to be read, and may be left out.

        Raises:
            BanditEnvError: what it tells of tokens does not fit the completions.
        """
        with self._turns:
            self.env.global_step = global_step
            _, rewards, _, _, infos = self.env.step(completions)
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        judged = {
            columns.SCORES: infos.get(columns.SCORES, rewards),
            columns.VALID: infos.get(columns.VALID, torch.ones_like(rewards, dtype=torch.bool)),
        }
        if columns.REF_LOGPROBS in infos:
            judged[columns.REF_LOGPROBS] = infos[columns.REF_LOGPROBS]
        judged.update(told_columns(infos, completions[columns.COMPLETION_MASK]))
        texts = {}
        if "completion_texts" in infos:
            texts = {"prompt": infos["prompt_texts"], "completion": infos["completion_texts"]}
        return Judgement(
            rewards, judged, _rows(infos, "components"), _rows(infos, "metrics"), texts
        )


def _rows(infos: Mapping[str, Any], name: str) -> dict[str, torch.Tensor]:
    return dict(infos.get(name, {}))


def environment_settings(
    env_config: Mapping[str, Any],
    *,
    model: Any,
    max_completion_len: int,
    temperature: float,
    seed: int,
    device: str,
    is_evaluation: bool,
    with_reference: bool,
    frozen_quantization: str = "none",
) -> dict[str, Any]:
    """An environment's settings: the user's, and those that follow from the config.

    Args:
        env_config: the user's; what is set there stays.
        model: the policy's source; its tokenizer is the environment's.
        max_completion_len: tokens.
        temperature: the sampler's.
        seed: of the order of prompts.
        device: of the environment's tensors and frozen models.
        is_evaluation: whether prompts are held-out ones.
        with_reference: whether the environment holds the reference, a copy of `model` by default.
        frozen_quantization: of frozen models that name none.
    """
    defaults = {
        "model": model,
        "max_completion_len": max_completion_len,
        "temperature": temperature,
        "seed": seed,
        "device": device,
        "split": "eval" if is_evaluation else "train",
        "reference": {"model": model} if with_reference else None,
        "frozen_quantization": frozen_quantization,
    }
    return {**defaults, **env_config}
