"""YAML files as `rllib train file` reads them: experiments in the order in which they run.

    sft:                        # name of the experiment (stage)
      run: SFT                  # algorithm: ours, RLlib's, or a dotted path
      env: ...                  # environment, where the algorithm wants one
      stop: {training_iteration: 30}
      config: {model: ..., lr: 1e-3}
      checkpoint_config: {checkpoint_frequency: 10, num_to_keep: 2}
    ppo:
      run: PPOPtx
      config:
        model: ${sft.model}     # the Hugging Face folder that `sft` made
        lr: {grid_search: [1e-5, 1e-4]}

`${name.model}`, `${name.checkpoint}` and `${name.rollouts}` refer to an earlier experiment,
`${vars.name}` to an entry of the top-level mapping `vars`, `${here}` to the folder of the file.
Relative paths are relative to the folder in which the command runs. `include: other.yaml` puts what
another file says first.

Reading is strict. The experiments of included files come first, in their order. What this file says
under the same name is laid over them, key by key; an experiment that it sets to null is left out.
`--set` is laid over all of it.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import rllib_llm
from rllib_llm.runs.experiments import (
    KEYS,
    Experiment,
    algorithm_class,
    references,
    substitute,
)
from rllib_llm.shared.errors import (
    Problem,
    Problems,
    closest,
    nearest,
    report,
    require,
    unknown_key,
)
from rllib_llm.shared.setting import LISTS, SAMPLERS
from rllib_llm.shared.strict_yaml import read_text, yaml_error


def parse(text: str, where: str) -> Any:
    """Return the value of the YAML (or JSON) `text`.

    Raises:
        Problems: `text` is not YAML; the message shows the line that is probably wrong.
    """
    try:
        return read_text(text)
    except yaml.YAMLError as error:
        raise yaml_error(error, text, where) from error


MAX_BYTES = 256 * 1024  # of a file; PyYAML takes seconds for that much
_NO_EXPERIMENTS = (".py", ".csv", ".tsv", ".jsonl", ".parquet", ".txt", ".md", ".safetensors")


def read(path: Path) -> Any:
    """Return the contents of the YAML file at `path`.

    Raises:
        Problems: no such file, or not YAML.
    """
    if not path.is_file():
        there = sorted(path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = nearest(path.name, [file.name for file in there], 1)
        files = f"Files there: {', '.join(map(str, there[:8]))}."
        hint = files if there else "`rllib example list` names ready ones."
        hint = f"Did you mean {str(path.parent / near[0])!r}?" if near else hint
        raise Problems("file", "be a YAML file", "there is none", hint, str(path))
    require(path.suffix.lower() not in _NO_EXPERIMENTS, "file", str(path),
            "be a YAML file of experiments", f"it ends in {path.suffix}",
            "Name the YAML file; a module's functions are named in it, and data as prompts: {data: "
            "...}")  # fmt: skip
    require(path.stat().st_size <= MAX_BYTES, "file", str(path),
            f"be at most {MAX_BYTES // 1024} KiB", "it holds settings of experiments",
            "Rows of data go into files of their own, which it names")  # fmt: skip
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Problems(
            "file", "be text in UTF-8", f"byte {error.start} is 0x{error.object[error.start]:02x}",
            "Save it as UTF-8", str(path),
        ) from error  # fmt: skip
    return parse(text, str(path))


def parse_mapping(text: str, option: str) -> dict[str, Any]:
    """Return an option's value as a mapping: JSON, YAML, or a file with either.

    Raises:
        Problems: it is something else.
    """
    value = read(Path(text)) if text.endswith((".yaml", ".yml", ".json")) else parse(text, option)
    if value is None:
        return {}
    require(isinstance(value, dict), option, text, "be a mapping", f"it is {type(value).__name__}",
            f"Write it as JSON: {option} '{{\"name\": value}}'")  # fmt: skip
    return value


def examples_folder() -> Path:
    """Return the examples' folder: inside an installed package, or next to it in a checkout."""
    package = Path(rllib_llm.__file__).resolve().parent
    inside = package / "tuned_examples"
    return inside if inside.is_dir() else package.parent / "tuned_examples"


