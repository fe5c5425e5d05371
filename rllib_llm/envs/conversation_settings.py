"""Settings of conversations, beside those of every environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_llm.envs.rlhf import COMMON_DEFAULTS, EnvConfigError

# What a bandit needs and a conversation does not.
_OF_BANDITS = ("max_prompt_len", "prompt_overflow", "kl_coeff", "vocab_size")

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in COMMON_DEFAULTS.items() if key not in _OF_BANDITS},
    "prompts": None,  # tasks, any source of data/sources.py
    "prompt_column": None,  # "prompt", "messages" or the only column
    "eval_prompts": None,  # a source of held-out tasks, instead of eval_fraction
    "system": None,  # a system message before every task
    "reward_model": None,  # {model, quantization, weight, name, ...} or just the model
    "reward_functions": None,  # dotted paths, callables or {function, weight, name, kwargs}
    "tools": None,  # functions with type hints and docstring, their dotted paths, or tool objects
    "mcp_servers": None,  # {command, args, env} or URLs of MCP servers, whose tools are added
    "tool_timeout_s": 10.0,  # of one call
    "tool_errors": "message",  # the policy is told | "invalid": nothing is learnt from the rollout
    "max_tool_chars": 4000,  # of a result; a longer one keeps its beginning and its end
    "tool_syntax": None,  # how calls are written, see conversations/tool_calls.py; None: template's
    "history": "fork",  # where the template changes old turns: a row of its own | "keep"
    "renderer": "auto",  # of the package renderers, by hub id | a family | None: the template's
    "template_settings": None,  # further variables of the chat template, {enable_thinking: false}
    "max_turns": 8,  # of the assistant
    "max_tokens": None,  # of a whole conversation; None: what the model reads
    "max_seconds": 600.0,  # of a rollout; a slower one is not valid
    "max_concurrent": 256,  # rollouts under way at once in a replica
}
_ABOVE_ZERO = ("tool_timeout_s", "max_seconds", "max_tool_chars", "max_turns", "max_concurrent")


def check_limits(settings: Mapping[str, Any]) -> None:
    """Raises EnvConfigError where a limit is no limit, or a choice none of the choices."""
    for name in _ABOVE_ZERO:
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise EnvConfigError(
                name=f"env_config[{name!r}]",
                value=value,
                rule="be a number above 0",
                reason="it bounds what a rollout may take",
                remedy="Raise it",
            )
    tokens = settings["max_tokens"]
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise EnvConfigError(
            name="env_config['max_tokens']",
            value=tokens,
            rule="be an integer of at least 1, or None",
            reason="it bounds the tokens of a conversation",
            remedy="None: what the model reads",
        )
    if settings["tool_errors"] not in ("message", "invalid"):
        raise EnvConfigError(
            name="env_config['tool_errors']",
            value=settings["tool_errors"],
            rule="be 'message' or 'invalid'",
            reason="the policy is told of a failed call, or the rollout is left out",
            remedy="Choose",
        )
