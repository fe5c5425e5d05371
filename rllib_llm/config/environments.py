"""Settings of runs with several environments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rllib_llm.config.sampling import Drawn
from rllib_llm.config.sections import table, wrong
from rllib_llm.config.tabled_config import flattened
from rllib_llm.shared.errors import Problem, warning
from rllib_llm.shared.setting import DEFAULT_ENV, Section, Settings, setting, when

SEVERAL = when("envs", "is set", bool, "Set envs, or remove it", ": there is one environment")
# What an environment may have for itself: how its texts are drawn, how many of a prompt, which of
# its groups are learnt from, and from whom.
OF_ENTRIES = {"env", "env_config", "filters", "num_completions", "num_env_runners", "teacher",
              *Drawn.model_fields}  # fmt: skip
NAME = re.compile(r"[A-Za-z][\w.-]*")


class Environments(Settings):
    """Several environments in one run, each with a name: `.environments(math={...}, chat={...})`,
    in YAML `envs: {math: {...}, chat: {...}}`."""

    envs: dict[str, dict[str, Any]] | None = setting(
        None, "the environments by name; None: the one of `env` and its sections",
        note="Each has a `weight` (1), and what an environment's sections take: env, env_config, "
        "prompts, rewards, conversation; also filters, num_completions, max_new_tokens, "
        "min_new_tokens, stop_token_ids, temperature, top_p, top_k, num_env_runners (of the run's "
        "samplers, how many open it) and, with teacher_in='environment', teacher. What it leaves "
        "out is the run's.",
        remedy="Write {math: {weight: 2, prompts: {data: ...}, rewards: {...}}, chat: {...}}",
        also="environments env_list",
    )  # fmt: skip
    mix_by: Literal["groups", "tokens"] = setting(
        "groups", "the unit of the weights of `envs`", note='"groups": of the groups that are '
        'sampled; "tokens": of the tokens that are learnt from.', acts=(SEVERAL,),
    )  # fmt: skip
    env_weights: str | None = setting(
        None, "the function that weighs the environments anew after each update; None: they keep "
        "their weights", note='"difficulty": 4p(1 − p), at least 0.1, of the mean reward p; or the '
        "dotted path of `f(metrics) -> {name: weight}`, or of a class of such functions with "
        "get_state() and set_state(). See `rllib_llm.algorithms.env_weights`.",
        choices=("difficulty",), or_dotted=True, acts=(SEVERAL,),
    )  # fmt: skip
    scale_scores_by: Literal["env", "batch"] = setting(
        "env", "the completions over which scores are scaled and advantages are whitened",
        note='"env": of each environment for itself, so that none with large scores drowns the '
        'others; "batch": of all together.', acts=(SEVERAL,),
    )  # fmt: skip


ENVIRONMENTS = Section.of("environments", Environments)


def entry_config(config: Any, name: str) -> Any:
    """The config of one of several environments, not validated: the run's, with what its entry
    says. One of another `env` begins with an empty `env_config`."""
    entry = config.copy(copy_frozen=False)
    entry.envs, given = None, flattened(type(config), overlay_of(config.envs[name]))
    env = given.get("env") or config.env
    if env in (None, DEFAULT_ENV):  # as sections name theirs
        rows = (table(type(config)).get(key) for key in given.get("env_config", ()))
        env = min((row.env for row in rows if row is not None), default=env)
    if env != config.env:
        entry.env, entry.env_config = env, {}
    entry.update_from_dict(given)
    return entry


def overlay_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an entry of `envs`, without its weight."""
    return {name: value for name, value in entry.items() if name != "weight"}


def has_held_out(entry: Any) -> bool:
    """Whether an environment has prompts for evaluation: of its own, or by its settings."""
    given = entry.env_config
    return given.get("prompts") is None or bool(
        given.get("eval_fraction") or given.get("eval_prompts") is not None
    )


