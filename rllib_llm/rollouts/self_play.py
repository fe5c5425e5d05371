"""A sampler of games: the policy, and an opponent with an engine of its own."""

from __future__ import annotations

import contextlib

import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from rllib_llm import columns
from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import Attempt
from rllib_llm.envs.self_play import NUM_PLAYERS, SelfPlayEnv, run_games
from rllib_llm.rollouts.conversing import ConversationSampler, completer
from rllib_llm.rollouts.policy import ModulePolicy, SamplingPolicy
from rllib_llm.rollouts.request import JudgedBatch, SampleRequest


class SelfPlaySampler(ConversationSampler):
    """As every sampler. The policy plays the first player, and without an opponent the second, too.

    `keeps_opponent`: whether the opponent's rows are learnt from.
    """

    opponent: SamplingPolicy | None = None
    keeps_opponent = True

    def share_opponent(self, module: RLModule, *, keeps: bool) -> None:
        """Has `module` play the second player."""
        assert isinstance(self.policy, ModulePolicy), "self-play is refused for other engines"
        twin = self.policy.twin()
        twin.share(module)
        self.opponent, self.keeps_opponent = twin, keeps

    def sample(self, request: SampleRequest) -> JudgedBatch:
        """As of all samplers, with the column `policy`."""
        batch = super().sample(request)
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
