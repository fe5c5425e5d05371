"""Suggestions for unknown settings: our name for it, or a similar one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rllib_llm.config.lookup import (
    ConfigClass,
    known_names,
    other_names,
    section_names,
    section_rows,
    sections_of,
    table,
)
from rllib_llm.config.schema import RETIRED
from rllib_llm.config.setting import IN_ENV, Setting
from rllib_llm.config.tables.rllib import INSTEAD
from rllib_llm.shared.errors import SettingError, closest, nearest, suggestion

# What others set in their config, and what it is part of here.
ELSEWHERE = {
    "num_train_epochs": "A run ends by its results: stop={'epoch': 3}",
    "total_episodes": "A run ends by its results: stop={'episode': 10000}",
    "max_steps": "A run ends by its results: stop={'training_iteration': 100}",
    "output_dir": "Results go to storage_path, or --storage-path",
    "save_steps": "Checkpoints are Tune's: checkpoint_config={'checkpoint_frequency': 10}",
    "save_total_limit": "Checkpoints are Tune's: checkpoint_config={'num_to_keep': 2}",
    "eval_steps": "Set evaluation_interval, in iterations",
    "eval_strategy": "Set evaluation_interval, in iterations",
    "per_device_eval_batch_size": "Set evaluation_duration, in rows",
    "report_to": "Weights & Biases is switched on with --wandb-project",
    "logging_steps": "Every iteration is logged; leave it out",
    "autocast_dtype": "It is mixed_precision='bf16' now",
    "bf16": "It is mixed_precision='bf16' here",
    "fp16": "Losses are not scaled for float16: use mixed_precision='bf16'",
    "use_vllm": "It is engine='vllm' here",
    "importance_sampling_level": "The ratio of the loss is chosen by policy_loss ('gspo' has the "
    "completion's); of the weights that correct older data it is called 'off_policy_level' here",
}


class UnknownSettingError(SettingError):
    """Names that are no settings; the remedy has what each is called here, or resembles."""


def unknown_settings(
    config_class: ConfigClass, names: Iterable[str], where: str, section: str = ""
) -> UnknownSettingError:
    """Return the error for all of `names` at once.

    Args:
        where: how the message names the place, e.g. "ppo.config" or "PPOPtxConfig.training".
        section: the section that they were given in.
    """
    first, *others = names
    said = [f"unknown key {name!r}. {hint(config_class, str(name), section)}" for name in others]
    return UnknownSettingError(
        f"unknown key {first!r}", name=str(first), where=where, unknown=True,
        remedy=" Also ".join([hint(config_class, str(first), section), *said]),
    )  # fmt: skip


def hint(config_class: ConfigClass, name: str, section: str = "") -> str:
    """Return a sentence on what to write instead of `name`, which was given in a section."""
    known = known_names(config_class)
    for row in section_rows(config_class, section).values():
        if name in row.keys:
            inner = f"{row.in_section}={{'model': ..., {name!r}: ...}}"
            return f"It belongs to the model: write .{section}({inner}), in YAML the same mapping."
    if name in RETIRED and RETIRED[name] in known:
        return f"It is {RETIRED[name]!r} now."
    if name in INSTEAD:
        return f"{INSTEAD[name]}."
    if name in ELSEWHERE:
        return f"{ELSEWHERE[name]}."
    if name in known:
        return f"It is set in .{sections_of(config_class).get(name, 'training')}(...)."
    rows = table(config_class)
    if name in rows and rows[name].place == IN_ENV:
        return f"{_place(config_class, rows[name])}."
    if name in section_names(config_class) and not section:
        return f"It is a section: write `{name}: {{name: value}}`, or .{name}(...)."
    others = other_names(config_class)
    if name in others:
        row = others[name]
        if row.place == IN_ENV:
            return f"It is called {row.name!r} here. {_place(config_class, row)}."
        return f"It is called {row.name!r} here."
    if section and nearest(name, section_rows(config_class, section)):
        return suggestion(name, section_rows(config_class, section))
    return _resembles(name, known, others)


def _place(config_class: ConfigClass, row: Setting) -> str:
    section = sections_of(config_class)[row.name]
    return (
        f"It belongs to the environment: write `{section}: {{{row.in_section}: ...}}`, "
        f".{section}({row.in_section}=...), or env_config"
    )


def _resembles(name: str, known: Iterable[str], others: Mapping[str, Setting]) -> str:
    """Names elsewhere count as well: what resembles TRL's `learning_rate` is our `lr`."""
    return closest(name, {**{other: row.name for other, row in others.items()},
                          **{own: own for own in known}})  # fmt: skip
