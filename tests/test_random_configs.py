"""Random settings of every algorithm: a config is refused with a remedy, or trains; a restored run
repeats the rest bit for bit; a setting that is said to have no effect has none."""

from __future__ import annotations

import functools
import math
import random
import warnings
from typing import Any

import pytest

from rllib_llm.algorithms.reinforce_pp import ReinforcePPConfig
from rllib_llm.config.schema import flat_settings, sound_settings
from rllib_llm.config.sections import defaults, table
from rllib_llm.shared.errors import Problems, SettingWarning, report
from rllib_llm.shared.setting import IN_CONFIG, Setting
from tests.algorithms import tiny_runs as tiny

MAKE = {
    "PPOPtx": tiny.ppo, "GRPO": tiny.grpo, "RLOO": tiny.rloo, "SFT": tiny.sft,
    "RewardModel": tiny.reward_model, "DPO": tiny.dpo,
    "ReinforcePP": lambda: tiny._rlhf(ReinforcePPConfig()),
}  # fmt: skip
SECTIONS = ("language_model", "training", "sampling", "streaming", "rollouts", "replay", "rewards",
            "reference", "weights")  # fmt: skip
GIVEN: dict[str, list[Any]] = {
    "lora": [{"r": 2}, {"r": 4, "dropout": 0.1}, {"r": 2, "target_modules": ["q_proj", "v_proj"]}],
    "ptx_data": [tiny.TEXTS],
    "filters": [["reward_spread"], [{"name": "length", "most": 100}], ["distinct"]],
    "stop_token_ids": [[3, 4], []],
    "grad_clip": [None, 0.01],
    "lr_num_updates": [5, 50],
    "micro_batch_tokens": [None, 1, 16, 64],
    "train_batch_size_per_learner": [3, 6, 12, 24, 36],
    "quantization": ["int8"],  # the weights of these models have less than a block of nf4
    "pass_at": [[1]],
    "train_vision": [False],  # these models see nothing
}
# Other processes, devices and machines; names of files; what a check of its own holds to.
LEFT_OUT = {"engine", "generate_function", "eval_envs", "weights_transport", "weights_name",
            "serve", "weights_push", "cuda_graphs", "attn_implementation", "refused_batch_dir",
            "model", "data", "learner_class", "lr"}  # fmt: skip
NUMBERS = (0, 1, 2, 3, 5, 0.01, 0.1, 0.5, 1.5)
NEED: dict[str, dict[str, Any]] = {
    "max_staleness": {"off_policy": "decoupled"},
    "oversample": {"off_policy": "decoupled"},
    "oversample_keep": {"oversample": 1.5},
    "weights_publish_every": {"off_policy": "decoupled"},
    "replay_groups": {"off_policy": "decoupled"},
    "rejection": {"off_policy": "decoupled", "rejection_upper": 0.5},
    "lr_schedule": {"lr_num_updates": 6},
    "quantization": {"lora": {"r": 2}},
    "ptx_coeff": {"ptx_data": tiny.TEXTS},
}


def values(row: Setting) -> list[Any]:
    """Some that the setting may have, other than its default."""
    if row.name in GIVEN:
        return GIVEN[row.name]
    if row.choices:
        found: list[Any] = [*row.choices]
    elif row.type is bool:
        found = [True, False]
    else:
        found = [number for number in NUMBERS if row.problem(number) is None]
    return [value for value in found if value != row.default]


@functools.cache
def rows_of(algorithm: str) -> dict[str, Setting]:
    """The settings of the algorithm that are drawn, by name."""
    return {
        row.name: row
        for section in type(MAKE[algorithm]()).sections
        if section.name in SECTIONS
        for row in section.settings
        if row.place == IN_CONFIG and row.name not in LEFT_OUT and values(row)
    }


def drawn(seed: int) -> tuple[str, dict[str, Any]]:
    """An algorithm and some of its settings."""
    source = random.Random(seed)
    algorithm = source.choice(sorted(MAKE))
    rows, known = rows_of(algorithm), table(type(MAKE[algorithm]()))
    names = source.sample(sorted(rows), source.choice([2, 3, 4, 6]))
    settings: dict[str, Any] = {}
    for name in names:
        settings |= NEED.get(name, {})
    settings |= {name: source.choice(values(rows[name])) for name in names}
    return algorithm, {name: settings[name] for name in settings if name in known}


def made(algorithm: str, settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """The config, checked, and the names of settings that it warns have no effect."""
    config = MAKE[algorithm]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        flat = flat_settings(config, settings)
        right, found = sound_settings(config, flat)
        report(found)
        config = config.update_from_dict(right)
        config.validate()
    found = [w.message.problem for w in said if isinstance(w.message, SettingWarning)]
    return config, [each.name for each in found if not each.rule and each.name in settings]


def run(config: Any, num_iterations: int, save: str = "", restore: str = "") -> tuple[Any, Any]:
    """What was learnt in each iteration, and the weights; saved after the first."""
    with tiny.built(config) as algorithm:
        if restore:
            algorithm.restore_from_path(restore)
        learnt = tiny.train(algorithm, 1)
        if save:
            algorithm.save_to_path(save)
        return [*learnt, *tiny.train(algorithm, num_iterations - 1)], tiny.weights(algorithm)


def assert_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert repr(one[0]) == repr(other[0])  # NaN stands where nothing was measured
    whole = [
        {name: tensor.dequantize() if hasattr(tensor, "qdata") else tensor
         for name, tensor in weights.items()}
        for weights in (one[1], other[1])
    ]  # fmt: skip
    tiny.assert_same_weights(*whole)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_random_settings_are_refused_or_resumed_bit_for_bit(seed: int, tmp_path):
    algorithm, settings = drawn(seed)
    try:
        config, idle = made(algorithm, settings)
    except Problems as error:
        for each in error.found:
            assert each.remedy or not each.rule, (settings, str(each))
        return
    whole = run(config, 3, save=str(tmp_path / "checkpoint"))
    if settings.get("schedule") == "free" and config.streams:
        return  # time decides which weights sample
    learnt, weights = run(made(algorithm, settings)[0], 2, restore=str(tmp_path / "checkpoint"))
    assert_same((whole[0][1:], whole[1]), (learnt, weights))
    if idle:
        rest = {name: value for name, value in settings.items() if name not in idle}
        assert_same(run(made(algorithm, rest)[0], 3), whole)


def test_settings_are_drawn_that_may_be():
    """Each row's values are those that its own check takes, and finite numbers."""
    for seed in range(200):
        algorithm, settings = drawn(seed)
        config = defaults(type(MAKE[algorithm]()))
        for name, value in settings.items():
            assert table(type(config))[name].problem(value) is None, name
            assert not isinstance(value, float) or math.isfinite(value)
