"""One experiment, as a pydantic model: what each key may be, and what to say where it is something
else; and what refers to other experiments, `${name.model}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict

from rllib_llm.shared.errors import UserError, suggestion

if TYPE_CHECKING:
    from ray.tune import Trainable

# Keys of other versions of the format -> where the setting lives.
MOVED = {
    "algo": "run",
    "local_dir": "storage_path",
    "checkpoint_freq": "checkpoint_config.checkpoint_frequency",
    "checkpoint_at_end": "checkpoint_config.checkpoint_at_end",
    "keep_checkpoints_num": "checkpoint_config.num_to_keep",
    "checkpoint_score_attr": "checkpoint_config.checkpoint_score_attribute",
    "resources_per_trial": "config.num_cpus_for_main_process, config.num_gpus_per_learner, ...",
}


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise PydanticCustomError("number", "a number")


def _environment(value: Any) -> Any:
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise PydanticCustomError("string_type", "text")


def _interval(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value in (None, "auto") or (is_number and value >= 0):
        return value
    raise PydanticCustomError("interval", "at least 0 seconds, 'auto' or null")


Interval = Annotated[Any, AfterValidator(_interval)]
Number = Annotated[Any, AfterValidator(_number)]
Order = Literal["max", "min"]


class CheckpointConfig(TypedDict, total=False):
    """Arguments of `ray.tune.CheckpointConfig`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    checkpoint_interval_s: Annotated[
        Interval,
        Field(description="the seconds between checkpoints: 300 without checkpoint_frequency"),
    ]
    checkpoint_frequency: Annotated[
        StrictInt, Field(ge=0, description="the iterations between checkpoints; 0: none between")
    ]
    checkpoint_at_end: Annotated[StrictBool, Field(description="whether one is saved at the end")]
    num_to_keep: Annotated[
        Annotated[StrictInt, Field(ge=1)] | None,
        Field(description="how many checkpoints a trial keeps; null: all"),
    ]
    checkpoint_score_attribute: Annotated[
        StrictStr | None, Field(description="the result by which checkpoints are kept")
    ]
    checkpoint_score_order: Annotated[Order, Field(description="which way that result improves")]


class Experiment(BaseModel):
    """One experiment; the fields are the keys that YAML may use, `name` being the key it stands
    under.

    Raises:
        UserError: what cannot be, all of it at once.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    name: StrictStr
    run: StrictStr = Field(description="the algorithm's name or dotted path")
    env: Annotated[Any, AfterValidator(_environment)] = Field(
        None, description="a registered environment's name or a dotted path"
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="the algorithm's settings, with search spaces"
    )
    stop: dict[str, Number] = Field(
        default_factory=dict, description="the results at which a trial ends"
    )
    num_samples: StrictInt = Field(1, ge=1, description="how often the search space is sampled")
    checkpoint_config: CheckpointConfig = Field(
        default_factory=CheckpointConfig,
        description="when checkpoints are saved; one at the end unless it says otherwise",
    )
    storage_path: StrictStr | None = Field(
        None, description="where results go, unless --storage-path says it"
    )
    restore: StrictStr | None = Field(
        None, description="the checkpoint from which the trials start"
    )
    max_failures: StrictInt = Field(
        0, ge=-1, description="how often a failed trial goes on from its last checkpoint"
    )
    time_budget_s: Number | None = Field(
        None, description="the seconds after which the experiment ends"
    )
    metric: StrictStr | None = Field(
        None, description="the result that search and schedulers improve, and by which "
        "`${name.model}` is the best of several trials'"
    )  # fmt: skip
    mode: Order | None = Field(None, description="which way the metric improves")
    scheduler: StrictStr | None = Field(None, description="a Tune scheduler's name: asha, pbt, ...")
    scheduler_config: dict[str, Any] = Field(
        default_factory=dict, description="the scheduler's arguments"
    )
    search_alg: StrictStr | None = Field(None, description="a Tune searcher's name: optuna, ...")
    search_config: dict[str, Any] = Field(
        default_factory=dict, description="the searcher's arguments"
    )
    max_concurrent_trials: StrictInt | None = Field(None, description="how many trials run at once")
    pass_criteria: dict[str, Number] = Field(
        default_factory=dict, description="the least values of the last result that count as a pass"
    )
    description: str = Field("", description="what the experiment does, for readers of the file")

    def __init__(
        self, name: str, run: Any = None, env: Any = None, config: Any = None, **settings: Any
    ):
        given = {"name": name, "run": run, "env": env, "config": config, **settings}
        given = {key: value for key, value in given.items() if value is not None}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise UserError(" ".join(_in_words(name, e) for e in _one_each(error))) from None
        if self.mode and not self.metric:
            raise UserError(
                name=f"{name}.mode",
                value=self.mode,
                rule="come with a metric",
                reason="it says which way the metric improves, and there is none",
                remedy="Write `metric: objective/scores`, or drop it",
            )

    def replace(self, **changes: Any) -> Experiment:
        """Return the experiment with `changes`, checked as a new one."""
        return Experiment(**{**vars(self), **changes})


KEYS = tuple(name for name in Experiment.model_fields if name != "name")

# What a remedy writes.
EXAMPLES = {
    "run": "GRPO", "env": "rllib_llm/RLHF-v0", "stop": 100, "num_samples": 4,
    "metric": "objective/scores", "max_failures": 2, "time_budget_s": 3600, "scheduler": "asha",
    "search_alg": "optuna", "max_concurrent_trials": 2,
}  # fmt: skip
# pydantic's kind of error -> what a value must be.
RULES = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "float_type": "a number",
    "interval": "at least 0 seconds, 'auto' or null",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "number": "a number",
    "string_type": "text",
}


def _one_each(error: ValidationError) -> list[ErrorDetails]:
    """The first complaint about each value: a union has one for every member."""
    found = {_path(details["loc"]): details for details in reversed(error.errors())}
    return list(reversed(found.values()))


def _path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Keys alone, without the members of unions that pydantic puts among them."""
    kept = [str(loc[0]), *(str(part) for part in loc[1:] if loc[0] in _MAPPINGS)]
    return tuple(kept[:2])


