"""A sampler whose conversations are held by agents, through a server in its own process.

The server lives for one request, as the engine of other conversations does: the weights do not
change under an agent.
"""

from __future__ import annotations

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.envs.adapters.agent import AgentEnv, open_for, run_agents
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import Attempt
from rllib_llm.rollouts.conversing import ConversationSampler
from rllib_llm.rollouts.request import SampleRequest


class AgentSampler(ConversationSampler):
    """As every sampler; who talks to the policy is an agent."""

    def _attempts(
        self, env: ConversationEnv, request: SampleRequest, params: SamplingParams
    ) -> list[Attempt]:
        # Here, since it wants the packages of `rllib-llm[serve]`.
        from rllib_llm.serving.http_server import open_agent_server

        assert isinstance(env, AgentEnv), "the environment runner chose this sampler"
        engine = self.policy.open_engine(self.weights.version)
        if not isinstance(engine, TorchEngine):
            raise ValueError(
                "engine='vllm' must be 'torch' with agents: their server samples by our own decode "
                "loop. Set engine='torch'."
            )
        server = open_for(env, engine, open_agent_server, params.stop_token_ids, self.name)
        return run_agents(
            env,
            env.tasks.rows(request.position, request.num_prompts),
            first_position=request.position,
            num_completions=request.num_completions,
            server=server,
            sampling=sampling_fields(params, self.seed),
            max_new_tokens=params.max_new_tokens,
        )


def sampling_fields(params: SamplingParams, seed: int) -> dict[str, object]:
    """The fields of a chat completion that sample as `params` say."""
    return {
        **params.drawn_by,
        "min_tokens": params.min_new_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "seed": seed,
    }
