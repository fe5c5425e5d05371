"""What a bandit environment's arguments must be; every check raises BanditEnvError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_llm.envs.actions import BanditEnvError

RESET_OPTIONS = ("position", "num_prompts", "num_completions")


def check_positive_integers(**settings: int) -> None:
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BanditEnvError(
                f"{name}={value!r} must be an integer of at least 1: it counts rows or tokens. "
                "Set it higher."
            )


def check_bandit_settings(
    tokenizer: Any, kl_coeff: float, temperature: float, reference: Any
) -> None:
    if tokenizer.pad_token_id is None:
        raise BanditEnvError(
            "tokenizer.pad_token_id=None must be a token id: prompts of unequal length are padded. "
            "Set tokenizer.pad_token, to one that is not the EOS token."
        )
    if not temperature > 0:
        raise BanditEnvError(
            f"temperature={temperature!r} must be above 0: logits are divided by it. "
            "Use the sampler's temperature (1.0 where it is greedy)."
        )
    if not kl_coeff >= 0 or (kl_coeff > 0 and reference is None):
        raise BanditEnvError(
            f"kl_coeff={kl_coeff!r} must be at least 0, and 0 without a reference: it weighs the "
            "KL to the reference model. Give a reference or set it to 0."
        )


def checked_options(options: Mapping[str, int] | None) -> dict[str, int]:
    for name, value in (options or {}).items():
        lowest = 0 if name == "position" else 1
        if name not in RESET_OPTIONS or not isinstance(value, int) or value < lowest:
            raise BanditEnvError(
                f"options[{name!r}]={value!r} must be an integer of at least {lowest} under one of "
                f"{list(RESET_OPTIONS)}: these choose the prompts. Correct it."
            )
    return dict(options or {})
