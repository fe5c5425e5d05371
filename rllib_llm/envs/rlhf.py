"""rllib_llm/RLHF-v0: prompts of your own, judged by a reward model, reward functions, or both."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rllib_llm.data.sources import Source
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.judges.rewards import RewardSum, RewardTerm
from rllib_llm.envs.prompts import PromptSource
from rllib_llm.envs.settings import CONVERSATION_ENV, ENV_SETTINGS, ConversationSettings
from rllib_llm.modules.model_source import (
    REFERENCE,
    TEACHER,
    check_vocabulary,
    num_embeddings,
    vocabulary_difference,
)
from rllib_llm.modules.quantization import check_quantization
from rllib_llm.modules.tokenizer import load_tokenizer, with_chat_template
from rllib_llm.shared.dotted import as_list, named_model
from rllib_llm.shared.errors import Problem, Problems, problems_in, report, require, unknown_key
from rllib_llm.shared.setting import Setting

# Of prompts and rewards that an environment takes from its user, not from its own code.
_OF_USERS = ("prompts", "prompt_column", "eval_prompts", "reward_model", "reward_functions")
_OF_TURNS = ConversationSettings.model_fields
_OF_BANDITS = ("num_envs", "max_prompt_len", "max_completion_len", "kl_coeff", "temperature",
               "prompt_overflow", "return_texts", "device")  # fmt: skip
DEFAULTS = {name: row for name, row in ENV_SETTINGS.items() if name not in _OF_TURNS}
COMMON_DEFAULTS = {name: row for name, row in DEFAULTS.items() if name not in _OF_USERS}


def create(env_config: Mapping[str, Any]) -> BanditEnv:
    """The environment that `env_config` describes; its keys and their defaults are `DEFAULTS`.

    Raises:
        Problems: an unknown key, no prompts, nothing that judges, no tokenizer.
    """
    settings = with_defaults(env_config, DEFAULTS)
    check_settings(settings)
    tokenizer = policy_tokenizer(settings)
    return build_bandit(
        settings, tokenizer=tokenizer, rewards=reward_terms(settings, tokenizer),
        **{name: settings[name] for name in ("prompts", "eval_prompts", "prompt_column")},
    )  # fmt: skip


def check_settings(settings: Mapping[str, Any]) -> None:
    """Checks that prompts and at least one reward are set.

    Raises:
        Problems: one of the two is missing.
    """
    check_prompts(settings, settings["prompts"])
    require(
        settings["reward_model"] or settings["reward_functions"], "rewards", ...,
        "have a model or functions", "nothing judges the completions",
        "Set rewards: {functions: [...]} to dotted paths of functions, or rewards: {model: ...} to "
        "a sequence classifier",
    )  # fmt: skip


def check_prompts(settings: Mapping[str, Any], prompts: Source | None) -> None:
    """Raises Problems where there are no prompts for this split."""
    require(
        prompts is not None or (settings["eval_prompts"] and settings["split"] == "eval"),
        "prompts", ..., "have data", "there is nothing to complete",
        "Set prompts: {data: ...} to a file (JSONL, CSV, Parquet, text), a data set or a function",
    )  # fmt: skip


def prompt_source(
    settings: Mapping[str, Any], prompts: Source | None, eval_prompts: Source | None = None,
    prompt_column: str | None = None,
) -> PromptSource:  # fmt: skip
    """The prompts of the split that `settings` name, in their order."""
    return PromptSource(
        prompts, seed=settings["split_seed" if settings["split"] == "eval" else "seed"],
        prompt_column=prompt_column, eval_data=eval_prompts,
        **{name: settings[name] for name in ("shuffle", "split", "eval_fraction", "split_seed")},
    )  # fmt: skip


def reward_terms(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The reward model and the reward functions that `settings` name."""
    rewards = as_list(settings["reward_functions"])
    if not settings["reward_model"]:
        return rewards
    from rllib_llm.envs.frozen_models import RewardModelEnsemble, RewardModelScorer

    chosen = named_model(settings["reward_model"])
    require(
        bool(chosen.get("model")) != bool(chosen.get("models")), "env_config.reward_model",
        settings["reward_model"], "have 'model', or 'models' for several of them",
        "", "Name its model",
    )  # fmt: skip
    weight, name = chosen.pop("weight", 1.0), chosen.pop("name", "reward_model")
    options = {**_frozen_defaults(settings), "tokenizer": tokenizer, **chosen}
    model, models = options.pop("model", None), options.pop("models", None)
    kind: Any = RewardModelEnsemble if models else RewardModelScorer
    return [RewardTerm(kind(models or model, **options), weight, name), *rewards]