_MAPPINGS = ("config", "stop", "checkpoint_config", "scheduler_config", "search_config",
             "pass_criteria")  # fmt: skip


def _in_words(name: str, error: ErrorDetails) -> str:
    path = _path(error["loc"])
    where, kind = ".".join((name, *path)), error["type"]
    if kind == "missing":
        return f"{where} is missing: it names the algorithm. Write `run: PPOPtx`."
    if kind == "extra_forbidden":
        return _unknown(name, path)
    rule = RULES.get(kind)
    if kind == "literal_error":
        rule = str(error["ctx"]["expected"])
    if kind == "greater_than_equal":
        rule = f"at least {error['ctx']['ge']}"
    example = EXAMPLES.get(path[0])
    remedy = f"Write `{path[-1]}: {example}`" if example else "Leave it out for its default"
    if _is_quoted(error["input"]):
        remedy = "Write it without quotes"
    if kind == "dict_type":
        remedy = f"Write `{path[-1]}: {{name: value}}`"
    return f"{where}={error['input']!r} must be {rule or error['msg']}: {_reason(path)}. {remedy}."


def _is_quoted(value: Any) -> bool:
    """Whether `value` is the text of a number, true or false."""
    return isinstance(value, str) and bool(re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?|true|false", value))


def _unknown(name: str, path: tuple[str, ...]) -> str:
    """The error for unknown keys."""
    from rllib_llm.algorithms.language_model_config import LanguageModelConfig

    *parents, key = path
    where = ".".join((name, *parents))
    allowed: Mapping[str, Any] | tuple[str, ...] = KEYS
    if parents:
        allowed = CheckpointConfig.__annotations__
    if key in MOVED and not parents:
        return f"{where}: unknown key {key!r}. It is {MOVED[key]!r} here."
    if not parents and LanguageModelConfig.algorithms_with(key):
        return f"{where}: unknown key {key!r}. It is the algorithm's: write it below `config:`."
    return f"{where}: unknown key {key!r}. {suggestion(key, allowed)}"


def _reason(path: tuple[str, ...]) -> str:
    if path[0] == "checkpoint_config" and len(path) > 1:
        hints = CheckpointConfig.__annotations__
        if path[1] in hints:
            return "it says when checkpoints are saved and which are kept"
    text = Experiment.model_fields[path[0]].description or ""
    asks = text.startswith(("what", "which", "when", "where", "how", "whether"))
    return f"it {'says' if asks else 'is'} {text}"


def algorithm_class(name: str, where: str) -> type[Trainable]:
    """Return the algorithm called `name`: a registered name or a dotted path to a class.

    It is an Algorithm of RLlib, or another Trainable of Tune with a `get_default_config()`.

    Raises:
        UserError: nothing of that name; the message has the nearest ones.
    """
    from ray.tune import Trainable

    from rllib_llm.algorithms.registry import get_algorithm_class

    found = get_algorithm_class(name)
    is_trainable = isinstance(found, type) and issubclass(found, Trainable)
    if not (is_trainable and hasattr(found, "get_default_config")):
        raise UserError(
            name=f"{where}.run",
            value=name,
            rule="be an RLlib Algorithm or another Tune Trainable",
            reason=f"it is {found!r}",
            remedy="Check the path",
        )
    return found


REFERENCE = re.compile(r"\$\{([^}]*)\}")


def fill(experiment: Experiment, lookup: Callable[[str, str], Any]) -> Experiment:
    """Return the experiment with every `${reference}` in it replaced; see `substitute`."""
    return experiment.replace(
        **{
            key: substitute(getattr(experiment, key), lookup, f"{experiment.name}.{key}")
            for key in KEYS
        }
    )


def substitute(value: Any, lookup: Callable[[str, str], Any], where: str) -> Any:
    """Return `value`, every `${reference}` in its strings replaced by `lookup(reference, where)`.

    A string that is nothing but one reference becomes the value itself, whatever its type.
    """
    if isinstance(value, dict):
        return {k: substitute(v, lookup, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [substitute(v, lookup, f"{where}.{i}") for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value
    if whole := REFERENCE.fullmatch(value):
        return lookup(whole[1].strip(), where)
    if "${" in REFERENCE.sub("", value):
        raise UserError(
            name=where, value=value, rule="close every ${ with }", reason="a reference ends there",
            remedy="Write the missing }",
        )  # fmt: skip
    return REFERENCE.sub(lambda match: str(lookup(match[1].strip(), where)), value)


def references(value: Any) -> set[tuple[str, str]]:
    """Return the (experiment name, product) pairs that `value` refers to."""
    found: set[tuple[str, str]] = set()

    def lookup(reference: str, where: str) -> str:
        name, _, product = reference.rpartition(".")
        found.add((name, product))
        return ""

    substitute(value, lookup, "")
    return found


class StandIn(str):
    """The model that an earlier experiment starts from, in place of the one that it will make."""


def with_stand_ins(experiments: list[Experiment]) -> list[Experiment]:
    """Return the experiments with `${name.model}` replaced by the model that `name` starts from.

    Raises:
        UserError: an experiment uses another's result that will not be saved.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    stand_ins: dict[str, Any] = {}
    filled = []
    for experiment in experiments:
        for name, product in references(vars(experiment)):
            if product == "rollouts":
                _check_keeps_rollouts(by_name[name], experiment.name)
            elif by_name[name].checkpoint_config.get("checkpoint_at_end") is False:
                raise UserError(
                    name=f"{name}.checkpoint_config.checkpoint_at_end",
                    value=False,
                    rule="be true",
                    reason=f"{experiment.name!r} uses ${{{name}.{product}}}",
                    remedy="Drop the key",
                )
        config = substitute(
            experiment.config, lambda ref, _: stand_ins.get(ref, f"${{{ref}}}"), experiment.name
        )
        model = model_of(config)
        if isinstance(model, str):
            stand_ins[f"{experiment.name}.model"] = StandIn(model)
        filled.append(experiment.replace(config=config))
    return filled


def _check_keeps_rollouts(experiment: Experiment, user: str) -> None:
    from rllib_llm.algorithms.rlhf import RLHF

    name = experiment.name
    if not issubclass(algorithm_class(experiment.run, name), RLHF):
        raise UserError(
            where=f"{user}",
            name=f"${{{name}.rollouts}}",
            rule="be of an experiment that samples",
            reason=f"{name}.run={experiment.run!r} does not",
            remedy="Name one of GRPO, PPOPtx, ..",
        )
    section = experiment.config.get("rollouts")
    section = section if isinstance(section, dict) else {}
    kept = experiment.config.get("store_rollouts", section.get("store", True))
    if kept is False:
        raise UserError(
            name=f"{name}.config.store_rollouts",
            value=False,
            rule="be true",
            reason=f"{user!r} uses ${{{name}.rollouts}}",
            remedy="Drop the key",
        )


def model_of(config: Mapping[str, Any]) -> Any:
    """The experiment's starting model, wherever its config has it."""
    section = config.get("language_model")
    return config.get("model") or (section.get("model") if isinstance(section, dict) else None)