def environment_rules(config: Any) -> Iterator[Problem]:
    """Several environments have names, weights, and no settings that are the whole run's."""
    opened: list[Any] = []  # numbers of samplers of each environment that is sampled; None: all
    if config.envs is not None and not config.envs:
        yield wrong(config, "envs", "a mapping with an environment", "there is nothing to sample")
    for name, entry in (config.envs or {}).items():
        place = f"envs.{name}"
        if not NAME.fullmatch(name):
            yield Problem("the name of one of envs", "be letters, digits and _.-, a letter first",
                          "results are reported as env/<name>/<metric>", "Write math, say", name
                          )  # fmt: skip
        weight = entry.get("weight", 1)
        if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            yield Problem(f"{place}.weight", "be a number of at least 0",
                          "groups are shared out by it", "Write 1", weight)  # fmt: skip
        given = flattened(type(config), overlay_of(entry), place)
        for setting_name in given.keys() - OF_ENTRIES:
            yield Problem(f"{place}.{setting_name}", "be set for the whole run",
                          "all environments share it", "Move it out of envs", given[setting_name]
                          )  # fmt: skip
        if "teacher" in given and config.teacher_in == "learner":
            yield Problem(f"{place}.teacher", "be set for the whole run",
                          "the teacher in the learner is that of all environments",
                          "Set teacher_in='environment'", given["teacher"])  # fmt: skip
        for most in ("max_new_tokens", "num_completions"):
            if (number := given.get(most, 0)) > (of_run := getattr(config, most)):
                yield Problem(f"{place}.{most}", f"be at most the run's {most}={of_run}",
                              "memory, losses and the ids of rows count on it",
                              f"Set {most}: {number} for the run", number)  # fmt: skip
        compares = (config.ref_kl_coeff and config.ref_kl_estimator == "full") or (
            config.distill_coeff and config.distill_loss == "divergence"
        )
        if compares and given.get("temperature", config.temperature) != config.temperature:
            yield Problem(f"{place}.temperature", f"be the run's temperature={config.temperature}",
                          "whole distributions are compared, at one temperature for all",
                          "Leave it out, or set another ref_kl_estimator or distill_loss",
                          given["temperature"])  # fmt: skip
        num = given.get("num_env_runners")
        opened += [num] if weight else []
        if num is not None and not config.in_evaluation:
            if not config.num_env_runners or not weight:
                why = "the sampler of this process opens all" if weight else "none opens it"
                at = "num_env_runners=0" if weight else "weight=0"
                yield warning(f"{place}.num_env_runners", f"be left out with {at}", why, "", num)
            elif type(num) is not int or not 0 < num <= config.num_env_runners:
                yield Problem(f"{place}.num_env_runners", f"be 1 to {config.num_env_runners}, the "
                              "run's num_env_runners", "so many of its samplers open it",
                              f"Write {config.num_env_runners}", num)  # fmt: skip
    if opened and all(isinstance(num, int) for num in opened) and not config.in_evaluation and (
        sum(opened) < config.num_env_runners
    ):
        yield wrong(config, "num_env_runners", f"at most {sum(opened)}, of which envs speak",
                    "the others would open no environment", f"Use {sum(opened)}")  # fmt: skip
    weights = [entry.get("weight", 1) for entry in (config.envs or {}).values()]
    if weights and all(weight == 0 for weight in weights):
        yield wrong(config, "envs", "such that a weight is above 0", "nothing would be sampled")
    if config.evaluation_interval and config.envs and not config.in_evaluation and not any(
        has_held_out(entry_config(config, name)) for name in config.envs
    ):
        yield wrong(config, "evaluation_interval", "left out", "no environment has held-out "
                    "prompts", "Set prompts: {eval_fraction: 0.1} in one of envs")  # fmt: skip
    if config.envs:  # without sections, as `env_config` is kept, whose paths are found later
        config.envs = {n: flattened(type(config), entry) for n, entry in config.envs.items()}
