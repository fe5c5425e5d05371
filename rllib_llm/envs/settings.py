"""Settings in `env_config`, those of single environments apart, which are declared beside these:
defaults, known keys, checks and the reference page come from here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rllib_llm.shared.errors import report
from rllib_llm.shared.setting import IN_ENV, Section, Setting, Settings, setting

CONVERSATION_ENV = "rllib_llm/Conversation-v0"


class Environment(Settings):
    """Settings of every environment of this package; the sampler sets most of them."""

    model: Any = setting(None, "the policy's folder, hub id or dotted path")
    tokenizer: Any = setting(None, "an object, folder, hub id or path in place of the model's")
    chat_template: str | Path | None = setting(
        None, "a file or text in place of the tokenizer's chat template"
    )
    template_settings: dict | None = setting(
        None, "variables of the chat template, such as {enable_thinking: false}"
    )
    split: Literal["train", "eval"] = setting("train", "the part of the prompts in use")
    split_seed: int = setting(0, "the seed of held-out prompts and their order", least=0)
    shuffle: bool = setting(True, "whether prompts are handed out in a random order")
    seed: int = setting(0, "the seed of the order of training prompts", least=0)
    num_envs: int = setting(8, "the prompts in a batch where the sampler does not say", least=1)
    max_completion_len: int = setting(128, "the longest completion", unit="tokens", least=1)
    temperature: float = setting(1.0, "the divisor of the reference's logits", above=0)
    reference: dict | str | None = setting(
        None, "{model, quantization, dtype, device}; without a model, the policy's"
    )
    teacher: dict | str | None = setting(
        None, "{model, quantization, dtype, device} or {model, url}, which judges every token"
    )
    teacher_top_k: int = setting(16, "how many of the teacher's likeliest tokens", least=1)
    teacher_prompt: str | None = setting(
        None, "the column with the prompt that the teacher reads instead"
    )
    frozen_quantization: Literal["none", "bf16", "int8", "nf4"] = setting(
        "none", "the quantization of frozen models that name none"
    )
    frozen_products: Literal["mkl", "onednn"] = setting(
        "mkl", "what multiplies float32 of frozen models"
    )
    kl_coeff: float = setting(0.0, "the share of the KL in the environment's reward", least=0)
    device: Any = setting("cpu", "the device of what the environment returns")
    return_texts: bool = setting(False, "whether infos have the texts")
    vocab_size: int | None = setting(None, "the ids that completions may have", least=1)


class Prompts(Settings):
    """The prompts to complete. Without an environment they are rllib_llm/RLHF-v0's. Alias: the same
    names in `env_config`; `prompts: {data: ...}` is `env_config: {prompts: ...}`. Use one of the
    two."""

    prompts: Any = setting(
        None, "a file (JSONL, CSV, Parquet, text), a data set, a hub id, rows, or a function",
        short="data", remedy="Write `data: prompts.jsonl`", trl="train_dataset",
        also="prompt_data prompts_file",
    )  # fmt: skip
    eval_prompts: Any = setting(
        None, "held-out prompts in the same form, instead of eval_fraction", short="eval_data"
    )
    eval_fraction: float = setting(
        0.0, "the share of the prompts held out for evaluation", least=0, most=1
    )
    prompt_column: str | None = setting(
        None, 'the column with the prompt; None: "prompt", "messages" or the only column',
        short="column", also="prompt_key input_key dataset_text_field",
    )  # fmt: skip
    max_prompt_len: int = setting(
        128, "the maximum length of a prompt", unit="tokens", least=1,
        also="max_prompt_length prompt_max_len",
    )  # fmt: skip
    prompt_overflow: Literal["truncate_left", "error"] = setting(
        "truncate_left", "the treatment of longer prompts", short="overflow",
        also="truncation_side truncation",
    )  # fmt: skip


PROMPTS = Section.of("prompts", Prompts, place=IN_ENV)


class Judges(Settings):
    """Reward models and reward functions."""

    reward_model: dict | str | None = setting(
        None, "a sequence classifier, or {model, quantization, weight, name, ...}",
        keys=("quantization", "dtype", "device", "weight", "name"), short="model",
        also="reward_model_path reward_pretrain rm reward_model_name", place=IN_ENV,
    )  # fmt: skip
    reward_functions: Any = setting(
        None, "dotted paths, callables or {function, weight, name, kwargs}", short="functions",
        trl="reward_funcs", also="reward_function reward_fn remote_rm_url custom_reward_function",
        place=IN_ENV,
    )  # fmt: skip


class RewardSettings(Judges):
    """Reward models and functions, and the processing of their scores. Alias: `rewards: {functions:
    ...}` is `env_config: {reward_functions: ...}`, and `model` is `reward_model`. Use one of the
    two."""

    score_clip: float | None = setting(
        None, "the bound to which scores are clipped, in both directions; None: not clipped",
        above=0, rllib="clip_rewards", also="reward_clip cliprange_reward",
    )  # fmt: skip
    scale_scores: bool = setting(
        False, "whether scores are divided by their running standard deviation",
        also="normalize_reward use_score_scaling",
    )  # fmt: skip
    missing_eos_penalty: float = setting(
        0.0, "the penalty for completions that reach the length limit", least=0,
        also="non_eos_penalty truncation_penalty",
    )  # fmt: skip
    length_penalty: float = setting(0.0, "the penalty per completion token", least=0)
    overlong_buffer: int = setting(
        0, "the length of DAPO's soft overlong punishment at the end of max_new_tokens; 0: off",
        unit="tokens", least=0, trl="soft_overlong_punishment", also="overlong_buffer_len",
    )  # fmt: skip
    planned_iterations: int | None = setting(
        None, "the planned number of iterations, passed to reward functions with `trainer_state` "
        "as `max_steps`; taken from a file's `stop` if possible", least=1,
    )  # fmt: skip


REWARDS = Section.of("rewards", RewardSettings, positional="functions")


class ConversationSettings(Settings):
    """Turns and tools. Without an environment it is rllib_llm/Conversation-v0's. Alias: the same
    names in `env_config`. Use one of the two."""

    system: str | None = setting(None, "a system message before every task", may_be_empty=True)
    tools: Any = setting(
        None, "functions with type hints and docstring, their dotted paths, or tool objects"
    )
    mcp_servers: Any = setting(
        None, "{command, args, env} or URLs of MCP servers, whose tools are added"
    )
    max_turns: int = setting(
        8, "the maximum number of assistant turns; the rollout is then judged as it is", least=1
    )
    max_tokens: int | None = setting(
        None, "the maximum length of a whole conversation; None: the model's context length",
        least=1,
    )  # fmt: skip
    max_seconds: float = setting(
        600.0, "the time limit of a rollout; a slower one is invalid", unit="seconds", above=0
    )
    max_concurrent: int = setting(256, "the number of concurrent rollouts of a sampler", least=1)
    tool_errors: Literal["message", "invalid"] = setting(
        "message", "the treatment of failed tool calls",
        note='"message": the policy sees the error; "invalid": the rollout is not trained on.',
    )  # fmt: skip
    tool_timeout_s: float = setting(10.0, "the time limit of a tool call", unit="seconds", above=0)
    max_tool_chars: int = setting(
        4000, "the maximum length of a tool result; longer ones are cut in the middle", least=1
    )
    tool_syntax: (
        Literal[
            "hermes", "xml", "glm", "mistral", "llama3", "harmony", "gemma4", "pythonic", "cohere",
            "none",
        ]
        | None
    ) = setting(None, "the syntax of tool calls; None: the chat template's")  # fmt: skip
    history: Literal["fork", "keep"] = setting(
        "fork", "the treatment of templates that change earlier turns",
        note='"fork": start a new row; "keep": keep earlier turns as they were sampled.',
    )  # fmt: skip
    renderer: str | None = setting(
        "auto", "the renderer of turns from the package `renderers`, by hub id or family",
        note="None: the chat template.",
    )  # fmt: skip


CONVERSATION = Section.of("conversation", ConversationSettings, place=IN_ENV, env=CONVERSATION_ENV)


def declared(model: type[Settings]) -> dict[str, Setting]:
    """The settings of an environment that a model declares, by name."""
    section = Section.of("env_config", model, place=IN_ENV)
    return {row.name: row for row in section.settings}


ENV_SETTINGS = {
    **declared(Environment), **declared(Prompts), **declared(Judges),
    **declared(ConversationSettings),
}  # fmt: skip


def check_values(rows: Mapping[str, Setting] = ENV_SETTINGS, /, **values: Any) -> None:
    """Raises Problems for those of `values` that their rows refuse."""
    report(filter(None, (rows[name].problem(value) for name, value in values.items())))
