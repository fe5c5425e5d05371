"""A sampler's conversations: an engine in a thread of its own, and many rollouts that ask it.

The engine lives for one request: the weights do not change under a conversation, and nothing of its
cache is left when the learner changes the very module that it sampled with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch

from rllib_llm import columns
from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_judging import judge
from rllib_llm.envs.conversation_rollouts import Attempt, Complete, EngineFailed, run_rollouts
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest
from rllib_llm.rollouts.sampler import Sampler


class ConversationSampler(Sampler):
    """As every sampler, of an environment that answers; what is asked of it is the same."""

    takes_rows = False

    def sample(self, request: SampleRequest) -> JudgedBatch:
        """Judged conversations: a batch of all their rows, those of a group adjacent.

        Token i of a turn is a function of seed, rollout, turn and i, and of what was said before.
        """
        self.require_weights()
        env: ConversationEnv = self.environment.env
        params = self._params(request.explore)
        ends = (*params.stop_token_ids, *env.chat_format.stop_token_ids)
        params = dataclasses.replace(params, stop_token_ids=tuple(dict.fromkeys(ends)))
        start = time.perf_counter()
        self.watch.generating(self.weights.version, params.max_new_tokens)
        attempts = self._attempts(env, request, params)
        over = time.perf_counter()
        self.watch.judging()
        judged = judge(env, attempts, params.pad_token_id)
        seconds = {
            "generate_seconds": over - start,
            "tool_seconds": (over - start) * _tool_share(judged.metrics),
            "judge_seconds": time.perf_counter() - over,
        }
        return JudgedBatch(
            columns=judged.columns
            | self.environment.replica_column(judged.columns[columns.SCORES]),
            rewards=judged.columns[columns.SCORES],
            components=judged.components,
            metrics=judged.metrics,
            texts=judged.texts,
            timings=seconds,
            pad_token_id=params.pad_token_id,
        )

    def _attempts(
        self, env: ConversationEnv, request: SampleRequest, params: SamplingParams
    ) -> list[Attempt]:
        """The conversations of a request, which are over."""
        with contextlib.closing(EngineLoop(self.policy.open_engine(self.weights.version))) as loop:
            return run_rollouts(
                env,
                env.tasks.rows(request.position, request.num_prompts),
                first_position=request.position,
                num_completions=request.num_completions,
                complete=completer(loop, params, self.seed),
                max_new_tokens=params.max_new_tokens,
            )


def _tool_share(metrics: Mapping[str, torch.Tensor]) -> float:
    """Share of the time of conversations, which wait side by side, that went into tools."""
    tools, sampling = (
        float(metrics[name].nan_to_num().sum()) if name in metrics else 0.0
        for name in ("tool_seconds", "sample_seconds")
    )
    return tools / (tools + sampling) if tools + sampling > 0 else 0.0


def completer(engine: EngineLoop, params: SamplingParams, seed: int) -> Complete:
    """Asks the engine for one turn."""

    async def complete(token_ids: Sequence[int], room: int, row: int, turn: int) -> Ended:
        asked = with_room(params, room)
        try:
            sampled = await engine.complete_async(
                token_ids, asked, seed=seed, row=row, turn=turn, conversation=row
            )
        except (RuntimeError, ValueError) as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
        if sampled.finish == "error":
            raise EngineFailed(
                "logits must be finite: the model gave NaN or infinity while sampling. Check the "
                "weights it was given, its dtype and the learning rate."
            )
        return sampled

    return complete


def with_room(params: SamplingParams, room: int) -> SamplingParams:
    """The same settings where a turn may have `room` tokens at most."""
    if room >= params.max_new_tokens:
        return params
    shortest = min(params.min_new_tokens, room)
    return dataclasses.replace(params, max_new_tokens=room, min_new_tokens=shortest)
