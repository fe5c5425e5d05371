"""Prompts and rewards: what the environment is made of, and what becomes of its scores."""

from __future__ import annotations

from typing import Any

from rllib_llm.config.setting import IN_ENV, Section, Setting

CONVERSATION_ENV = "rllib_llm/Conversation-v0"

PROMPTS = Section(
    "prompts",
    "What is completed; kept in `env_config` (rllib_llm/RLHF-v0, if no environment is named), "
    "where it can be said as well, once.",
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
    "What judges completions, and what becomes of its scores. What judges is kept in `env_config` "
    "and can be said there as well, once: `rewards: {functions: ...}` is `env_config: "
    "{reward_functions: ...}`.",
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
    positional="functions",
)


def _of_conversation(name: str, kind: Any, default: Any, meaning: str, **more: Any) -> Setting:
    return Setting(
        name=name, type=kind, default=default, meaning=meaning, place=IN_ENV,
        env=CONVERSATION_ENV, **more,
    )  # fmt: skip


CONVERSATION = Section(
    "conversation",
    "Turns and tools; kept in `env_config` (rllib_llm/Conversation-v0, if no environment is "
    "named), where it can be said as well, once.",
    (
        _of_conversation(
            "system",
            str | None,
            None,
            "a system message before every task",
        ),
        _of_conversation(
            "tools",
            Any,
            None,
            "functions with type hints and docstring, their dotted paths, or tool objects",
        ),
        _of_conversation(
            "mcp_servers",
            Any,
            None,
            "{command, args, env} or URLs of MCP servers, whose tools are added",
        ),
        _of_conversation(
            "max_turns",
            int,
            8,
            "the turns of the assistant, after which a rollout is judged as it stands",
            least=1,
        ),
        _of_conversation(
            "max_tokens",
            int | None,
            None,
            "the tokens of a whole conversation; None: what the model reads",
            least=1,
        ),
        _of_conversation(
            "max_seconds",
            float,
            600.0,
            "the time of a rollout; a slower one is not valid",
            above=0,
            unit="seconds",
        ),
        _of_conversation(
            "max_concurrent",
            int,
            256,
            "the rollouts under way at once in a sampler",
            least=1,
        ),
        _of_conversation(
            "tool_errors",
            str,
            "message",
            "what a failed call does",
            choices=("message", "invalid"),
            note='"message": the policy is told; "invalid": nothing is learnt from the rollout.',
        ),
        _of_conversation(
            "tool_timeout_s",
            float,
            10.0,
            "the time of one call of a tool",
            above=0,
            unit="seconds",
        ),
        _of_conversation(
            "max_tool_chars",
            int,
            4000,
            "the characters of a tool's result; of a longer one beginning and end are kept",
            least=1,
        ),
        _of_conversation(
            "tool_syntax",
            str | None,
            None,
            "how calls are written; None: as the chat template writes them",
            choices=("hermes", "xml", "mistral", "llama3", "none"),
        ),
        _of_conversation(
            "history",
            str,
            "fork",
            "what happens where the template changes old turns",
            choices=("fork", "keep"),
            note='"fork": a row of its own; "keep": old turns stay as they were sampled.',
        ),
        _of_conversation(
            "renderer",
            str | None,
            "auto",
            "who writes turns: one of the package renderers, by hub id or family",
            note="None: the chat template.",
        ),
        _of_conversation(
            "template_settings",
            dict | None,
            None,
            "further variables of the chat template, such as {enable_thinking: false}",
        ),
    ),
)
