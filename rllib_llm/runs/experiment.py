"""One experiment of a YAML file, as a pydantic model: what each key may be, and what to say where
it is something else."""

from __future__ import annotations

from collections.abc import Mapping
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
    if isinstance(value, int | float):
        return value
    raise PydanticCustomError("number", "a number")


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
        StrictInt | None, Field(description="how many checkpoints a trial keeps; null: all")
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
    env: Any = Field(None, description="a registered environment's name or a dotted path")
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

    def replace(self, **changes: Any) -> Experiment:
        """Return the experiment with `changes`, checked as a new one."""
        return Experiment(**{**vars(self), **changes})


KEYS = tuple(name for name in Experiment.model_fields if name != "name")

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
    remedy = "Write it without quotes" if isinstance(error["input"], str) else "Change it"
    if kind == "dict_type":
        remedy = f"Write `{path[-1]}: {{name: value}}`"
    return f"{where}={error['input']!r} must be {rule or error['msg']}: {_reason(path)}. {remedy}."


def _unknown(name: str, path: tuple[str, ...]) -> str:
    """The error for unknown keys."""
    *parents, key = path
    where = ".".join((name, *parents))
    allowed: Mapping[str, Any] | tuple[str, ...] = KEYS
    if parents:
        allowed = CheckpointConfig.__annotations__
    if key in MOVED and not parents:
        return f"{where}: unknown key {key!r}. It is {MOVED[key]!r} here."
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
