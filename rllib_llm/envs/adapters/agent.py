"""rllib_llm/Agent-v0: any program that speaks OpenAI's interface, trained as it is.

    async def run(base_url, task) -> float | dict | None

`run` is given the address of a session of its own and the data set's row. It talks to the policy
through OpenAI's client, or whatever speaks its interface, and returns the score; or a dict with
"reward" and further numbers, which become metrics; or None, where reward functions say what the
conversation is worth. What the policy samples is kept token by token on the server's side.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rllib_llm.envs.conversation import ConversationEnv
from rllib_llm.envs.rlhf import EnvConfigError
from rllib_llm.shared.dotted import import_dotted


class AgentEnv(ConversationEnv):
    """Tasks for an agent, which brings its own turns and tools."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "agent": None,  # run(base_url, task), async or not, or its dotted path
        "agent_kwargs": None,  # further arguments of it
        "max_turns": 32,
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")):
            raise ImportError(
                "rllib_llm/Agent-v0 must find the packages of the server: they are not installed. "
                "Install them: pip install 'rllib-llm[serve]'."
            )
        super().__init__(env_config)
        self.agent  # noqa: B018  (what cannot be called is refused before anything is sampled)

    @functools.cached_property
    def agent(self) -> Callable[..., Any]:
        """What plays an episode, given the address and the task.

        Raises:
            EnvConfigError: it cannot be called so.
        """
        given = self.settings["agent"]
        function = import_dotted(given, name="agent") if isinstance(given, str) else given
        kwargs = dict(self.settings["agent_kwargs"] or {})
        try:
            inspect.signature(function).bind("http://address/v1", {}, **kwargs)
        except (TypeError, ValueError) as error:
            raise EnvConfigError(
                f"env_config['agent']={given!r} must be a function run(base_url, task) with the "
                f"agent_kwargs {sorted(kwargs)}: {error}. Give one that can be called so."
            ) from error
        return functools.partial(function, **kwargs) if kwargs else function


def read_result(result: Any) -> tuple[float | None, dict[str, float]]:
    """What an agent returned: the score, and metrics by name.

    Raises:
        ValueError: it is something else, or not finite.
    """
    given = dict(result) if isinstance(result, Mapping) else {"reward": result}
    numbers = {name: value for name, value in given.items() if value is not None}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(
                f"{name}={value!r} of the agent's result must be a finite number: it is a reward "
                'or a metric. Return a number, None, or {"reward": number, ...}.'
            )
    reward = numbers.pop("reward", None)
    return None if reward is None else float(reward), {k: float(v) for k, v in numbers.items()}
