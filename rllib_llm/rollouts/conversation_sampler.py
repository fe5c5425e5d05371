"""Conversations of a sampler: many rollouts that share an engine in its own thread.

The engine lives for one request: the weights do not change under a conversation, and nothing of its
cache is left when the learner changes the very module that it sampled with. Where agents hold the
conversations, a server in this process stands between them and the engine.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rllib_llm.conversations.conversation import Rollout, training_columns
from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import NOT_FINITE, Ended
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.envs.adapters.agent import AgentEnv, open_for, run_agents
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import Complete, EngineFailed, judge, run_rollouts
from rllib_llm.envs.judges.rewards import UnjudgedError
from rllib_llm.rollouts.judged_batch import JudgedBatch, SampleRequest
from rllib_llm.rollouts.sampler import Sampler, SamplingEnvironment, UnjudgedBatch, failed_metrics
from rllib_llm.shared import columns
from rllib_llm.shared.errors import require
from rllib_llm.weights.published import PublishedWeights


class ConversationSampler(Sampler):
    """A sampler for conversation environments, with the same interface as the others."""

    takes_rows = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._judging = threading.Lock()
        self._judging_env = SamplingEnvironment(copy.copy(self.environment.env))

    def generate(
        self, request: SampleRequest, published: PublishedWeights | None = None
    ) -> UnjudgedBatch:
        """Finished conversations: token i of a turn depends on seed, rollout, turn, i and the
        conversation before it."""
        with self._generating(request, published) as generated:
            env: ConversationEnv = self.environment.env
            params = self.params(request.explore)
            ends = (*params.stop_token_ids, *env.chat_format.stop_token_ids)
            params = dataclasses.replace(params, stop_token_ids=tuple(dict.fromkeys(ends)))
            generated.completions = self._attempts(env, request, params)
        return generated

    @contextlib.contextmanager
    def _environment_beside(self, request: SampleRequest) -> Iterator[SamplingEnvironment]:
        """Judges one batch after the other."""
        with self._judging:
            yield self._judging_env

    def _unjudged(self, generated: UnjudgedBatch, error: UnjudgedError) -> JudgedBatch:
        rows = training_columns(generated.completions, self.policy.pad_token_id)
        failed = failed_metrics(error, rows[columns.SCORES])
        return self._batch(generated, rows, metrics=failed, cause=str(error))

    def _score(self, environment: SamplingEnvironment, generated: UnjudgedBatch) -> JudgedBatch:
        """Judged conversations as one batch of all their rows; rows of a group are adjacent."""
        start = time.perf_counter()
        environment.env.global_step = generated.step
        judged = judge(environment.env, generated.completions, self.policy.pad_token_id)
        tools, sampling = (
            float(judged.metrics[name].nan_to_num().sum()) if name in judged.metrics else 0.0
            for name in ("tool_seconds", "sample_seconds")
        )
        # Conversations wait side by side: the share of their time that went into tools.
        share = tools / (tools + sampling) if tools + sampling > 0 else 0.0
        seconds = {
            "tool_seconds": generated.timings["generate_seconds"] * share,
            "judge_seconds": time.perf_counter() - start,
        }
        return self._batch(
            generated, judged.columns, components=judged.components, metrics=judged.metrics,
            texts=judged.texts, timings={**generated.timings, **seconds},
        )  # fmt: skip

    def _batch(
        self, generated: UnjudgedBatch, rows: dict[str, torch.Tensor], **judged: Any
    ) -> JudgedBatch:
        origin = self.environment.origin(rows[columns.GROUP], generated.request)
        return JudgedBatch(
            columns=rows | origin, rewards=rows[columns.SCORES], weights=generated.weights,
            pad_token_id=self.policy.pad_token_id, **judged,
        )  # fmt: skip

    def _attempts(
        self, env: ConversationEnv, request: SampleRequest, params: SamplingParams
    ) -> list[Rollout]:
        """The conversations of a request, which are over."""
        with contextlib.closing(EngineLoop(self.policy.open_engine(self.weights.version))) as loop:
            return run_rollouts(
                env, env.tasks.rows(request.position, request.num_prompts),
                positions=request.positions, num_completions=request.num_completions,
                stride=request.stride, complete=completer(loop, params, self.seed),
                max_new_tokens=params.max_new_tokens,
            )  # fmt: skip


def completer(engine: EngineLoop, params: SamplingParams, seed: int) -> Complete:
    """Asks the engine for one turn."""

    async def complete(
        token_ids: Sequence[int], room: int, row: int, turn: int, **shown: Any
    ) -> Ended:
        longest = min(room, params.max_new_tokens)
        shortest = min(params.min_new_tokens, longest)
        asked = dataclasses.replace(params, max_new_tokens=longest, min_new_tokens=shortest)
        try:
            sampled = await engine.complete_async(
                token_ids, asked, seed=seed, row=row, turn=turn, conversation=row, **shown
            )
        except (RuntimeError, ValueError) as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        if sampled.finish == "error":
            raise EngineFailed(NOT_FINITE)
        return sampled

    return complete


class AgentSampler(ConversationSampler):
    """A sampler for agent environments: an external agent talks to the policy."""

    def _attempts(
        self, env: ConversationEnv, request: SampleRequest, params: SamplingParams
    ) -> list[Rollout]:
        # Here, since it wants the packages of `rllib-llm[serve]`.
        from rllib_llm.serving.http_server import open_agent_server

        assert isinstance(env, AgentEnv), "the environment runner chose this sampler"
        engine = self.policy.open_engine(self.weights.version)
        require(isinstance(engine, TorchEngine), "engine", ..., "be 'torch' with agents",
                "their server samples by our own decode loop", "Set engine='torch'")  # fmt: skip
        server = open_for(env, engine, open_agent_server, params.stop_token_ids, self.name)
        return run_agents(
            env, env.tasks.rows(request.position, request.num_prompts),
            positions=request.positions, num_completions=request.num_completions,
            stride=request.stride, server=server, sampling=sampling_fields(params, self.seed),
            max_new_tokens=params.max_new_tokens,
        )  # fmt: skip


def sampling_fields(params: SamplingParams, seed: int) -> dict[str, object]:
    """The fields of a chat completion that sample as `params` say."""
    ends = list(params.stop_token_ids)
    least = params.min_new_tokens
    return {**params.drawn_by, "min_tokens": least, "stop_token_ids": ends, "seed": seed}
