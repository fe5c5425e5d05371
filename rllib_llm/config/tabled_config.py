"""An `AlgorithmConfig` whose settings are declared in tables, see `setting.py`; what it says of
unknown ones."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray.rllib.algorithms.algorithm_config import (
    DEPRECATED_VALUE,
    AlgorithmConfig,
    NotProvided,
)
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils import force_list
from ray.tune.result import TRIAL_INFO

from rllib_llm.config.rllib import COMMON, INSTEAD, ONLINE, READ_ONLY, RENAMED, RETIRED
from rllib_llm.config.sections import (
    ConfigClass,
    Rule,
    SectionMethod,
    defaults,
    first_setting,
    given,
    known_names,
    no_effect,
    other_names,
    positional,
    rllib_parameters,
    rllib_table,
    row_called,
    same,
    section_names,
    section_rows,
    sections_of,
    table,
)
from rllib_llm.envs.settings import ENV_SETTINGS
from rllib_llm.shared.errors import (
    Problem,
    Problems,
    closest,
    errors_of,
    nearest,
    problems_in,
    report,
    suggestion,
    unknown_key,
)
from rllib_llm.shared.setting import IN_CONFIG, IN_ENV, Section, Setting, plain


class UnknownAttributeError(AttributeError):
    """A name that a config does not have. What resembles it is looked up when it is printed:
    `hasattr` asks often, and of configs that are still being made."""

    def __init__(self, config_class: ConfigClass, attribute: str):
        super().__init__(config_class, attribute)

    def __str__(self) -> str:
        config_class, attribute = self.args
        methods = [name for name in dir(config_class) if not name.startswith("_")]
        remedy = hint(config_class, attribute, methods=methods)
        return f"{config_class.__name__} has no attribute {attribute!r}. {remedy}"


def unknown_settings(
    config_class: ConfigClass, names: Iterable[str], where: str, section: str = ""
) -> list[Problem]:
    """The problems of `names` that are no settings, given in `section`; `where`: their place, e.g.
    "ppo.config"."""
    return [
        unknown_key(where, name, (), hint(config_class, str(name), section)) for name in names
    ]


def hint(
    config_class: ConfigClass, name: str, section: str = "", methods: Iterable[str] = ()
) -> str:
    """Return a sentence on what to write instead of `name`, which was given in a section;
    `methods` may be meant as well."""
    known = known_names(config_class)
    for row in section_rows(config_class, section).values():
        if name in row.keys:
            inner = f"{row.in_section}={{'model': ..., {name!r}: ...}}"
            return f"It belongs to the model: write .{section}({inner}), in YAML the same mapping."
    if name in RETIRED and RETIRED[name] in known:
        return f"It is {RETIRED[name]!r} now."
    if name in INSTEAD:
        return f"{INSTEAD[name]}."
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
    if name == "prompts" and "data" in known:
        return "It trains on the rows of a file, without prompts of its own: write `data: FILE`."
    found = config_class.algorithms_with(name)
    if found and name not in section_names(config_class):
        many = f"{', '.join(found[:-1])} and {found[-1]}"
        return f"It is for {many if found[1:] else f'{found[0]} alone'}: leave it out."
    if section and nearest(name, section_rows(config_class, section)):
        return suggestion(name, section_rows(config_class, section))
    own = section_rows(config_class, section) if section else {}
    if 0 < len(own) <= FEW and not nearest(name, {*known, *others}, cutoff=0.8):
        return suggestion(name, [row.in_section for row in own.values()])
    if methods and not nearest(name, {*known, *methods, *others}):
        return f"Its sections are {', '.join(section_names(config_class))}."
    # Names elsewhere count as well: what resembles TRL's `learning_rate` is our `lr`.
    called = {other: row.name for other, row in others.items()}
    sections = () if section else section_names(config_class)
    return closest(name, {**called, **{own: own for own in {*known, *methods, *sections}}})


def _place(config_class: ConfigClass, row: Setting) -> str:
    section = sections_of(config_class)[row.name]
    return (
        f"It belongs to the environment: write `{section}: {{{row.in_section}: ...}}`, "
        f".{section}({row.in_section}=...), or env_config"
    )


FEW = 10  # settings of a section, of which all are named
OWN_ENVS = "rllib_llm/"  # what the names of environments of this package begin with
RLLIB_KEYS = {"class", "multiagent", "_enable_new_api_stack", TRIAL_INFO}  # beside its attributes


class TabledConfig(AlgorithmConfig):
    """Subclasses name their `sections`; each setting is then an attribute, an argument of its
    section's method and a key of `update_from_dict`, and is checked by `problems`."""

    sections: tuple[Section, ...] = ()
    rllib_sections: tuple[Section, ...] = COMMON
    env: Any
    env_config: dict[str, Any]
    ignored_settings: tuple[str, ...] = ()  # of a base class, which this algorithm does not use
    pretrained_model: str | None
    why_a_model = "the policy starts from pretrained weights"
    rules: tuple[Rule, ...] = ()  # what must hold between settings; a subclass adds its own

    learners = SectionMethod()
    training = SectionMethod()
    framework = SectionMethod()
    evaluation = SectionMethod()
    resources = SectionMethod()
    reporting = SectionMethod()
    debugging = SectionMethod()
    fault_tolerance = SectionMethod()
    environment = SectionMethod()
    env_runners = SectionMethod()
    rl_module = SectionMethod()

    def __new__(cls, *args: Any, **kwargs: Any):
        """Refuses settings as arguments, and names the method that takes them."""
        if args and not inspect.isclass(args[0]) and args[0] is not None:
            remedy = "Write {}().update_from_dict({{...}})"
            if isinstance(args[0], str):
                remedy = "For a model write {}().language_model(model={!r})"
            raise Problems(
                f"{cls.__name__}({args[0]!r}) takes no settings",
                remedy=remedy.format(cls.__name__, args[0]),
            )  # fmt: skip
        taken = inspect.signature(cls.__init__).parameters
        if unknown := [name for name in kwargs if name not in taken]:
            raise Problems(unknown_settings(cls, unknown, f"{cls.__name__}(...)"))
        return super().__new__(cls)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise UnknownAttributeError(type(self), name)

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        for row in table(type(self)).values():
            if row.place == IN_CONFIG:
                setattr(self, row.attribute or row.name, row.default)

    def set_section(self, section: str, args: tuple[Any, ...], given: Mapping[str, Any]):
        """Sets the settings of a section, RLlib's own through RLlib's method.

        Raises:
            Problems: names that are no settings of the section, all at once.
        """
        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        unknown = []
        of_rllib = rllib_parameters(section)
        if args:
            first = first_setting(type(self), section)
            is_named = of_rllib and first not in positional(of_rllib)
            if len(args) > 1 or first in given or is_named:
                one = "" if is_named else f"one value without a name, which is {first!r}, or "
                raise TypeError(
                    f"{type(self).__name__}.{section}() takes {one}settings by name: write "
                    f"{section}({first}=...)."
                )
            given = {first: args[0], **given}
        for name, value in given.items():
            # A language model's name; RLlib's `training(model={...})` describes a network.
            is_model = name == "model" and not isinstance(value, Mapping)
            row = row_called(type(self), section, name)
            if value is NotProvided:
                continue
            if row is not None and table(type(self)).get(row.name) is row:
                ours[row.name] = value
            elif name in of_rllib and name not in RETIRED and not is_model:
                theirs[name] = value
            else:
                unknown.append(name)
        if unknown:
            where = f"{type(self).__name__}.{section}(...)"
            raise Problems(unknown_settings(type(self), unknown, where, section))
        if theirs:
            getattr(AlgorithmConfig, section)(self, **theirs)
        for name, value in {**self.implied(ours), **ours}.items():
            row = table(type(self))[name]
            if row.place == IN_CONFIG:
                setattr(self, row.attribute or row.name, value)
                continue
            self.env_config = {**self.env_config, row.name: value}
            if self.env is None:
                self.env = row.env
        return self

    @classmethod
    def algorithms_with(cls, name: str) -> list[str]:
        """The algorithms of this package that have this setting or section."""
        return []

    def implied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that follow from `given` where they are not in it themselves."""
        return {}

    def update_from_dict(self, config_dict: dict[str, Any]):
        """As RLlib's; sections may be mappings of their own, and unknown keys are refused.

        Raises:
            Problems: keys that are no settings, all at once.
        """
        given = flattened(type(self), config_dict)
        unknown = [key for key in given if not self._takes(key)]
        if unknown:
            raise Problems(unknown_settings(type(self), unknown, type(self).__name__))
        given = {**self.implied(given), **given}
        if "model" in given and not isinstance(given["model"], dict):
            given["pretrained_model"] = given.pop("model")
        super().update_from_dict(
            {RENAMED[key] if key in READ_ONLY else key: value for key, value in given.items()}
        )
        self.env = self.env or needed_env(type(self), config_dict)
        return self

    def to_dict(self) -> dict[str, Any]:
        """As RLlib's, without defaults, so that Tune, which takes a config as this dict, prints,
        logs and stores only what was set, as for YAML files."""
        with self.copies():
            settings = super().to_dict()
        untouched = AlgorithmConfig.to_dict(type(self)())
        return {
            key: value
            for key, value in settings.items()
            if key not in untouched or not same(value, untouched[key])
        }

    def serialize(self) -> dict[str, Any]:
        """As RLlib's, of all settings."""
        return self._serialize_dict(AlgorithmConfig.to_dict(self))

    @contextlib.contextmanager
    def copies(self) -> Iterator[None]:
        """Turns the RecursionError of a copy of the settings into an error that names the one which
        is nested deeper than Python copies."""
        try:
            yield
        except RecursionError as error:
            raise Problems(
                _not_copied(vars(self)), "hold values that Python can copy",
                "something in it, such as a row, is nested too deep",
                "Write the rows to a file and name that",
            ) from error  # fmt: skip

    def given_model(self) -> str:
        """`model`, which must be set.

        Raises:
            ValueError: it is not.
        """
        return given(
            self.pretrained_model, "model",
            "a Hugging Face folder, a hub id or the dotted path of a function", self.why_a_model,
            "Set model: in YAML or --config '{model: ...}', or .language_model(model=...)",
        )  # fmt: skip

    def _takes(self, key: str) -> bool:
        if not isinstance(key, str) or key in RETIRED:
            return False
        attribute = self._translate_special_keys(key, warn_deprecated=False)
        known = key in known_names(type(self)) or key in RLLIB_KEYS
        return known or attribute in vars(self) or attribute.startswith("_")

    def table_problems(self) -> Iterator[Problem]:
        """Problems of the type and range of every setting in the table, and of those of RLlib which
        act on nothing here and were changed."""
        for row in (*table(type(self)).values(), *rllib_table(type(self)).values()):
            if row.place == IN_CONFIG:
                value = row.value(self)
                if (found := row.problem(value, defaults(type(self)))) is not None:
                    yield found
                if plain(value) is not value:  # a scalar of numpy, which RLlib would not take
                    setattr(self, row.attribute or row.name, plain(value))
        yield from _env_problems(self.env_config, self.env)
        yield from _inert(self)
        known = vars(type(self)()).keys() | RLLIB_KEYS
        unread = [name for name in vars(self).keys() - known if not name.startswith("_")]
        for stranger in unknown_settings(type(self), unread, type(self).__name__):
            reason = "set as an attribute it has no effect"
            yield replace(stranger, reason=reason, severity="warning")
        overlays = {"evaluation_config": self.evaluation_config}
        for setting in ("eval_envs", "envs"):
            named = getattr(self, setting, None)
            for name, overlay in named.items() if isinstance(named, Mapping) else ():
                if setting == "envs" and isinstance(overlay, Mapping):
                    overlay = {key: value for key, value in overlay.items() if key != "weight"}
                overlays[f"{setting}.{name}"] = overlay
        for place, overlay in overlays.items():
            if isinstance(overlay, Mapping):
                yield from self._overlay_problems(overlay, place)
            elif place != "evaluation_config":  # which is checked as a row
                name = place.partition(".")[2]
                yield Problem(
                    place, "be a mapping", "it says in what an environment differs from training's",
                    f"Write `{name}: {{env_config: {{prompts: ...}}}}`", overlay,
                )  # fmt: skip

    def problems(self) -> list[Problem]:
        """Errors and warnings: types and ranges, RLlib's own checks, then what must hold
        between settings."""
        found = [*self.table_problems()]
        refused = {problem.name for problem in errors_of(found)}
        self._settle()
        if not refused:
            found += problems_in(self._check_by_rllib)
        for rule in self.rules:
            own: list[Problem] = []
            try:  # of a subclass that overrides it
                problems_in(getattr(type(self), rule.__name__, rule), self, into=own)
            except Exception:
                if not errors_of([*found, *own]):  # else a consequence
                    raise
            found += [p for p in own if p.name not in refused and (p.rule or not refused)]
        if not errors_of(found) and not self.in_evaluation:  # training's config says it
            found += no_effect(self)
        return found

    def validate(self) -> None:
        """Checks every setting that can be checked without loading a model; warns of those that
        have no effect.

        Raises:
            Problems: all that is wrong.
        """
        report(self.problems())

    def _settle(self) -> None:
        """Completes settings whose types are right by others."""

    def _check_by_rllib(self) -> None:
        """Runs RLlib's own checks."""

    def _overlay_problems(self, overlay: Mapping[str, Any], place: str) -> Iterator[Problem]:
        """Problems of what evaluation has otherwise; `place`: "evaluation_config", say."""
        found: list[Problem] = []
        given = flattened(type(self), overlay, place, found)
        yield from found
        unknown = [key for key in given if not self._takes(key)]
        yield from unknown_settings(type(self), unknown, place)
        for row in (*table(type(self)).values(), *rllib_table(type(self)).values()):
            is_given = row.place == IN_CONFIG and row.name in given
            if is_given and (wrong := row.problem(given[row.name], defaults(type(self)), place)):
                yield wrong
        yield from _env_problems(given.get("env_config"), given.get("env", self.env), place)


