"""Rollouts of agents: a server in this process, and a session of it for each.

task ─▶ run(base_url, task) ── chat completions ──▶ /sessions/{id}/v1 ─▶ engine
               │                                          │
               ▼                                          ▼
             score                          tokens as they were sampled
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.envs.adapters.agent import AgentEnv, read_result
from rllib_llm.envs.conversation_rollouts import (
    Attempt,
    EngineFailed,
    new_attempts,
    run_side_by_side,
)
from rllib_llm.envs.event_loop import call
from rllib_llm.envs.prompts import PromptRow
from rllib_llm.serving.clients import Clients
from rllib_llm.serving.engine_host import ThreadHost
from rllib_llm.serving.http_server import in_thread
from rllib_llm.serving.service import Service
from rllib_llm.serving.sessions import Rules, Session
from rllib_llm.serving.settings import ServeSettings


def open_service(
    env: AgentEnv, engine: TorchEngine, *, stop_token_ids: Sequence[int], name: str
) -> Service:
    """A server's inside for the agents of an environment.

    Args:
        env: whose limits hold.
        engine: samples, and is closed with the service.
        stop_token_ids: of the policy.
        name: of whoever asks for it.
    """
    most = int(env.settings["max_concurrent"])
    settings = ServeSettings.model_validate(
        {
            "model": "policy", "in_flight": "recompute", "max_rows": most, "max_waiting": most,
            "drain_s": 0, "max_model_len": env.max_tokens,
            "deadline_s": float(env.settings["max_seconds"]),
        }
    )  # fmt: skip
    host = ThreadHost(engine.model, settings, tuple(stop_token_ids), engine=engine)
    return Service(host, env.tokenizer, settings, source=name, serial=engine.version or 0)


def run_agents(
    env: AgentEnv,
    rows: Sequence[PromptRow],
    *,
    first_position: int,
    num_completions: int,
    service: Service,
    sampling: Mapping[str, Any],
    max_new_tokens: int,
) -> list[Attempt]:
    """Episodes of the agent about all tasks, `num_completions` of each, in the order of the tasks.

    Args:
        env, rows, first_position, num_completions: what is asked.
        service: that samples; it is closed in the end.
        sampling: fields of a chat completion that hold whatever the agent asks for.
        max_new_tokens: of a turn.

    Raises:
        EngineFailed: the engine ended under them.
    """
    attempts = new_attempts(env, rows, first_position, num_completions)
    service.sessions.begin_by_themselves = False

    def rules(attempt: Attempt) -> Rules:
        return Rules(
            {**sampling, "noise_row": attempt.row_id},
            max_new_tokens=max_new_tokens,
            max_turns=int(env.settings["max_turns"]),
            max_tokens=service.limits.max_model_len,
            template_settings=dict(env.settings["template_settings"] or {}),
        )

    try:
        with in_thread(service, Clients([])) as address:

            async def play(attempt: Attempt) -> None:
                await _play(env, attempt, service, address, rules(attempt))

            env.events.run(run_side_by_side(env, attempts, play))
            _check_engine(service)
    finally:
        service.close()
    return attempts


def _check_engine(service: Service) -> None:
    try:
        service.host.check_open()
    except RuntimeError as error:
        raise EngineFailed(f"{type(error).__name__}: {error}") from error


async def _play(
    env: AgentEnv, attempt: Attempt, service: Service, address: str, rules: Rules
) -> None:
    """One episode. An agent that ends with an error at a limit of its session was led there by the
    policy: its conversation is judged as it stands."""
    session_id = uuid.uuid4().hex  # nobody guesses it
    session = service.sessions.begin(session_id, rules)
    result = None
    try:
        url = f"{address}/sessions/{session_id}/v1"
        result = await call(env.agent, url, dict(attempt.conversation.task))
    except Exception:
        if not session.limit:
            raise
        result = 0.0  # it got no further
    finally:
        service.sessions.end(session_id)
        _take(attempt, session)
    if not attempt.conversation.num_turns:
        raise ValueError(
            "agent must ask for at least one chat completion at base_url: nothing was sampled that "
            "could be learnt from. Give base_url to its client."
        )
    attempt.earned, metrics = read_result(result)
    attempt.conversation.metrics.update(metrics)


def _take(attempt: Attempt, session: Session) -> None:
    """What was said in a session."""
    for conversation in session.conversations:
        attempt.conversation.adopt(conversation)
    attempt.truncated = session.limit
    attempt.has_turn_rewards = session.reward is not None