def with_includes(
    data: dict[str, Any], source: str, here: Path | None, inside: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return `data`, a parsed file, laid over the files that it includes.

    Args:
        source: the file's name for errors.
        here: its folder; included files are looked for there, then among the examples.
        inside: the files that include this one.

    Raises:
        Problems: no such file, or one that includes itself.
    """
    data = dict(data)
    names = data.pop("include", None) or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        why, remedy = "they are read before this one", "Write `include: other.yaml`"
        raise Problems(f"{source}: include", "be a file or a list of files", why, remedy, names)
    if not names:
        return data
    merged: dict[str, Any] = {}
    for name in names:
        # Next to the including one, else the example of that name.
        path, example = ((here or Path()) / name).resolve(), examples_folder() / name
        path = example.resolve() if not path.is_file() and example.is_file() else path
        if path in inside:
            rule, remedy = f"not lead back to {path.name}", "Take one of the two out"
            raise Problems(f"{source}: include", rule, "it would never end", remedy, name)
        folder = str(path.parent)  # that ${here} means in it

        def lookup(ref: str, _: str, folder: str = folder) -> str:
            return folder if ref == "here" else f"${{{ref}}}"

        included = substitute(read(path), lookup, path.name)
        require(isinstance(included, dict), str(path), ..., "hold experiments",
                f"{source} includes it")  # fmt: skip
        merged = laid_over(merged, with_includes(included, str(path), path.parent, (*inside, path)))
    merged = laid_over(merged, data)
    return {key: value for key, value in merged.items() if value is not None or key == "vars"}


def laid_over(below: Any, above: Any) -> Any:
    """`above` merged over `below` where both are mappings; search spaces are replaced as a
    whole."""
    for one in (below, above):  # search spaces are no mappings here
        if not isinstance(one, dict) or len(one) == 1 and next(iter(one)) in (*SAMPLERS, *LISTS):
            return above
    merged = {key: laid_over(value, above[key]) if key in above else value
              for key, value in below.items()}  # fmt: skip
    return merged | {key: value for key, value in above.items() if key not in below}


HELP = (
    "Change a setting of the file: KEY=VALUE. May be repeated. KEY is a path of names joined by "
    "dots: 'sft.config.lr=1e-3' for the experiment sft, 'config.lr=1e-3' or 'stop.episode=100' for "
    "every experiment, 'vars.data=FILE' for a variable. Settings of the algorithm may leave out "
    "config: 'sft.lr=1e-3'. Without an experiment's name, it is set in each experiment whose "
    "algorithm has it. VALUE is YAML: 1e-3, true, [1, 2], {grid_search: [1, 2]}."
)


def apply_overrides(
    data: dict[str, Any], overrides: tuple[str, ...], source: str
) -> dict[str, Any]:
    """Return a copy of the parsed YAML file `data` with the `--set` texts applied in order.

    Raises:
        Problems: no "=", or a key that fits no experiment.
    """
    data = copy.deepcopy(data)
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = path.strip().split(".")
        require(equals and all(keys), "--set", text, "be KEY=VALUE", "KEY is names joined by dots",
                "Write --set sft.config.lr=1e-3")  # fmt: skip
        _apply(data, keys, parse(value, f"--set {path}"), source)
    return data


def _apply(data: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    experiments = {name: spec for name, spec in data.items() if name != "vars"}
    if keys[0] == "vars":
        if isinstance(known := data.get("vars") or {}, dict):  # else told where the file is read
            names = ", ".join(map(str, known)) or "no `vars` at its top"
            require(len(keys) >= 2 and keys[1] in known, "--set", ".".join(keys),
                    f"name a variable of {source}", f"it has {names}")  # fmt: skip
        _assign(data, keys, value)
        return
    if keys[0] in experiments and len(keys) > 1:
        targets, rest = {keys[0]: experiments[keys[0]]}, keys[1:]
    elif keys[0] in KEYS:
        targets, rest = experiments, keys
    else:  # those whose algorithm has this setting
        targets = {n: spec for n, spec in experiments.items() if keys[0] in _known_settings([spec])}
        rest = keys
        if not targets:
            raise _goes_nowhere(keys, experiments, source)
    if rest[0] not in KEYS:
        rest = ["config", *rest]
    for spec in targets.values():
        if not isinstance(spec, dict):
            continue
        where, config = rest, spec.get("config")
        if rest[0] == "config" and len(rest) == 2 and isinstance(config, dict):
            # The section in which the file has the setting.
            holders = (name for name, held in config.items() if isinstance(held, dict)
                       and name != "env_config" and rest[1] in held)  # fmt: skip
            holder = None if rest[1] in config else next(holders, None)
            where = rest if holder is None else ["config", holder, rest[1]]
        _assign(spec, where, copy.deepcopy(value))


def _goes_nowhere(keys: list[str], experiments: dict[str, Any], source: str) -> Problems:
    """The error of a `--set` that changes nothing."""
    from rllib_llm.config.schema import sections
    from rllib_llm.config.sections import section_rows

    name, first, specs = keys[0], next(iter(experiments), "NAME"), [*experiments.values()]
    if name in experiments:
        remedy = f"Write --set {name}.lr=1e-3"
        return Problems("--set", "name a setting of the experiment", "", remedy, name)
    # Names inside the sections of the algorithms, and inside mappings of the file, by their paths.
    known = {
        row: f"{section}.{row}" for config in _default_configs(specs)
        for section in sections(config) for row in section_rows(type(config), section)
    }  # fmt: skip
    written = (spec.get("config") for spec in specs if isinstance(spec, dict))
    for config in written:
        for key, held in config.items() if isinstance(config, dict) else ():
            known |= {one: f"{key}.{one}" for one in held} if isinstance(held, dict) else {}
    known |= {key: key for key in (*experiments, *KEYS, *_known_settings(specs))}
    usual = f"Write --set {first}.lr=1e-3; `rllib config ALGORITHM` lists the settings"
    return Problems(
        "--set", f"begin with an experiment of {source} ({', '.join(experiments)}) or a setting",
        f"{name!r} is neither", closest(name, known) if nearest(name, known) else usual,
        ".".join(keys),
    )  # fmt: skip


def _known_settings(specs: list[Any]) -> set[str]:
    """Return the settings, and sections, of all algorithms of the experiments."""
    from rllib_llm.config.schema import allowed_keys, sections

    configs = _default_configs(specs)
    return {key for config in configs for key in (*allowed_keys(config), *sections(config))}


def _default_configs(specs: list[Any]) -> list[Any]:
    """Return a default config of each algorithm of the experiments."""
    names = {spec["run"] for spec in specs if isinstance(spec, dict) and "run" in spec}
    return [algorithm_class(name, "run").get_default_config() for name in sorted(names)]


def _assign(target: Any, keys: list[str], value: Any) -> None:
    """Set `target[keys[0]][keys[1]]...` to `value`, making mappings where there are none."""
    for done, key in enumerate(keys):
        where: Any = key
        if isinstance(target, list):
            require(key.isdigit() and int(key) < len(target), f"--set {'.'.join(keys)}: {key}", ...,
                    f"be a number from 0 to {len(target) - 1}",
                    "it picks an item of a list")  # fmt: skip
            where = int(key)
        elif not isinstance(target, dict):
            why = f"{'.'.join(keys[:done])} is {target!r}"
            raise Problems("--set", "name a setting", why, "Shorten the path", ".".join(keys))
        if done == len(keys) - 1:
            target[where] = value
        elif isinstance(target, dict) and target.get(where) is None:
            target[where] = {}
        target = target[where]


NAME = re.compile(r"^[A-Za-z][A-Za-z0-9_-]{,199}$")  # of a folder, to whose name Tune adds
PRODUCTS = ("model", "checkpoint", "rollouts")


def load(
    data: Any, source: str, overrides: tuple[str, ...] = (), here: Path | None = None
) -> list[Experiment]:
    """Return the experiments that `data`, a parsed YAML file, describes, in file order.

    Args:
        data: mapping of experiment names to their settings, and optionally `vars`.
        source: name of the file for errors.
        overrides: `--set` texts, applied first.
        here: what `${here}` stands for.

    Raises:
        Problems: unknown keys, wrong kinds of values, references to nothing or to a later stage;
            of all experiments.
    """
    experiments, errors = sound_experiments(data, source, overrides, here)
    report(errors)
    return experiments


def sound_experiments(
    data: Any, source: str, overrides: tuple[str, ...] = (), here: Path | None = None
) -> tuple[list[Experiment], list[Problem]]:
    """Return those experiments, described as for `load`, that are sound by themselves and use
    nothing of others that are not; and the errors of the others.

    Raises:
        Problems: the file as a whole cannot be read as experiments.
    """
    remedy = "Write `name: {run: PPOPtx, env: ..., config: {...}}`"
    why = f"it is a {type(data).__name__}" if data else "it is empty"
    require(isinstance(data, dict) and data, source, ..., "hold experiments", why, remedy)
    data = apply_overrides(with_includes(data, source, here), overrides, source)
    values = _variables(data.pop("vars", None), source, here)
    require(data, source, ..., "hold experiments", "it has nothing but `vars`", remedy)
    run = data.get("run")
    require(not isinstance(run, str), f"{source}: an experiment", ..., "have a name",
            f"`run: {run}` stands at the top",
            "Write a line such as `my-run:` above it, and indent the rest below")  # fmt: skip
    names = list(data)
    sound: dict[str, Experiment] = {}
    errors: list[Problem] = []
    for index, (name, spec) in enumerate(data.items()):
        lookup = functools.partial(_known, values=values, names=names, index=index)
        try:
            require(
                isinstance(name, str) and NAME.match(name), f"{source}: experiment name {name!r}",
                ..., "be at most 200 letters, digits, - and _", "it becomes a folder name",
                "Rename it",
            )  # fmt: skip
            require(isinstance(spec, dict), f"{source}: {name}", spec, "be a mapping with run, "
                    "env, stop, config", "it is an experiment",
                    "Indent its settings below its name")  # fmt: skip
            for key in spec:
                require(isinstance(key, str), f"{name}: the name {key!r}", ..., "be text", "YAML "
                        f"reads it as {type(key).__name__}", "Put it in quotes")  # fmt: skip
            if "name" in spec:
                why = "An experiment is called by the key that it is below"
                raise Problems([unknown_key(name, "name", (), why)])
            experiment = Experiment(**{**substitute(spec, lookup, name), "name": name})
        except Problems as error:
            errors += error.found
        else:
            if all(used in sound for used, _ in references(vars(experiment))):
                sound[name] = experiment
    return [*sound.values()], errors


def load_file(
    file: Path, overrides: Sequence[str] | None = None
) -> tuple[list[Experiment], list[Problem]]:
    """Return what `sound_experiments` does for a YAML file."""
    return sound_experiments(read(file), str(file), (*(overrides or ()),), file.resolve().parent)


def _variables(given: Any, source: str, here: Path | None) -> dict[str, Any]:
    """The values of references: the entries of `vars`, which may refer to each other, and `here`.

    Raises:
        Problems: `vars` is no mapping, or an entry refers to nothing or to itself.
    """
    if not isinstance(given or {}, dict):
        why, remedy = "${vars.name} refers to its entries", "Write `vars: {name: value}`"
        raise Problems(f"{source}: vars", "be a mapping", why, remedy, given)
    raw = {f"vars.{key}": value for key, value in (given or {}).items()}
    if here is not None:
        raw["here"] = str(here)
    asked: list[str] = []

    def lookup(ref: str, where: str) -> Any:
        if ref in asked:
            why = " -> ".join([*asked, ref])
            raise Problems(where, "not refer to itself", why, "Write a value").within(source)
        value = _known(ref, where, values=raw, names=[], index=0)
        asked.append(ref)
        try:
            return substitute(value, lookup, ref)
        finally:
            asked.pop()

    return {name: None if value is None else lookup(name, name) for name, value in raw.items()}


def _known(ref: str, where: str, *, values: Mapping[str, Any], names: list[str], index: int) -> Any:
    """Return the value of a variable, or the reference to an earlier stage unchanged."""
    if ref in values:
        require(values[ref] is not None, where, f"${{{ref}}}", "have a value", "",
                f"Give --set {ref}=...")  # fmt: skip
        return values[ref]
    name, _, product = ref.rpartition(".")
    if name in names and product not in PRODUCTS:
        left = " or ".join(f"${{{name}.{product}}}" for product in PRODUCTS)
        raise Problems(where, f"be {left}", "an experiment leaves these", "", f"${{{ref}}}")
    if name not in names:
        known = [f"{n}.{p}" for n in names[:index] for p in PRODUCTS]
        known += sorted({*values} - {"here"})
        close = nearest(ref, known) or known
        why = f"known here: {', '.join(close)}" if close else "there is none, and no `vars`"
        rule = "refer to something above it in this file"
        raise Problems(where, rule, why, "", f"${{{ref}}}")
    remedy = "Name another" if name == names[index] else f"Move {name!r} above {names[index]!r}"
    require(names.index(name) < index, where, f"${{{ref}}}", "refer to an experiment above it",
            f"experiments run in the order of the file ({', '.join(names)})", remedy)  # fmt: skip
    return f"${{{ref}}}"