def _env_problems(env_config: Any, env: Any, place: str = "") -> Iterator[Problem]:
    """Problems of the settings that environments of this package have in common."""
    if isinstance(env_config, Mapping) and str(env).startswith(OWN_ENVS):
        for name in filter(ENV_SETTINGS.__contains__, env_config):
            if (found := ENV_SETTINGS[name].problem(env_config[name], place=place)) is not None:
                yield found


def flattened(
    config_class: ConfigClass, settings: Mapping[str, Any], place: str = "",
    found: list[Problem] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """`settings`, the mappings that stand under the name of a section dissolved into it; `place`:
    the setting that they are the value of, if any. Problems are added to `found`, if given.

    Raises:
        Problems: keys of sections that are none of their settings, one given twice.
    """
    flat: dict[str, Any] = {}
    env: dict[str, Any] = {}
    problems: list[Problem] = []

    def add(to: dict[str, Any], name: str, value: Any, path: str) -> None:
        if name in to:
            why = f"{name}={to[name]!r} is given as well"
            problems.append(
                Problem(path, "be the only one", why, "Leave one of them out", value).within(place)
            )
        to.setdefault(name, value)

    for key, value in settings.items():
        is_section = key in section_names(config_class)
        is_setting = key in known_names(config_class) and key != "env_config"
        is_mapping = isinstance(value, Mapping)
        if (is_section or key == "env_config") and not is_setting and not is_mapping:
            first = first_setting(config_class, key) if is_section else "prompts"
            remedy = f"Write `{key}: {{{first}: ...}}`"
            found_here = Problem(key, "be a mapping", "it is a section of settings", remedy, value)
            problems.append(found_here.within(place))
        elif not is_section or not is_mapping:
            add(flat, key, value, key)
        else:
            for name, item in value.items():
                row = row_called(config_class, key, name)
                if row is not None:
                    add(env if row.place == IN_ENV else flat, row.name, item, f"{key}.{name}")
                else:
                    (unknown,) = unknown_settings(config_class, [name], key, key)
                    problems.append(unknown.within(place))
    if env:
        given = flat.get("env_config", {})
        for name, value in given.items() if isinstance(given, Mapping) else ():
            add(env, name, value, f"env_config.{name}")
        if isinstance(given, Mapping):
            flat["env_config"] = env
    if problems and found is None:
        raise Problems(problems)
    if found is not None:
        found += problems
    return flat


def needed_env(config_class: ConfigClass, settings: Mapping[str, Any]) -> str | None:
    """The environment that a section in `settings` has something of; None: it needs none."""
    envs = {
        row.env
        for key, value in settings.items()
        if key in section_names(config_class) and isinstance(value, Mapping)
        for name in value
        if (row := row_called(config_class, key, name)) is not None and row.place == IN_ENV
    }
    return min(envs, default=None)  # a conversation has prompts and rewards as well


# Of RLlib's attributes, those it changes by itself, or whose values cannot be compared.
_ITS_OWN = {"observation_space", "action_space", "policies", "policy_mapping_fn",
            "policies_to_train", "stats_cls_lookup", "algo_class", "in_evaluation", "local_gpu_idx",
            "worker_index", "off_policy_estimation_methods", "input_config"}  # fmt: skip
# What only RLlib's own samplers and updates would read, set by names without the underscore and
# in `experimental`.
_CONNECTORS = {"_env_to_module_connector", "_module_to_env_connector", "_learner_connector"}
_UNREAD = {"_torch_lr_scheduler_classes", "_torch_grad_scaler_class", *_CONNECTORS}
_CHANGED_FOR_EVALUATION = {"batch_mode", "rollout_fragment_length", "num_env_runners"}


def _inert(config: TabledConfig) -> Iterator[Problem]:
    """Settings of RLlib that were changed and act on nothing here."""
    acting = {
        row.attribute or row.name
        for row in (*table(type(config)).values(), *rllib_table(type(config)).values())
    }
    skipped = _ITS_OWN | acting | (_CHANGED_FOR_EVALUATION if config.in_evaluation else set())
    untouched = type(config)()
    names = [
        name
        for name, value in vars(AlgorithmConfig()).items()
        if name not in skipped
        and (not name.startswith("_") or name in _UNREAD)
        and not (isinstance(value, int) and value == DEPRECATED_VALUE)
        and not same(getattr(config, name), getattr(untouched, name))
    ]
    names += ["policies"] if config.is_multi_agent else []
    algorithm = type(config).__name__.removesuffix("Config")
    for name in names:
        default, called = repr(getattr(untouched, name)), name
        if name in _CONNECTORS:
            called = name.removeprefix("_")
        yield Problem(
            called, f"be left at {default}" if len(default) < 40 else "be left out",
            f"it is a setting of RLlib that acts on nothing in {algorithm}",
            INSTEAD.get(called, "Leave it out"), getattr(config, name),
        )  # fmt: skip
    if not config.in_evaluation:
        yield from _uncalled(config, acting)


def _uncalled(config: TabledConfig, acting: Iterable[str]) -> Iterator[Problem]:
    """Methods of callbacks classes that nothing calls here: warnings where other stages do."""
    elsewhere = {row.name for section in ONLINE for row in section.settings}
    for cls in filter(inspect.isclass, force_list(config.callbacks_class)):
        for name, unused in inspect.getmembers(RLlibCallback, inspect.isfunction):
            event = f"callbacks_{name}"
            if name.startswith("on_") and event not in acting and getattr(cls, name) is not unused:
                yield Problem(
                    "callbacks", f"have no {name}",
                    f"nothing calls it in {type(config).__name__.removesuffix('Config')}",
                    INSTEAD.get(name, "Leave it out"), cls,
                    "warning" if event in elsewhere else "error",
                )  # fmt: skip


def _not_copied(values: Mapping[str, Any]) -> str:
    """The path of the first value that is nested too deep to be copied."""
    for name, value in values.items():
        try:
            copy.deepcopy(value)
        except RecursionError:
            return f"{name}.{_not_copied(value)}" if name == IN_ENV else name
    return "config"
