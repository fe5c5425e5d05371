"""Whether an environment's prompts and the completions fit into the models that read them."""

from __future__ import annotations

from typing import Any

from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.modules.model_limits import check_lengths, num_positions


def check_env_lengths(env: Any, *, model: Any, max_new_tokens: int, chosen: bool) -> None:
    """Raises ValueError where prompts of `env` and completions do not fit into `model`, or into the
    environment's reference, together.

    chosen: whether someone set `max_prompt_len`. By default it says little, and the longest prompt
        of the data is asked for where it matters.
    """
    if not isinstance(env, BanditEnv) or model is None:
        return
    limits = {f"model={str(model)!r}": num_positions(model)}
    reference = getattr(env.reference, "model", None)
    if reference is not None:
        text_config = reference.config.get_text_config(decoder=True)
        limits["the reference"] = getattr(text_config, "max_position_embeddings", None)
    for name, positions in limits.items():
        if positions is not None and env.max_prompt_len + max_new_tokens > positions:
            check_lengths(
                positions,
                max_prompt_len=env.max_prompt_len,
                max_new_tokens=max_new_tokens,
                model=name,
                longest_prompt=None if chosen else env.longest_prompt(),
            )
