"""One form for every complaint about a setting."""

from __future__ import annotations

from typing import Any, TypeVar

from rllib_llm.learners.schedule import learning_rate_factor

Value = TypeVar("Value")


def require(condition: bool, name: str, value: Any, rule: str, reason: str, remedy: str) -> None:
    """Raises ValueError "`name`=`value` must be `rule`: `reason`. `remedy`." unless `condition`."""
    if not condition:
        raise _broken(name, value, rule, reason, remedy)


def given(value: Value | None, name: str, rule: str, reason: str, remedy: str) -> Value:
    """Returns `value`; where it is None, raises what `require` does."""
    if value is None:
        raise _broken(name, value, rule, reason, remedy)
    return value


def _broken(name: str, value: Any, rule: str, reason: str, remedy: str) -> ValueError:
    return ValueError(f"{name}={value!r} must be {rule}: {reason}. {remedy}.")


def is_number(value: Any) -> bool:
    """True for a number; a bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        holds = is_number(value) and (
            (least is None or value >= least)
            and (above is None or value > above)
            and (most is None or value <= most)
        )
        require(value is None or holds, name, value, f"a number {rule}", reason, remedy)


def check_optimiser(config: Any) -> None:
    """Raises ValueError for a learning rate, its schedule or an AdamW that cannot be."""
    require(
        config.lr is not None and not isinstance(config.lr, (list, tuple)) and config.lr >= 0,
        "lr", config.lr, "a number of at least 0",
        "schedules here count optimiser updates, not environment steps",
        "Use lr_schedule, lr_num_warmup_updates and lr_num_updates",
    )  # fmt: skip
    learning_rate_factor(
        config.lr_num_warmup_updates,
        schedule=config.lr_schedule,
        num_warmup_updates=config.lr_num_warmup_updates,
        num_total_updates=config.lr_num_updates,
    )
    check_range(
        config, "weight_decay", least=0, reason="it shrinks the weights", remedy="Use 0 for none"
    )
    check_range(
        config, "adam_epsilon", "grad_clip", above=0, reason="gradients are divided by it",
        remedy="Use 1e-8 for adam_epsilon, null for no grad_clip",
    )  # fmt: skip


def check_cuts(config: Any) -> None:
    """Raises ValueError where it is not plain how a batch is cut into optimiser steps."""
    for name in ("num_epochs", "train_batch_size_per_learner"):
        value = getattr(config, name)
        require(
            value is not None and value >= 1, name, value, "at least 1",
            "an iteration without rows or passes learns nothing", "Raise it",
        )  # fmt: skip
    check_range(
        config, "minibatch_size", "minibatch_tokens", "micro_batch_size", "micro_batch_tokens",
        least=1, reason="it says how much goes through the model at a time",
        remedy="Raise it, or use null to leave it out",
    )  # fmt: skip
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
    """Raises ValueError for an unknown strategy or a dtype that forward passes cannot use."""
    require(
        config.learner_strategy in ("ddp", "fsdp"), "learner_strategy", config.learner_strategy,
        "'ddp' or 'fsdp'", "learners hold the whole model or a share of it", "Use 'ddp'",
    )  # fmt: skip
    require(
        str(config.dtype).removeprefix("torch.") != "float16", "dtype", config.dtype,
        "'float32' or 'bfloat16'",
        "small gradients are 0 in float16 unless losses are scaled, which is not built in",
        "Use 'float32' with autocast_dtype='bfloat16', or 'bfloat16'",
    )  # fmt: skip
    require(
        config.autocast_dtype in (None, "bfloat16"), "autocast_dtype", config.autocast_dtype,
        "None or 'bfloat16'", "float16 needs scaled losses, which are not built in",
        "Use 'bfloat16'",
    )  # fmt: skip


def check_timeout(name: str, value: Any, *, auto: bool = True) -> None:
    """Raises ValueError unless `value` is a limit that a process can be given for its answers;
    `auto`: whether it may be "auto"."""
    allowed = "a number of seconds above 0, 'auto' or None" if auto else "above 0 seconds or None"
    require(
        value is None or (auto and value == "auto") or (is_number(value) and value > 0),
        name, value, allowed,
        "a process that has not answered by then is killed", "Use None to wait for ever",
    )  # fmt: skip


def check_adapters(config: Any) -> None:
    """Raises ValueError for settings of adapters, or of a trunk in few bits, that cannot be."""
    require(
        config.quantization in ("none", "int8", "nf4"), "quantization", config.quantization,
        "'none', 'int8' or 'nf4'", "the frozen model under adapters is kept so", "Use 'none'",
    )  # fmt: skip
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

    check_lora(config.lora)


def check_reference(config: Any) -> None:
    """Raises ValueError where the reference cannot be at the place that was chosen."""
    require(
        config.reference_in in (None, "environment", "policy", "learner"), "reference_in",
        config.reference_in, "'environment', 'policy', 'learner' or None",
        "it says who computes the reference's log-probs", "Use None to have it chosen",
    )  # fmt: skip
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
