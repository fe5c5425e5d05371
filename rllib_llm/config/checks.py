"""Problems of rules between settings, and warnings of settings that do nothing under the others: a
typo in a plan costs a night."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeVar

from rllib_llm.config.sections import defaults, rllib_table, same, table
from rllib_llm.shared.errors import Problem, Problems, warning
from rllib_llm.shared.setting import IN_CONFIG

Value = TypeVar("Value")
Rule = Callable[[Any], Iterable[Problem]]  # of a config: what of it breaks the rule


def wrong(
    config: Any, name: str, rule: str, reason: str, remedy: str = "Leave it out"
) -> Problem:
    """The problem of a setting of `config`, which must "be `rule`"."""
    return Problem(name, f"be {rule}", reason, remedy, getattr(config, name))


def given(value: Value | None, name: str, rule: str, reason: str, remedy: str) -> Value:
    """Returns `value`; where it is None, raises Problems, without the None, which mostly nobody has
    written."""
    if value is None:
        raise Problems(name, f"be {rule}", reason, remedy)
    return value


def no_effect(config: Any) -> Iterator[Problem]:
    """A warning for every setting that was changed from its default and is not used, and for every
    range that does not suit the loss that was chosen."""
    yield from _idle(config, defaults(type(config)))
    loss, low = getattr(config, "policy_loss", None), getattr(config, "clip_param", 0.0)
    if loss == "gspo" and low >= 0.1:
        yield warning("clip_param", "be smaller with policy_loss='gspo'", "it hardly ever clips: "
                      "the ratio of a whole completion is its tokens' geometric mean, near 1",
                      "Zheng et al. 2025 use clip_param=3e-4 and clip_param_high=4e-4 for "
                      "completions of thousands of tokens; about 0.03 suits short ones", low
                      )  # fmt: skip
    if loss == "cispo" and low < 1:
        yield warning("clip_param", "be 1 with policy_loss='cispo'", "it holds weights from below, "
                      "which its paper does not (MiniMax-M1 2025)",
                      "Bound them from above with clip_param_high", low)  # fmt: skip


def idle_overlay(config: Any, training: Any, names: Container[str]) -> Iterator[Problem]:
    """A warning for every setting in `names`, those of `evaluation_config`, that is not used in the
    evaluation, whose whole config `config` is, and differs from `training`'s."""
    for problem in _idle(config, training):
        if problem.name in names:
            yield problem.within("evaluation_config")


def _idle(config: Any, other: Any) -> Iterator[Problem]:
    """Warnings of settings that `config` does not use, where they differ from `other`'s."""
    why = f"in {config.algo_class.__name__}"
    unused: dict[str, tuple[str, str]] = dict.fromkeys(config.ignored_settings, (why, "Remove it"))
    rows = {**table(type(config)), **rllib_table(type(config))}
    for row in rows.values():
        if row.place == IN_CONFIG and row.name not in unused and (idle := row.unused(config)):
            unused[row.name] = idle
    for name, (reason, remedy) in unused.items():
        value, usual = (
            rows[name].value(each) if name in rows else getattr(each, name)
            for each in (config, other)
        )
        if not same(value, usual):
            yield warning(name, "", f"has no effect {reason}", remedy, value)
