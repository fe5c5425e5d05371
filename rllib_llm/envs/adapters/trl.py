"""rllib_llm/TRL-v0: environments and tools written for TRL's GRPOTrainer, as they are.

`environment_factory` is a class (or its dotted path) as TRL 1.16 takes it: `reset(**row)` begins a
conversation and may return a text that is put behind the last user message, its other public
methods are tools, and `get_reward()`, where there is one, is the conversation's score. `tools` are
typed functions with docstrings. Reward functions get `completions` as messages and `environments=`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rllib_llm.conversations.chat_format import Message
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.dotted import import_dotted
from rllib_llm.envs import conversation_settings
from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.event_loop import call
from rllib_llm.envs.rlhf import EnvConfigError

_NO_TOOLS = ("reset", "get_reward")
_ENVIRONMENT = "environment"  # under which a conversation's state holds its own


class TRLEnv(ConversationEnv):
    """One object of `environment_factory` for each conversation."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "environment_factory": None,  # a class, or the dotted path of one
        "max_tool_calling_iterations": None,  # TRL's name: turns with tool calls
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        given = dict(env_config or {})
        if given.get("max_tool_calling_iterations") is not None:
            given.setdefault("max_turns", given["max_tool_calling_iterations"] + 1)
        super().__init__(given)

    @functools.cached_property
    def factory(self) -> Callable[[], Any] | None:
        """What makes an environment; None where there are tools alone."""
        factory = self.settings["environment_factory"]
        if isinstance(factory, str):
            factory = import_dotted(factory, name="environment_factory")
        if factory is not None and not callable(getattr(factory, "reset", None)):
            raise EnvConfigError(
                f"env_config['environment_factory']={factory!r} must be a class with reset(**row): "
                "each conversation has an object of it. Add the method."
            )
        return factory

    def tools(self) -> Sequence[Any]:
        functions = list(super().tools())
        if self.factory is not None:
            functions += _methods(self.factory())
        return functions

    def tools_of(self, conversation: Conversation) -> Sequence[Callable[..., Any]]:
        environment = conversation.state.get(_ENVIRONMENT)
        return () if environment is None else _methods(environment)

    async def start(self, conversation: Conversation) -> Sequence[Message]:
        messages = [dict(message) for message in self.first_messages(conversation)]
        if self.factory is not None:
            environment = conversation.state[_ENVIRONMENT] = self.factory()
            said = await call(environment.reset, **conversation.task)
            if said:
                messages[-1]["content"] = f"{messages[-1]['content']}{said}"
        return messages

    async def score(self, conversation: Conversation) -> float | None:
        environment = conversation.state.get(_ENVIRONMENT)
        get_reward = getattr(environment, "get_reward", None)
        return None if get_reward is None else await call(get_reward)


def _methods(environment: Any) -> list[Callable[..., Any]]:
    """The tools of an environment: its public methods."""
    return [
        method
        for name, method in inspect.getmembers(environment, inspect.ismethod)
        if not name.startswith("_") and name not in _NO_TOOLS
    ]


DEFAULTS: dict[str, Any] = {**conversation_settings.DEFAULTS, **TRLEnv.defaults}


def create(env_config: Mapping[str, Any]) -> TRLEnv:
    """The environment; its settings and their defaults are `DEFAULTS`."""
    return TRLEnv(env_config)
