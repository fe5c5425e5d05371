"""What `check_env` does with an environment of conversations: it talks to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rllib_llm.envs.adapters.agent import AgentEnv, OpenAgentServer, open_for, run_agents
from rllib_llm.envs.checks.check_findings import Problems
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_judging import judge
from rllib_llm.envs.conversation_rollouts import Attempt, run_rollouts
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.shared import columns

_WORDS = 12  # tokens of a random turn, at most


@dataclass(frozen=True)
class _Said:
    """A random turn."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str = "stop"


class ConversationChecker:
    """Talks to an environment with random words, twice, and compares.

    Args:
        findings: what is wrong is put there.
        num_prompts, num_completions: of the conversations.
        seed: of the words.
        agent_server: makes the server of an environment of agents; others need none.
    """

    def __init__(
        self,
        findings: Problems,
        *,
        num_prompts: int,
        num_completions: int,
        seed: int,
        agent_server: OpenAgentServer | None = None,
    ) -> None:
        self.agent_server = agent_server
        self.findings, self.seed = findings, seed
        self.env: ConversationEnv = findings.env
        self.num_prompts, self.num_completions = num_prompts, num_completions

    def run(self) -> None:
        """Two batches of the same conversations."""
        one, two = self._talk(), self._talk()
        scores = [batch[columns.SCORES][batch[columns.VALID]] for batch in (one, two)]
        if not all(bool(torch.isfinite(column).all()) for column in scores):
            self.findings.add(
                f"scores={scores[0].tolist()!r}", "finite numbers",
                "a reward that is NaN or infinite ends the training",
                "Return Response(invalid=reason) where there is none",
            )  # fmt: skip
        same = torch.equal(one[columns.PROMPT_INDEX], two[columns.PROMPT_INDEX])
        if not same or not torch.equal(one[columns.PROMPT_IDS], two[columns.PROMPT_IDS]):
            self.findings.add(
                "tasks at one position", "the same each time",
                "a run that is resumed, or a sampler that is restarted, asks for them again",
                "Draw what is random from the task, not from a global generator",
            )  # fmt: skip

    def _talk(self) -> dict[str, torch.Tensor]:
        env = self.env
        attempts = self._as_agent(env) if isinstance(env, AgentEnv) else self._with_words(env)
        return judge(env, attempts, int(env.tokenizer.pad_token_id or 0)).columns

    def _as_agent(self, env: AgentEnv) -> list[Attempt]:
        """Episodes of an agent, which talks to the model itself."""
        from rllib_llm.engines.torch_engine import TorchEngine

        if self.agent_server is None:
            raise ValueError(
                "agent_server=None must be given for an environment of agents: they talk to a "
                "server. Pass rllib_llm.serving.http_server.open_agent_server."
            )
        engine = TorchEngine(load_causal_lm(env.settings["model"]), version=0)
        ends = env.chat_format.stop_token_ids
        return run_agents(
            env, env.tasks.rows(1, self.num_prompts), first_position=1,
            num_completions=self.num_completions, max_new_tokens=_WORDS,
            server=open_for(env, engine, self.agent_server, ends, "check_env"),
            sampling={"seed": self.seed},
        )  # fmt: skip

    def _with_words(self, env: ConversationEnv) -> list[Attempt]:
        known = set(env.tokenizer.all_special_ids)
        plain = [token for token in range(len(env.tokenizer)) if token not in known]
        end = env.chat_format.encode(env.chat_format.turn_end)

        async def complete(token_ids: Sequence[int], room: int, row: int, turn: int) -> _Said:
            generator = random.Random(f"{self.seed} {row} {turn}")  # whoever asks first
            ids = [*generator.choices(plain, k=min(room - 1, _WORDS)), *end]
            return _Said(ids, [-1.0] * len(ids), [0] * len(ids))

        return run_rollouts(
            env, env.tasks.rows(1, self.num_prompts), first_position=1,
            num_completions=self.num_completions, complete=complete, max_new_tokens=_WORDS,
        )  # fmt: skip
