"""Checks of `RLHFConfig`'s settings: sampling, losses, engines, off-policy data, streaming."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from rllib_llm.config.checks import check_range, require
from rllib_llm.config.tabled_config import flattened
from rllib_llm.engines.params import SamplingParams
from rllib_llm.numerics.losses import REDUCTIONS
from rllib_llm.rollouts.filters import Filters
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
    """The settings behind the number of an evaluation's completions, and its metrics."""
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
    """Raises ValueError if the chosen `weights_transport` cannot work here."""
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
    """(condition, rule, reason, remedy) by setting, for runs whose samplers read the weights in the
    learner's memory."""
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


def check_engine(config: Any) -> None:
    """Raises ValueError for an engine that cannot serve this config."""
    if config.generate_function is not None:
        found = import_dotted(config.generate_function, name="generate_function")
        require(
            callable(found), "generate_function", config.generate_function, "a function",
            f"it is {type(found).__name__}", "Name one of those that are in the module",
        )  # fmt: skip
    if config.engine == "openai":
        _check_openai(config)
    if config.engine == "vllm" and config.num_env_runners:
        _check_vllm(config)


def _check_openai(config: Any) -> None:
    given = config.engine_settings or {}
    needed = {"base_url"} if given.get("endpoint") == "tokens" else {"base_url", "served_model"}
    missing = needed - set(given)
    require(
        not missing, "engine_settings", config.engine_settings,
        f"a dictionary with {' and '.join(map(repr, sorted(needed)))}",
        "they say which server and which of its models answers", f"Add {sorted(missing)}",
    )  # fmt: skip
    if not config.in_evaluation:
        _check_training_with_a_server(config, given)


def _check_training_with_a_server(config: Any, given: dict[str, Any]) -> None:
    tokens = "endpoint='tokens' of its engine_settings"
    require(
        given.get("endpoint") == "tokens", "engine", config.engine,
        f"'torch' or 'vllm' in training, or come with {tokens}",
        "texts are not the tokens that a server sampled, so nothing can be learnt from them",
        "Add endpoint: tokens, or set it in evaluation_config alone",
    )  # fmt: skip
    require(
        config.gives_weights_away and given.get("follows_run", True), "engine", config.engine,
        "'torch' or 'vllm' in training, or come with weights_name or weights_push",
        "the server has to have the weights that are learnt",
        "Set weights_name, and serve with the same one, and leave follows_run out",
    )  # fmt: skip
    require(
        not config.streams, "engine", config.engine,
        "'torch' or 'vllm' with max_staleness, oversample or filters",
        "a server is asked for whole batches by the newest weights", "Leave those out",
    )  # fmt: skip


def _check_vllm(config: Any) -> None:
    from rllib_llm.engines.vllm_engine import MISSING, check_params

    if importlib.util.find_spec("vllm") is None:
        raise ValueError(MISSING)
    require(
        config.lora is None, "lora", config.lora, "None with engine='vllm'",
        "adapters alone are published, and vLLM is given whole weights", "Use engine='torch'",
    )  # fmt: skip
    check_params(config.temperature, config.top_k, config.top_p, config.min_new_tokens)


def check_off_policy(config: Any) -> None:
    """Raises ValueError for bounds between which nothing lies, and for older data without a
    correction."""
    require(
        config.off_policy_lower < config.off_policy_upper, "off_policy_lower",
        config.off_policy_lower, f"below off_policy_upper={config.off_policy_upper!r}",
        "weights are held between them", "Use 0 for no bound",
    )  # fmt: skip
    lower, upper = config.rejection_lower, config.rejection_upper
    if config.rejection is not None:
        require(
            lower is not None or upper is not None, "rejection_upper", upper,
            f"a number with rejection={config.rejection!r}", "without a bound nothing is rejected",
            "Set 0.05, say, for the mean k3 of completions",
        )  # fmt: skip
        require(
            lower is None or upper is None or lower < upper, "rejection_lower", lower,
            f"below rejection_upper={upper!r}", "what lies between them is kept", "Leave one out",
        )  # fmt: skip
    for name, is_older in (
        ("max_staleness", config.max_staleness > 0), ("oversample", config.oversample > 1),
    ):  # fmt: skip
        require(
            not is_older or config.off_policy is not None, "off_policy", config.off_policy,
            f"set with {name}={getattr(config, name)!r}",
            "tokens of older weights bias the plain loss, and training may collapse",
            "Set off_policy='decoupled', or 'bypass' to clip the ratio to the sampler's log-probs",
        )  # fmt: skip


def check_replay(config: Any) -> None:
    """Raises ValueError for replayed groups without a correction, or more of them than the buffer
    holds."""
    groups, capacity = config.replay_groups, config.replay_capacity
    if not groups:
        return
    require(
        config.off_policy is not None, "off_policy", config.off_policy,
        f"set with replay_groups={groups!r}",
        "replayed tokens are of older weights and bias the plain loss",
        "Set off_policy='decoupled'",
    )  # fmt: skip
    require(
        config.critic == "none" or config.off_policy == "decoupled", "off_policy",
        config.off_policy, f"'decoupled' with replay_groups={groups!r} and a critic",
        "only then are old values computed again, by the critic as it is", "Set it",
    )  # fmt: skip
    require(
        capacity is None or capacity >= groups, "replay_capacity", capacity,
        f"at least replay_groups={groups!r}", "they are drawn from it", "Raise it",
    )  # fmt: skip


def check_streaming(config: Any) -> None:
    """Raises ValueError for impossible streaming settings, or off-policy data without a
    correction."""
    Filters(config.filters or ())
    require(
        config.window == 1 or config.schedule == "free" or not config.streams,
        "window", config.window, "1 with schedule='lockstep'",
        "which group overtakes another would depend on time", "Set schedule='free'",
    )  # fmt: skip
    require(
        config.on_stale == "train" or config.schedule == "free" or not config.streams,
        "on_stale", config.on_stale, "'train' with schedule='lockstep'",
        "no group overtakes another, so none gets too old", "Set schedule='free'",
    )  # fmt: skip
    if not config.makes_stale:
        return
    require(
        config.weights_transport == "store", "weights_transport", config.weights_transport,
        "'store' where samplers are ahead of the learner",
        "older weights have to stay where they are", "Leave it out",
    )  # fmt: skip
