"""One form for every complaint about a setting."""

from __future__ import annotations

from typing import Any


def require(condition: bool, name: str, value: Any, rule: str, reason: str, remedy: str) -> None:
    """Raises ValueError "`name`=`value` must be `rule`: `reason`. `remedy`." unless `condition`."""
    if not condition:
        raise ValueError(f"{name}={value!r} must be {rule}: {reason}. {remedy}.")


def check_precision(config: Any) -> None:
    """Raises ValueError for an unknown strategy or a dtype that forward passes cannot use."""
    require(
        config.learner_strategy in ("ddp", "fsdp"), "learner_strategy", config.learner_strategy,
        "'ddp' or 'fsdp'", "learners hold the whole model or a share of it", "Use 'ddp'",
    )  # fmt: skip
    require(
        config.autocast_dtype in (None, "bfloat16"), "autocast_dtype", config.autocast_dtype,
        "None or 'bfloat16'", "float16 needs scaled losses, which are not built in",
        "Use 'bfloat16'",
    )  # fmt: skip


def check_timeout(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a limit that a process can be given for its answers."""
    require(
        value is None or value == "auto"
        or (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0),
        name, value, "a number of seconds above 0, 'auto' or None",
        "a process that has not answered by then is killed", "Use 'auto', or None to wait for ever",
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