def build_bandit(
    settings: Mapping[str, Any], *, tokenizer: PreTrainedTokenizerBase, prompts: Source | None,
    rewards: Sequence[Any], eval_prompts: Source | None = None, prompt_column: str | None = None,
) -> BanditEnv:  # fmt: skip
    """A `BanditEnv` from settings that hold every key of `COMMON_DEFAULTS`."""
    # All rows of the policy's embedding may be sampled; often they are more than its tokens.
    model, vocab_size = settings["model"], settings["vocab_size"]
    return BanditEnv(
        tokenizer=tokenizer, rewards=RewardSum(rewards),
        prompts=prompt_source(settings, prompts, eval_prompts, prompt_column),
        reference=frozen_reference(settings, tokenizer),
        teacher=frozen_teacher(settings, tokenizer), teacher_prompt=settings["teacher_prompt"],
        vocab_size=vocab_size or (model and num_embeddings(model)), model=model,
        **{name: settings[name] for name in _OF_BANDITS},
    )  # fmt: skip


def with_defaults(
    env_config: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """`defaults` overridden by `env_config`, whose values are checked.

    defaults: by name a row of settings, as in `COMMON_DEFAULTS`, or a default: another one of a
        row in `ENV_SETTINGS`, or that of a setting which the environment checks itself.

    Raises:
        Problems: a key, also of `reward_model` and `reference`, that is no setting, with the
            nearest that is.
        Problems: a value that its row refuses, a quantization that is not known.
    """
    found = _unknown_keys(env_config, defaults, is_whole=True)
    settings = {}
    for name, default in defaults.items():
        row = ENV_SETTINGS.get(name)
        if isinstance(default, Setting):
            row, default = default, default.default
        settings[name] = env_config.get(name, default)
        # With a default of another kind it is another setting, of the same name.
        if name in env_config and row is not None and row.problem(default) is None:
            found += filter(None, [replace(row, default=default).problem(settings[name])])
    for key in ("reward_model", "reference"):
        given = env_config.get(key)
        if isinstance(given, Mapping):
            found += _unknown_keys(given, _model_settings(key), f".{key}")
            kind, backend = given.get("quantization", "none"), given.get("backend", "auto")
            found += problems_in(check_quantization, kind, backend)
            found += problems_in(_check_device, f"env_config.{key}.device", given.get("device"))
    found += problems_in(_check_device, "env_config.device", settings.get("device"))
    frozen = env_config.get("frozen_quantization", "none")
    found += problems_in(check_quantization, frozen, "auto")
    report(found)
    return settings


def _check_device(name: str, value: Any) -> None:
    """Raises Problems where torch knows no such device; whether it is there, a run tells."""
    try:
        torch.device("cpu" if value is None else value)
    except (RuntimeError, TypeError):
        raise Problems(name, "be a device", "", "Write cpu, cuda or cuda:1", value) from None


def _unknown_keys(
    given: Mapping[str, Any], known: Collection[str], part: str = "", *, is_whole: bool = False
) -> list[Problem]:
    """Keys that are not known; `is_whole`: of an env_config, not of a `part` of it."""
    return [
        unknown_key(f"env_config{part}", key, known, _of_another(key, known) if is_whole else "")
        for key in map(str, given) if key not in known
    ]  # fmt: skip


def _of_another(key: str, known: Collection[str]) -> str:
    """A remedy for a key of another environment than that of `known`; empty: it is of none."""
    if key in DEFAULTS and "max_turns" in known:
        return f"{CONVERSATION_ENV}, or one like it, has no such setting. Leave one of the two out."
    if key in DEFAULTS:
        return "The environment has its own prompts and rewards. Leave it out, or `env`."
    if key in _OF_TURNS:
        return f"`env` has no turns. Leave it out, and {CONVERSATION_ENV} is taken, which has."
    return ""


def _model_settings(key: str) -> set[str]:
    """Names of the settings of a frozen model, `key` "reward_model" or "reference"."""
    from rllib_llm.envs.frozen_models import FrozenReference, RewardModelScorer

    names = {*inspect.signature(FrozenReference).parameters}
    if key == "reference":
        return names
    names |= {*inspect.signature(RewardModelScorer).parameters} - {"tokenizer", "frozen"}
    return names | {"weight", "name", "models", "combine", "std_coeff"}


def policy_tokenizer(settings: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer that `settings["tokenizer"]`, else `settings["model"]`, names.

    Raises:
        Problems: neither is set, or the model reads the tokenizer's ids as other tokens.
    """
    chosen = settings["tokenizer"] if settings["tokenizer"] is not None else settings["model"]
    require(
        chosen is not None, "env_config", ..., "have 'model' (or 'tokenizer')",
        "prompts are handed out as the policy's token ids",
        "Set it to the policy's folder, hub id or dotted path (rllib env check: --model)",
    )  # fmt: skip
    chats = {name: settings[name] for name in ("chat_template", "template_settings")}
    if isinstance(chosen, PreTrainedTokenizerBase):
        tokenizer = with_chat_template(chosen, **chats)
    else:
        tokenizer = load_tokenizer(chosen, **chats)
    if settings["tokenizer"] is not None and settings["model"] is not None:
        difference = vocabulary_difference(settings["model"], tokenizer, "the model's")
        require(
            not difference, "env_config.tokenizer", chosen, "have the vocabulary of the model",
            difference, "Leave it out to take the model's own",
        )  # fmt: skip
    return tokenizer


def check_reference(
    settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The settings of the reference, its model among them.

    Raises:
        Problems: no model is named.
        ValueError: it has another vocabulary than the policy.
    """
    chosen = named_model(settings["reference"])
    model = chosen.pop("model", None) or settings["model"]
    require(
        model is not None, "env_config.reference", settings["reference"], "name a model",
        "there is no 'model' of the policy either", "Set reference.model",
    )  # fmt: skip
    if model != settings["model"]:
        check_vocabulary(REFERENCE, model, tokenizer)
    return {"model": model, **chosen}


def frozen_reference(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any | None:
    """The reference that `settings` name, or None."""
    if settings["reference"] is None:
        return None
    from rllib_llm.envs.frozen_models import FrozenReference

    chosen = check_reference(settings, tokenizer)
    return FrozenReference(chosen.pop("model"), **{**_frozen_defaults(settings), **chosen})


def frozen_teacher(settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any | None:
    """The `Teachers` that `settings` name, or None."""
    if settings["teacher"] is None:
        return None
    from rllib_llm.envs.frozen_models import FrozenTeacher, ServedTeacher, Teachers

    def made(given: Any) -> FrozenTeacher | ServedTeacher:
        own = named_model(given)
        model = own.pop("model")
        if "url" in own:
            return ServedTeacher(model, **own)
        check_vocabulary(TEACHER, model, tokenizer)
        return FrozenTeacher(model, **{**_frozen_defaults(settings), **own})

    chosen = named_model(settings["teacher"])
    models = chosen.get("models") or {"": chosen}
    return Teachers(
        {str(name): made(given) for name, given in models.items()}, chosen.get("column"),
        top_k=settings["teacher_top_k"], temperature=settings["temperature"],
    )  # fmt: skip


def _frozen_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of a frozen model's settings."""
    return {
        "device": settings["device"], "quantization": settings["frozen_quantization"],
        "products": settings["frozen_products"],
    }  # fmt: skip
