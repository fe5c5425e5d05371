"""One form for every complaint about a setting, and warnings of settings that do nothing under the
others: a typo in a plan costs a night."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

from rllib_llm.config.sections import defaults, rllib_table, same, table
from rllib_llm.config.setting import IN_CONFIG
from rllib_llm.shared.errors import SettingError, SettingWarning, complain, noted, shown

Value = TypeVar("Value")


def require(condition: bool, name: str, value: Any, rule: str, reason: str, remedy: str) -> None:
    """Raises SettingError with the rule "be `rule`" unless `condition`; it is noted within
    `all_complaints`."""
    if not condition:
        complain(_broken(name, value, rule, reason, remedy))


def given(value: Value | None, name: str, rule: str, reason: str, remedy: str) -> Value:
    """Returns `value`; where it is None, raises what `require` does."""
    if value is None:
        raise _broken(name, value, rule, reason, remedy)
    return value


def _broken(name: str, value: Any, rule: str, reason: str, remedy: str) -> SettingError:
    return SettingError(name=name, value=value, rule=f"be {rule}", reason=reason, remedy=remedy)


def check_range(
    config: Any,
    *names: str,
    reason: str,
    remedy: str,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> None:
    """Raises ValueError for the first of the settings `names` that is neither None nor a number
    of at least `least`, above `above` and at most `most`, those that are given."""
    bounds = {"of at least": least, "above": above, "at most": most}
    rule = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    for name in names:
        value = getattr(config, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        holds = is_number and (
            (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
        )
        require(value is None or holds, name, value, f"a number {rule}", reason, remedy)


def check_optimiser(config: Any) -> None:
    """Raises ValueError for a schedule of the learning rate, or moments, that cannot be."""
    from rllib_llm.learners.optimizer import learning_rate_factor

    betas = config.adam_betas
    require(
        all(0 <= beta < 1 for beta in betas), "adam_betas", betas, "two numbers in [0, 1)",
        "a moment is that much of the one before", "Use (0.9, 0.999)",
    )  # fmt: skip
    end, warmup = config.lr_num_updates, config.lr_num_warmup_updates
    require(
        config.lr_schedule == "constant" or end is None or end > warmup, "lr_num_updates", end,
        f"above lr_num_warmup_updates={warmup}",
        "the learning rate is 0 from there on, before it has reached its peak",
        "Set it to the optimiser steps of the whole run",
    )  # fmt: skip
    with noted():
        learning_rate_factor(
            config.lr_num_warmup_updates,
            schedule=config.lr_schedule,
            num_warmup_updates=config.lr_num_warmup_updates,
            num_total_updates=config.lr_num_updates,
        )


def check_cuts(config: Any) -> None:
    """Raises ValueError where it is not plain how a batch is cut into optimiser steps."""
    require(
        config.micro_batch_size is None or config.micro_batch_tokens is None, "micro_batch_size",
        config.micro_batch_size, f"None while micro_batch_tokens={config.micro_batch_tokens}",
        "each says alone where a batch is cut", "Set one of them to None",
    )  # fmt: skip
    require(
        config.minibatch_tokens is None or config.minibatch_size is None, "minibatch_tokens",
        config.minibatch_tokens, f"None while minibatch_size={config.minibatch_size}",
        "each says alone what one optimiser step learns from", "Set one of them to None",
    )  # fmt: skip


def check_precision(config: Any) -> None:
    """Raises ValueError for mixed precision of half-precision weights, and for an attention kernel
    that the learners' devices do not support."""
    require(
        config.mixed_precision is None or config.dtype == "float32", "mixed_precision",
        config.mixed_precision, f"None with dtype={config.dtype!r}",
        "a copy of float32 weights computes; these compute themselves",
        "Use dtype='float32', or leave mixed_precision out",
    )  # fmt: skip
    require(
        config.attn_implementation == "sdpa" or config.num_gpus_per_learner > 0,
        "attn_implementation", config.attn_implementation, "'sdpa' without a GPU for each learner",
        "on processors the other kernels have no gradient",
        "Set num_gpus_per_learner: 1, or leave it out",
    )  # fmt: skip
    reads_half = config.dtype == "bfloat16" or config.mixed_precision is not None
    require(
        config.attn_implementation != "flash_attention_2" or reads_half, "attn_implementation",
        config.attn_implementation, "'sdpa' or 'flex_attention' in float32",
        "its kernel reads 16 bits", "Set mixed_precision: bf16, or leave it out",
    )  # fmt: skip


