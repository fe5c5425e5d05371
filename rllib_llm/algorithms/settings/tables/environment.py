"""Prompts and rewards: what the environment is made of, and what becomes of its scores."""

from __future__ import annotations

from typing import Any

from rllib_llm.algorithms.settings.setting import IN_ENV, Section, Setting

PROMPTS = Section(
    "prompts",
    "What is completed; kept in `env_config` (rllib_llm/RLHF-v0, if no environment is named).",
    (
        Setting(
            name="prompts",
            short="data",
            place=IN_ENV,
            type=Any,
            default=None,
            meaning="a file (JSONL, Parquet, text), a data set, a hub id, rows or a function",
            trl=("train_dataset",),
            also=("prompt_data", "prompts_file"),
        ),
        Setting(
            name="eval_prompts",
            short="eval_data",
            place=IN_ENV,
            type=Any,
            default=None,
            meaning="held-out prompts, the same way, instead of eval_fraction",
        ),
        Setting(
            name="eval_fraction",
            place=IN_ENV,
            type=float,
            default=0.0,
            least=0,
            most=1,
            meaning="the share of the prompts that is held out",
        ),
        Setting(
            name="prompt_column",
            short="column",
            place=IN_ENV,
            type=str | None,
            default=None,
            meaning="where a row has its prompt; None: \"prompt\", \"messages\" or the only column",
            also=("prompt_key", "input_key", "dataset_text_field"),
        ),
        Setting(
            name="max_prompt_len",
            place=IN_ENV,
            type=int,
            default=128,
            least=1,
            unit="tokens",
            meaning="the longest prompt",
            also=("max_prompt_length", "prompt_max_len"),
        ),
        Setting(
            name="prompt_overflow",
            short="overflow",
            place=IN_ENV,
            type=str,
            default="truncate_left",
            choices=("truncate_left", "error"),
            meaning="what happens to a longer one",
            also=("truncation_side", "truncation"),
        ),
    ),
)  # fmt: skip

REWARDS = Section(
    "rewards",
    "What judges completions, and what becomes of its scores.",
    (
        Setting(
            name="reward_model",
            short="model",
            place=IN_ENV,
            type=Any,
            default=None,
            meaning="a sequence classifier, or {model, quantization, weight, name, ...}",
            keys=("quantization", "dtype", "device", "weight", "name"),
            also=("reward_model_path", "reward_pretrain", "rm", "reward_model_name"),
        ),
        Setting(
            name="reward_functions",
            short="functions",
            place=IN_ENV,
            type=Any,
            default=None,
            meaning="dotted paths, callables or {function, weight, name, kwargs}",
            trl=("reward_funcs",),
            also=("reward_function", "reward_fn", "remote_rm_url", "custom_reward_function"),
        ),
        Setting(
            name="score_clip",
            type=float | None,
            default=None,
            above=0,
            meaning="what scores are held to, in both directions; None: nothing",
            reason="scores are held to +- it",
            remedy="None: no clipping",
            rllib=("clip_rewards",),
            also=("reward_clip", "cliprange_reward"),
        ),
        Setting(
            name="scale_scores",
            type=bool,
            default=False,
            meaning="whether scores are divided by their running standard deviation",
            also=("normalize_reward", "use_score_scaling"),
        ),
        Setting(
            name="missing_eos_penalty",
            type=float,
            default=0.0,
            least=0,
            meaning="what is taken off the score of a completion that hit the limit",
            reason="it is taken off the score",
            remedy="0: none",
            also=("non_eos_penalty", "truncation_penalty"),
        ),
        Setting(
            name="length_penalty",
            type=float,
            default=0.0,
            least=0,
            meaning="what is taken off the score per completion token",
            reason="it is taken off the score per token",
            remedy="0: none",
        ),
        Setting(
            name="overlong_buffer",
            type=int,
            default=0,
            least=0,
            unit="tokens",
            meaning="the last part of max_new_tokens, over which DAPO's soft punishment grows; 0: "
            "off",
            trl=("soft_overlong_punishment",),
            also=("overlong_buffer_len",),
        ),
        Setting(
            name="planned_iterations",
            type=int | None,
            default=None,
            least=1,
            meaning="how many iterations the run is to have, told to functions that take "
            "trainer_state, as its max_steps; a file's `stop` says it, where it can",
            reason="functions may go by how far a run is",
            remedy="None: not known",
        ),
    ),
)
