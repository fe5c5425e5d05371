"""A sampler of games: the policy, and an opponent with an engine of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import Attempt
from rllib_llm.envs.self_play import NUM_PLAYERS, SelfPlayEnv, run_games
from rllib_llm.rollouts.conversing import ConversationSampler, completer
from rllib_llm.rollouts.policy import ModulePolicy, SamplingPolicy
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest
from rllib_llm.rollouts.sampler import Generated
from rllib_llm.shared import columns
from rllib_llm.weights.exporter import MARK, split
from rllib_llm.weights.flat_buffer import FlatBuffer


class PlayersPolicy(ModulePolicy):
    """The policy of a sampler in a process of its own, and the opponent, whose weights come in the
    same publications.

    Args:
        make_opponent: gives the opponent's module on its device.
        make_module, settings: see `ModulePolicy`.
    """

    def __init__(
        self,
        make_opponent: Callable[[], RLModule],
        make_module: Callable[[], RLModule],
        **settings: Any,
    ) -> None:
        super().__init__(make_module, **settings)
        self.opponent = ModulePolicy(make_opponent, **settings)

    def load(self, weights: FlatBuffer) -> None:
        """As of all policies, both players'."""
        own, opponents = split(weights)
        super().load(own)
        self.opponent.load(opponents)

    def differing(self, weights: FlatBuffer) -> list[str]:
        """As of all policies, both players'."""
        own, opponents = split(weights)
        others = [f"{MARK}{name}" for name in self.opponent.differing(opponents)]
        return super().differing(own) + others


class SelfPlaySampler(ConversationSampler):
    """As every sampler. The policy plays the first player, and without an opponent the second, too.

    `keeps_opponent`: whether the opponent's rows are learnt from.
    """

    keeps_opponent = True
    _shared: SamplingPolicy | None = None

    @property
    def opponent(self) -> SamplingPolicy | None:
        """Who plays the second player, if not the policy."""
        return self.policy.opponent if isinstance(self.policy, PlayersPolicy) else self._shared

    def share_opponent(self, module: RLModule) -> None:
        """Has `module` itself, the learner's, play the second player."""
        assert isinstance(self.policy, ModulePolicy), "self-play is refused for other engines"
        self._shared = twin = self.policy.twin()
        twin.share(module)

    def _judged_by(self, env: ConversationEnv, generated: Generated) -> JudgedBatch:
        """As of all samplers, with the column `policy`."""
        batch = super()._judged_by(env, generated)
        policy = torch.zeros_like(batch.columns[columns.ROW_ID])
        if self.opponent is not None:
            policy = batch.columns[columns.ROW_ID] % NUM_PLAYERS
        batch.columns[columns.POLICY] = policy
        return batch

    def _attempts(
        self, env: ConversationEnv, request: SampleRequest, params: SamplingParams
    ) -> list[Attempt]:
        assert isinstance(env, SelfPlayEnv), "the environment runner chose this sampler"
        with contextlib.ExitStack() as open_loops:
            loops = [
                open_loops.enter_context(
                    contextlib.closing(EngineLoop(policy.open_engine(self.weights.version)))
                )
                for policy in (self.policy, self.opponent)
                if policy is not None
            ]
            attempts = run_games(
                env,
                env.tasks.rows(request.position, request.num_prompts),
                first_position=request.position,
                num_completions=request.num_completions,
                completes=(
                    completer(loops[0], params, self.seed),
                    completer(loops[-1], params, self.seed),
                ),
                max_new_tokens=params.max_new_tokens,
            )
        if self.keeps_opponent:
            return attempts
        return [attempt for attempt in attempts if attempt.row_id % NUM_PLAYERS == 0]