def check_adapters(config: Any) -> None:
    """Raises ValueError for settings of adapters, or of a trunk in few bits, that cannot be."""
    require(
        config.quantization == "none" or config.lora is not None, "quantization",
        config.quantization, "'none' without lora", "weights of few bits cannot be trained",
        "Set lora={}, or quantization='none'",
    )  # fmt: skip
    require(
        config.quantization == "none" or config.learner_strategy == "ddp", "learner_strategy",
        config.learner_strategy, f"'ddp' with quantization={config.quantization!r}",
        "weights of few bits are not sharded", "Use quantization='none', or strategy='ddp'",
    )  # fmt: skip
    if config.lora is None:
        return
    require(
        config.trains_adapters, "lora", config.lora, "None in this stage",
        "its head has to be trained with the model", "Leave it out",
    )  # fmt: skip
    from rllib_llm.modules.lora import check_lora

    with noted():
        check_lora(config.lora)


def check_reference(config: Any) -> None:
    """Raises ValueError where the reference cannot be at the place that was chosen."""
    require(
        config.reference_in != "policy" or config.lora is not None, "reference_in",
        config.reference_in, "'environment' or 'learner' without lora",
        "only a policy under adapters contains the model it started from", "Set lora={}",
    )  # fmt: skip
    require(
        config.ref_kl_estimator != "full" or config.reference_place != "environment"
        or not config.ref_kl_coeff,
        "ref_kl_estimator", config.ref_kl_estimator,
        f"'k1', 'k2' or 'k3' with the reference in the {config.reference_place}",
        "the exact KL needs the reference's logits beside the policy's",
        "Set reference_in='learner'",
    )  # fmt: skip


def warn_of_no_effect(config: Any) -> None:
    """One warning for every setting that was changed from its default and is not used, and one for
    every range that does not suit the loss that was chosen."""
    default = defaults(type(config))
    for name, why, remedy in _unused(config):
        value = _value(config, name)
        if not same(value, _value(default, name)):
            found = f"{name}={shown(value)} has no effect {why}"
            warnings.warn(SettingWarning(f"no_effect.{name}", found, "", remedy), stacklevel=4)
    for warning in _unsuited(config):
        warnings.warn(warning, stacklevel=4)


def _value(config: Any, name: str) -> Any:
    row = table(type(config)).get(name) or rllib_table(type(config)).get(name)
    return row.value(config) if row is not None else getattr(config, name)


def _unused(config: Any) -> Iterator[tuple[str, str, str]]:
    """(setting, why it is not used, remedy) under this config, changed or not."""
    for name in config.ignored_settings:
        yield name, f"in {config.algo_class.__name__}", "Remove it"
    rows = (*table(type(config)).values(), *rllib_table(type(config)).values())
    for row in rows:
        if row.place != IN_CONFIG or row.name in config.ignored_settings:
            continue
        unused = row.unused(config)
        if unused is not None:
            yield row.name, *unused


def _unsuited(config: Any) -> Iterator[SettingWarning]:
    """Clip ranges of PPO used with losses whose papers give others."""
    loss, low = getattr(config, "policy_loss", None), getattr(config, "clip_param", 0.0)
    if loss == "gspo" and low >= 0.1:
        yield SettingWarning(
            "settings.clip_param",
            f"clip_param={low!r} hardly ever clips with policy_loss='gspo'",
            "the ratio of a whole completion is its tokens' geometric mean, which stays near 1",
            "Zheng et al. 2025 use clip_param=3e-4 and clip_param_high=4e-4 for completions of "
            "thousands of tokens; about 0.03 suits short ones",
        )
    if loss == "cispo" and low < 1:
        yield SettingWarning(
            "settings.clip_param",
            f"clip_param={low!r} holds weights from below with policy_loss='cispo'",
            "its paper does not (MiniMax-M1 2025)",
            "Use clip_param=1.0, and clip_param_high to bound them from above",
        )
