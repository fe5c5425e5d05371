"""What the settings of `RLHFConfig` may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rllib_llm.config.checks import check_range, require
from rllib_llm.config.tabled_config import flattened
from rllib_llm.engines.params import SamplingParams
from rllib_llm.numerics.losses import REDUCTIONS
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import noted
from rllib_llm.weights.push import open_servers
from rllib_llm.weights.transport import is_own


def check_sampling(config: Any) -> None:
    """Raises ValueError for completions that cannot be sampled, or not be shared out."""
    total, group = config.total_train_batch_size, config.num_completions
    require(
        total % group == 0, "train_batch_size_per_learner", config.train_batch_size_per_learner,
        f"such that all learners' rows ({total}) are a multiple of num_completions={group}",
        "the completions of a prompt stay together", f"Use {max(1, total // group) * group}",
    )  # fmt: skip
    size = config.minibatch_size
    require(
        size is None or size <= config.train_batch_size_per_learner, "minibatch_size", size,
        f"at most train_batch_size_per_learner={config.train_batch_size_per_learner}",
        "a mini-batch is a part of the batch", "Lower it, or set None for the whole batch",
    )  # fmt: skip
    stops = config.stop_token_ids
    with noted():
        SamplingParams(  # checks the rest
            pad_token_id=0,
            stop_token_ids=tuple(stops or ()),
            max_new_tokens=config.max_new_tokens,
            min_new_tokens=config.min_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
        )


def check_evaluation(config: Any) -> None:
    """Raises ValueError for an evaluation of no rows, or of fewer completions of a prompt than
    their results are of."""
    check_range(
        config, "evaluation_duration", least=1, reason="it counts completions", remedy="Raise it"
    )
    held_out = _held_out(config)
    _check_pass_at(held_out, config.pass_at, "pass_at")
    for name, overlay in (config.eval_envs or {}).items():
        if isinstance(overlay, Mapping):
            _check_pass_at({**held_out, **overlay}, config.pass_at, f"eval_envs.{name}.pass_at")


def _held_out(config: Any) -> dict[str, Any]:
    """What decides how often an evaluation completes each prompt, and what is made of it."""
    overlay = config.evaluation_config if not config.in_evaluation else None
    settings = {
        "explore": config.explore if config.in_evaluation else False,
        "num_completions": config.num_completions,
        "answer_pattern": config.answer_pattern,
    }
    if not isinstance(overlay, Mapping):  # none, or a config that says it all
        return settings | ({} if overlay is None else {"explore": overlay.explore})
    return settings | flattened(type(config), overlay)


def _check_pass_at(held_out: Mapping[str, Any], pass_at: Any, name: str) -> None:
    ks = held_out.get("pass_at", pass_at)
    count = held_out["num_completions"] if held_out["explore"] else 1
    require(
        all(1 <= k <= count for k in ks or ()), name, ks, f"numbers from 1 to {count}",
        "so many completions of each prompt are evaluated, which are alike unless they are sampled",
        "Set evaluation_config: {explore: true, num_completions: N}",
    )  # fmt: skip
    pattern = held_out["answer_pattern"]
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        require(
            False, name.replace("pass_at", "answer_pattern"), pattern, "a regular expression",
            str(error), "Write '<answer>(.*?)</answer>', say",
        )  # fmt: skip


def check_transport(config: Any) -> None:
    """Raises ValueError where weights cannot go the way they are told to."""
    name = config.weights_transport
    if name == "store" or config.in_evaluation:
        return
    rules: dict[str, tuple[bool, str, str, str]] = {
        "num_env_runners": (config.num_env_runners > 0, "above 0", "others share the module",
                            "Use 1"),
    }  # fmt: skip
    if is_own(name):
        made_by = import_dotted(name, name="weights_transport")
        require(
            callable(made_by), "weights_transport", name, "a class or a function that makes a "
            "transport", f"it is {type(made_by).__name__}", "Name one that takes no arguments",
        )  # fmt: skip
    else:
        rules |= _where_weights_stay(config)
    for setting, (right, rule, reason, remedy) in rules.items():
        require(
            right, setting, getattr(config, setting),
            f"{rule} with weights_transport={config.weights_transport!r}", reason,
            f"{remedy}, or weights_transport='store'",
        )  # fmt: skip


def check_others(config: Any) -> None:
    """Raises ValueError where others than the samplers cannot be given the weights."""
    if config.in_evaluation:
        return
    for server in open_servers(config.weights_push or ()):
        server.close()
    require(
        config.engine != "openai" or config.weights_push_every == 1, "weights_push_every",
        config.weights_push_every, "1 with engine='openai'",
        "what samples has to have the newest weights", "Leave it out",
    )  # fmt: skip
    if config.serve is None:
        return
    require(
        config.weights_name is not None, "weights_name", config.weights_name, "a name with serve",
        "the server finds the run's weights by it", "Set it",
    )  # fmt: skip
    # Here, since few runs need it.
    from rllib_llm.serving.settings import read_settings

    read_settings({"model": config.given_model(), **config.serve})


def _where_weights_stay(config: Any) -> dict[str, tuple[bool, str, str, str]]:
    """(whether it holds, rule, reason, remedy) by setting, where the weights stay in the learner's
    memory and are read there."""
    share = "Give learner and samplers fractions of one GPU"
    sharded = config.num_learners > 1 and config.learner_strategy == "fsdp"
    on_gpu = {
        "num_gpus_per_learner": (
            config.num_gpus_per_learner > 0, "above 0", "they stay there", share,
        ),
        "num_gpus_per_env_runner": (
            config.num_gpus_per_env_runner > 0, "above 0", "they are read there", share,
        ),
    }  # fmt: skip
    return {
        **(on_gpu if config.weights_transport == "cuda_ipc" else {}),
        "engine": (config.engine == "torch", "'torch'", "others load from host memory", "Use it"),
        "learner_strategy": (not sharded, "'ddp'", "no learner has all weights", "Use 'ddp'"),
        "weights_checksum": (
            not config.weights_checksum, "False", "it is computed in host memory", "Leave it out",
        ),
        "weights_name": (
            config.weights_name is None, "None", "who follows reads from the store", "Leave it out",
        ),
    }  # fmt: skip


def check_loss(config: Any) -> None:
    """Raises ValueError for settings of scores and the loss that do not go together."""
    require(
        config.overlong_buffer <= config.max_new_tokens, "overlong_buffer", config.overlong_buffer,
        f"in 0..max_new_tokens={config.max_new_tokens}", "it is the last so many tokens",
        "0: no punishment",
    )  # fmt: skip
    require(
        config.dual_clip is None or config.policy_loss != "cispo", "dual_clip", config.dual_clip,
        "left at None with policy_loss='cispo'",
        "it bounds ratios of negative advantages, which cispo does not have in its loss",
        "Leave it out",
    )  # fmt: skip
    require(
        config.policy_loss != "rloo" or REDUCTIONS[config.loss_reduction] == "sequence_mean",
        "loss_reduction",
        config.loss_reduction, "'sequence_mean' with policy_loss='rloo'",
        "a completion is one action, whatever its length, and a mean over tokens would weigh it by "
        "them", "Use 'sequence_mean', or policy_loss='ppo'",
    )  # fmt: skip
