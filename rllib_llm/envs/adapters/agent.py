"""rllib_llm/Agent-v0: any program that speaks OpenAI's interface, trained as it is.

    async def run(base_url, task) -> float | dict | None

`run` is given the address of a session of its own and the data set's row. It talks to the policy
through OpenAI's client, or whatever speaks its interface, and returns the score; or a dict with
"reward" and further numbers, which become metrics; or None, where reward functions say what the
conversation is worth. What the policy samples is kept token by token on the server's side:

    task ─▶ run(base_url, task) ── chat completions ──▶ a session of the server ─▶ engine
                   │                                          │
                   ▼                                          ▼
                 score                          tokens as they were sampled
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

from rllib_llm.conversations.conversation import Conversation, Rollout
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.conversation_rollouts import (
    EngineFailed,
    finite,
    new_attempts,
    run_side_by_side,
)
from rllib_llm.envs.prompts import PromptRow
from rllib_llm.envs.settings import declared
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.remote import call
from rllib_llm.shared.setting import Settings, setting


class Agent(Settings):
    """A program that brings its own loop and tools."""

    agent: Callable | str | None = setting(
        None, "a function run(base_url, task), async or not, or its dotted path",
        remedy="Give one that can be called so",
    )  # fmt: skip
    agent_kwargs: dict | None = setting(None, "further arguments of the agent")


class AgentEnv(ConversationEnv):
    """Tasks for an external agent, which brings its own loop and tools."""

    defaults: ClassVar[Mapping[str, Any]] = {**declared(Agent), "max_turns": 32}
    sees: ClassVar[bool] = False

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")):
            raise ImportError("rllib_llm/Agent-v0 needs a server: pip install 'rllib-llm[serve]'.")
        super().__init__(env_config)

    def _open(self) -> None:
        super()._open()
        require(self.settings["teacher_prompt"] is None, "teacher_prompt",
                self.settings["teacher_prompt"], "be None with an agent",
                "it says itself what the policy reads", "Leave it out")  # fmt: skip
        self.agent  # noqa: B018  (what cannot be called is refused before anything is sampled)

    def start(self, conversation: Conversation) -> NoReturn:
        raise AssertionError("an agent's conversations are begun by the agent")

    @functools.cached_property
    def agent(self) -> Callable[..., Any]:
        """The callable that plays an episode, given the address and the task.

        Raises:
            Problems: it cannot be called so.
        """
        given = self.settings["agent"]
        function = import_dotted(given, name="agent") if isinstance(given, str) else given
        kwargs = dict(self.settings["agent_kwargs"] or {})
        try:
            inspect.signature(function).bind("http://address/v1", {}, **kwargs)
        except (TypeError, ValueError) as error:
            rule = f"be a function run(base_url, task) with the agent_kwargs {sorted(kwargs)}"
            raise Problems("env_config.agent", rule, error, value=given) from error
        return functools.partial(function, **kwargs) if kwargs else function


OpenAgentServer = Callable[..., Any]
"""`serving.http_server.open_agent_server`; makes an `AgentServer` of that module, whose sessions
record every sampled token."""


def open_for(
    env: AgentEnv, engine: Any, open_server: OpenAgentServer, stop_token_ids: Sequence[int],
    name: str,
) -> Any:  # fmt: skip
    """The server for an environment's agents, within its limits; `engine` is closed with it."""
    return open_server(
        engine, env.tokenizer, stop_token_ids=stop_token_ids, name=name,
        max_rows=int(env.settings["max_concurrent"]), max_tokens=env.max_tokens,
        max_seconds=float(env.settings["max_seconds"]),
    )  # fmt: skip


def run_agents(
    env: AgentEnv, rows: Sequence[PromptRow], *, positions: Sequence[int], num_completions: int,
    server: Any, sampling: Mapping[str, Any], max_new_tokens: int, stride: int = 0,
) -> list[Rollout]:  # fmt: skip
    """Episodes of the agent about all tasks, `num_completions` of each, in the order of the tasks.
    The server is closed in the end; the fields `sampling` hold whatever the agent asks for.

    Raises:
        EngineFailed: the engine ended under them.
    """
    attempts = new_attempts(env, rows, positions, num_completions, stride)

    async def play(attempt: Rollout) -> None:
        """One episode. An agent that ends with an error at a limit of its session was led there by
        the policy: its conversation is judged as it stands."""
        settings, result = dict(env.settings["template_settings"] or {}), None
        with server.session(
            {**sampling, "noise_row": attempt.row_id}, max_new_tokens=max_new_tokens,
            max_turns=int(env.settings["max_turns"]), template_settings=settings,
        ) as (url, session):  # fmt: skip
            try:
                result = await call(env.agent, url, dict(attempt.conversation.task))
            except Exception:
                if not session.limit:
                    raise
                result = 0.0  # it got no further
            finally:
                for conversation in session.conversations:
                    attempt.conversation.adopt(conversation)
                attempt.truncated = session.limit
                attempt.has_turn_rewards = session.reward is not None
        require(attempt.conversation.num_turns, "agent", ..., "ask for a completion at base_url",
                "nothing was sampled that could be learnt from")  # fmt: skip
        given = result if isinstance(result, Mapping) else {"reward": result}
        numbers = {
            str(name): finite("the agent", value, "reward" if name == "reward" else
                              f"metric {name!r}")
            for name, value in given.items()
            if value is not None
        }  # fmt: skip
        attempt.earned = numbers.pop("reward", None)
        attempt.conversation.metrics.update(numbers)

    with contextlib.closing(server), server.running():
        env.events.run(run_side_by_side(env, attempts, play))
        try:
            server.check_open()
        except RuntimeError as error:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error
    return attempts
