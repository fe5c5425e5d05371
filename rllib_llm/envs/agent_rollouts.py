"""Rollouts of agents: a session of a server for each.

task ─▶ run(base_url, task) ── chat completions ──▶ a session of the server ─▶ engine
               │                                          │
               ▼                                          ▼
             score                          tokens as they were sampled

Which server that is, is the caller's: it is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.adapters.agent import AgentEnv, read_result
from rllib_llm.envs.conversation_rollouts import (
    Attempt,
    EngineFailed,
    new_attempts,
    run_side_by_side,
)
from rllib_llm.envs.event_loop import call
from rllib_llm.envs.prompts import PromptRow


class AgentSession(Protocol):
    """What one agent said and was told."""

    conversations: list[Conversation]
    limit: str
    """The limit that it ran into, "turns" or "tokens"."""
    reward: float | None
    """That the agent gave its turns itself."""


class AgentServer(Protocol):
    """A server with OpenAI's interface, whose sessions keep what was sampled token by token."""

    def running(self) -> AbstractContextManager[None]:
        """Answers in the block."""

    def session(
        self,
        sampling: Mapping[str, Any],
        *,
        max_new_tokens: int,
        max_turns: int,
        template_settings: Mapping[str, Any],
    ) -> AbstractContextManager[tuple[str, AgentSession]]:
        """A session: its base URL, and what is said in it. `sampling`: fields of a chat completion
        that hold whatever the agent asks for."""

    def check_open(self) -> None:
        """Raises RuntimeError where the engine has ended."""

    def close(self) -> None:
        """Ends it."""


OpenAgentServer = Callable[..., AgentServer]
"""`serving.agent_server.open_agent_server`."""


def open_for(
    env: AgentEnv,
    engine: Any,
    open_server: OpenAgentServer,
    stop_token_ids: Sequence[int],
    name: str,
) -> AgentServer:
    """The server for an environment's agents, within its limits.

    Args:
        env: whose limits hold.
        engine: samples, and is closed with the server.
        open_server: makes the server.
        stop_token_ids: of the policy.
        name: of whoever asks for it.
    """
    return open_server(
        engine, env.tokenizer, stop_token_ids=stop_token_ids, name=name,
        max_rows=int(env.settings["max_concurrent"]), max_tokens=env.max_tokens,
        max_seconds=float(env.settings["max_seconds"]),
    )  # fmt: skip


def run_agents(
    env: AgentEnv,
    rows: Sequence[PromptRow],
    *,
    first_position: int,
    num_completions: int,
    server: AgentServer,
    sampling: Mapping[str, Any],
    max_new_tokens: int,
) -> list[Attempt]:
    """Episodes of the agent about all tasks, `num_completions` of each, in the order of the tasks.

    Args:
        env, rows, first_position, num_completions: what is asked.
        server: that samples; it is closed in the end.
        sampling: fields of a chat completion that hold whatever the agent asks for.
        max_new_tokens: of a turn.

    Raises:
        EngineFailed: the engine ended under them.
    """
    attempts = new_attempts(env, rows, first_position, num_completions)

    async def play(attempt: Attempt) -> None:
        with server.session(
            {**sampling, "noise_row": attempt.row_id}, max_new_tokens=max_new_tokens,
            max_turns=int(env.settings["max_turns"]),
            template_settings=dict(env.settings["template_settings"] or {}),
        ) as (url, session):  # fmt: skip
            await _play(env, attempt, url, session)

    try:
        with server.running():
            env.events.run(run_side_by_side(env, attempts, play))
            try:
                server.check_open()
            except RuntimeError as error:
                raise EngineFailed(f"{type(error).__name__}: {error}") from error
    finally:
        server.close()
    return attempts


async def _play(env: AgentEnv, attempt: Attempt, url: str, session: AgentSession) -> None:
    """One episode. An agent that ends with an error at a limit of its session was led there by the
    policy: its conversation is judged as it stands."""
    result = None
    try:
        result = await call(env.agent, url, dict(attempt.conversation.task))
    except Exception:
        if not session.limit:
            raise
        result = 0.0  # it got no further
    finally:
        _take(attempt, session)
    if not attempt.conversation.num_turns:
        raise ValueError(
            "agent must ask for at least one chat completion at base_url: nothing was sampled that "
            "could be learnt from. Give base_url to its client."
        )
    attempt.earned, metrics = read_result(result)
    attempt.conversation.metrics.update(metrics)


def _take(attempt: Attempt, session: AgentSession) -> None:
    """What was said in a session."""
    for conversation in session.conversations:
        attempt.conversation.adopt(conversation)
    attempt.truncated = session.limit
    attempt.has_turn_rewards = session.reward is not None
