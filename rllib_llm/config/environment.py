"""Sections of prompts, rewards and conversations."""

from __future__ import annotations

from rllib_llm.envs.settings import CONVERSATION_ENV, Conversation, Judges, Prompts
from rllib_llm.shared.setting import IN_ENV, Section, setting

PROMPTS = Section.of("prompts", Prompts, place=IN_ENV)
CONVERSATION = Section.of("conversation", Conversation, place=IN_ENV, env=CONVERSATION_ENV)


class Rewards(Judges):
    """Reward models and functions, and the processing of their scores. Alias: `rewards: {functions:
    ...}` is `env_config: {reward_functions: ...}`, and `model` is `reward_model`. Use one of the
    two."""

    score_clip: float | None = setting(
        None,
        "the bound to which scores are clipped, in both directions; None: not clipped",
        above=0,
        rllib="clip_rewards",
        also="reward_clip cliprange_reward",
    )
    scale_scores: bool = setting(
        False,
        "whether scores are divided by their running standard deviation",
        also="normalize_reward use_score_scaling",
    )
    missing_eos_penalty: float = setting(
        0.0,
        "the penalty for completions that reach the length limit",
        least=0,
        also="non_eos_penalty truncation_penalty",
    )
    length_penalty: float = setting(0.0, "the penalty per completion token", least=0)
    overlong_buffer: int = setting(
        0,
        "the length of DAPO's soft overlong punishment at the end of max_new_tokens; 0: off",
        unit="tokens",
        least=0,
        trl="soft_overlong_punishment",
        also="overlong_buffer_len",
    )
    planned_iterations: int | None = setting(
        None,
        "the planned number of iterations, passed to reward functions with `trainer_state` "
        "as `max_steps`; taken from a file's `stop` if possible",
        least=1,
    )


REWARDS = Section.of("rewards", Rewards, positional="functions")
