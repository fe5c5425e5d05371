"""An environment that says of every second token that it put it there itself, as a tool would."""

from __future__ import annotations

import torch

from rllib_llm.envs import rlhf
from rllib_llm.shared import columns

VERSION = 5  # that it says the sampled tokens are of


def sampled_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Tokens 0, 2, 4 ... of those that exist."""
    return mask & (torch.arange(mask.shape[1]) % 2 == 0)


class Interrupting:
    """Wraps the environment of prompts; two prompts after one another are one group."""

    def __init__(self, env_config):
        self.env = rlhf.create(env_config)
        self.position = 0

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, *, options):
        self.num_completions = options["num_completions"]
        self.first = options["position"]
        return self.env.reset(options=options)

    def step(self, actions):
        observation, rewards, ends, cuts, infos = self.env.step(actions)
        sampled = sampled_tokens(actions[columns.COMPLETION_MASK])
        positions = self.first + torch.arange(len(sampled)) // self.num_completions
        infos[columns.LOSS_MASK] = sampled
        infos[columns.WEIGHTS_VERSION] = torch.where(sampled, VERSION, -1).int()
        infos[columns.GROUP] = positions // 2
        return observation, rewards, ends, cuts, infos
