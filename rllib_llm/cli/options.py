"""Command-line options of a run, with the names of Ray 2.40's `rllib train`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from typer import BadParameter, Option

from rllib_llm.runs.yaml_loader import HELP as SET_HELP

Options = TypeVar("Options")


def with_values(pairs: list[str] | None) -> list[str] | None:
    """Return the texts of `--set`; one without a value is refused before the word after it is taken
    for an argument too many."""
    for pair in pairs or ():
        if "=" not in pair:
            raise BadParameter(f"{pair!r} must be NAME=VALUE without spaces, such as lr=1e-4.")
    return pairs


# fmt: off
Overrides = Annotated[list[str] | None, Option("--set", help=SET_HELP, callback=with_values)]
Imports = Annotated[list[str] | None, Option(
    "--import", help="A module that is imported first, here and in Ray's processes, for example to "
    "register environments by name. May be repeated.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class RayOptions:
    """Ray options of the command line; None leaves the choice to Ray."""

    ray_address: Annotated[str | None, Option(
        envvar="RAY_ADDRESS",
        help="Run on this Ray cluster ('auto' finds a local one) instead of starting Ray here."
    )] = None
    ray_num_cpus: Annotated[int | None, Option(
        min=1, help="CPUs of the Ray that is started here.")] = None
    ray_num_gpus: Annotated[int | None, Option(
        min=0, help="GPUs of the Ray that is started here.")] = None
    ray_object_store_memory: Annotated[int | None, Option(
        min=75 * 1024**2, help="Bytes of the object store started here.")] = None
    imports: Imports = None
    verbose: Annotated[int, Option(
        "--verbose", "-v", count=True,
        help="Show what Ray's workers print; twice: also debugging output.")] = 0


@dataclass(frozen=True)
class RunOptions(RayOptions):
    """Everything that `rllib train` and `rllib train file` have in common."""

    stop: Annotated[str, Option(
        "--stop", "-s", help="When a trial ends, as JSON or YAML: '{\"episode\": 4000}'. Overrides "
        "the file's values, for every experiment.")] = "{}"
    experiment_name: Annotated[str | None, Option(
        "--experiment-name", "-n", help="Folder of the run under --storage-path. Default: the "
        "file's name and the time.")] = None
    storage_path: Annotated[str | None, Option(
        "--storage-path", "--local-dir",
        help="Folder for all results. Default: what the file says, else ~/ray_results.")] = None
    num_samples: Annotated[int | None, Option(
        min=1, help="How often the search space is sampled.")] = None
    checkpoint_interval_s: Annotated[float | None, Option(
        min=0, help="Seconds between checkpoints. Default: 300, or more where saving would take "
        "over 2 % of the time.")] = None
    checkpoint_freq: Annotated[int | None, Option(
        min=0, help="Iterations between checkpoints, instead of seconds; 0: none between.")] = None
    checkpoint_at_end: Annotated[bool | None, Option(
        "--checkpoint-at-end/--no-checkpoint-at-end",
        help="Save a checkpoint at the end. On by default.")] = None
    keep_checkpoints_num: Annotated[int | None, Option(
        min=1, help="Checkpoints kept per trial. Default: two; all with --checkpoint-freq or a "
        "scheduler. The best one by held-out data is kept as well, as best_checkpoint.")] = None
    checkpoint_score_attr: Annotated[str | None, Option(
        help="Keep the checkpoints with the highest value of this result, or with 'min-' before "
        "its name the lowest. Default: the newest.")] = None
    restore: Annotated[str | None, Option(
        help="Checkpoint from which the trials of one experiment start. Counters continue from "
        "there: the values of --stop are totals, training_iteration included.")] = None
    resume: Annotated[bool, Option(
        "--resume", help="Continue the run of --experiment-name, or the newest run of this file: "
        "finished experiments are kept, the others continue from their last checkpoint.")] = False
    scheduler: Annotated[str | None, Option(
        help="Tune scheduler: fifo, asha, hyperband, median_stopping, pbt, ...")] = None
    scheduler_config: Annotated[str, Option(
        help="Arguments of the scheduler, as JSON or YAML.")] = "{}"
    overrides: Overrides = None
    as_test: Annotated[bool, Option(
        "--as-test", help="Exit with 1 if a pass criterion is not met.")] = False
# fmt: on


def laid_over(options: Options, before: Options | None) -> Options:
    """Return `options` with those of `before` that it leaves at their defaults; of what may be
    given several times, all."""
    if before is None:
        return options
    merged = {}
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        ours, theirs = getattr(options, field.name), getattr(before, field.name)
        if isinstance(ours, list) and isinstance(theirs, list):
            merged[field.name] = [*theirs, *ours]
        else:
            merged[field.name] = theirs if ours == field.default else ours
    return dataclasses.replace(options, **merged)  # type: ignore[type-var]


def takes(options_class: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command `f(..., options)` one command-line option per field of `options_class`.

    The fields are declared once, here, however many commands share them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = {f.name: f.default for f in dataclasses.fields(options_class)}
        field_hints = get_type_hints(options_class, include_extras=True)
        # `get_type_hints` hides the metadata of an option whose default is None before Python 3.11.
        parameters = inspect.signature(command, eval_str=True).parameters
        own = [parameter for name, parameter in parameters.items() if name != "options"]
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [
            inspect.Parameter(name, kind, default=default, annotation=field_hints[name])
            for name, default in fields.items()
        ]

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            options = options_class(**{name: arguments.pop(name) for name in fields})
            command(**arguments, options=options)

        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return run

    return decorate
