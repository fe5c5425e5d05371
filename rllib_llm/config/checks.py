"""One form for every complaint about a setting, which the rules in the files of the sections use;
and warnings of settings that do nothing under the others: a typo in a plan costs a night."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeVar

from rllib_llm.config.sections import defaults, rllib_table, same, table
from rllib_llm.shared.errors import Problems, SettingWarning, complain, warning
from rllib_llm.shared.setting import IN_CONFIG

Value = TypeVar("Value")


def require(condition: bool, name: str, value: Any, rule: str, reason: str, remedy: str) -> None:
    """Raises Problems with the rule "be `rule`" unless `condition`; it is noted within
    `all_complaints`."""
    if not condition:
        complain(_broken(name, value, rule, reason, remedy))


def given(value: Value | None, name: str, rule: str, reason: str, remedy: str) -> Value:
    """Returns `value`; where it is None, raises what `require` does, without the None: mostly
    nobody has written it."""
    if value is None:
        raise _broken(name, ..., rule, reason, remedy)
    return value


def _broken(name: str, value: Any, rule: str, reason: str, remedy: str) -> Problems:
    return Problems(name, f"be {rule}", reason, remedy, value)


def warn_of_no_effect(config: Any) -> None:
    """One warning for every setting that was changed from its default and is not used, and one for
    every range that does not suit the loss that was chosen."""
    changed = _unused(config, defaults(type(config)))
    for each in (*_no_effect(config, changed), *_unsuited(config)):
        warnings.warn(each, stacklevel=4)


def warn_of_idle_overlay(config: Any, training: Any, names: Container[str]) -> None:
    """One warning for every setting in `names`, those of `evaluation_config`, that is not used in
    the evaluation, whose whole config `config` is, and differs from `training`'s, which tells of
    the others."""
    idle = (unused for unused in _unused(config, training) if unused[0] in names)
    for each in _no_effect(config, idle, "evaluation_config."):
        warnings.warn(each, stacklevel=4)


def _no_effect(
    config: Any, unused: Iterable[tuple[str, str, str]], place: str = ""
) -> Iterator[SettingWarning]:
    for name, why, remedy in unused:
        value = _value(config, name)
        yield SettingWarning(
            warning(f"{place}{name}", "", f"has no effect {why}", remedy, value)
        )


def _value(config: Any, name: str) -> Any:
    row = table(type(config)).get(name) or rllib_table(type(config)).get(name)
    return row.value(config) if row is not None else getattr(config, name)


def _unused(config: Any, other: Any) -> Iterator[tuple[str, str, str]]:
    """(setting, why it is not used, remedy) under `config`, of those that differ from `other`'s."""
    why = f"in {config.algo_class.__name__}"
    idle = [(name, why, "Remove it") for name in config.ignored_settings]
    rows = (*table(type(config)).values(), *rllib_table(type(config)).values())
    for row in rows:
        if row.place != IN_CONFIG or row.name in config.ignored_settings:
            continue
        unused = row.unused(config)
        if unused is not None:
            idle.append((row.name, *unused))
    for each in idle:
        if not same(_value(config, each[0]), _value(other, each[0])):
            yield each


def _unsuited(config: Any) -> Iterator[SettingWarning]:
    """Clip ranges of PPO used with losses whose papers give others."""
    loss, low = getattr(config, "policy_loss", None), getattr(config, "clip_param", 0.0)
    if loss == "gspo" and low >= 0.1:
        yield SettingWarning(warning(
            "clip_param", "be smaller with policy_loss='gspo'", "it hardly ever clips: the ratio "
            "of a whole completion is its tokens' geometric mean, which stays near 1",
            "Zheng et al. 2025 use clip_param=3e-4 and clip_param_high=4e-4 for completions of "
            "thousands of tokens; about 0.03 suits short ones", low,
        ))  # fmt: skip
    if loss == "cispo" and low < 1:
        yield SettingWarning(warning(
            "clip_param", "be 1 with policy_loss='cispo'", "it holds weights from below, which its "
            "paper does not (MiniMax-M1 2025)", "Bound them from above with clip_param_high", low,
        ))  # fmt: skip
