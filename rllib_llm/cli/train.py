"""`rllib train file FILE` and `rllib train --algo ... --env ...`."""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rllib_llm.cli.options import RunOptions, laid_over, takes
from rllib_llm.cli.session import prepare, ray_session, weights_in_store
from rllib_llm.experiments.yaml_experiments import Experiment, load
from rllib_llm.experiments.yaml_loader import parse_mapping, read
from rllib_llm.storage import Place, UrlPath, place
from rllib_llm.user_errors import UserError, show, shown_warnings, user_errors

app = typer.Typer(
    help="Train: from a YAML file, or with --algo and --env.", invoke_without_command=True
)


@app.command("file")
@takes(RunOptions)
def train_file(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="YAML file with experiments.")],
    *,
    options: RunOptions,
) -> None:
    """Run the experiments of a YAML file in order.

    Relative paths in the file are relative to the folder where you run this; ${here} is the
    folder of the file.
    """
    run_file(file, laid_over(options, context.obj))


@app.callback()
@takes(RunOptions)
def train(
    context: typer.Context,
    algo: Annotated[
        str | None,
        typer.Option(
            "--algo",
            "--run",
            "-a",
            "-r",
            help="Algorithm: PPOPtx, SFT, RewardModel, DPO, "
            "GRPO, ..., any of RLlib's (PPO, ...), or a dotted path to a class.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            "--env",
            "-e",
            help="Environment: a name of `rllib env list`, a gymnasium id, "
            "or a dotted path to a class.",
        ),
    ] = None,
    config: Annotated[
        str,
        typer.Option(
            "--config", "-c", help="Settings of the algorithm as JSON or YAML, or a file with them."
        ),
    ] = "{}",
    *,
    options: RunOptions,
) -> None:
    """Train one algorithm named on the command line, or a file: `rllib train file --help`."""
    if context.invoked_subcommand is not None:
        with user_errors(options.verbose):
            _no_algorithm(algo, env, config)
        context.obj = options  # given before `file`
        return
    prepare(options.verbose, options.imports)
    with user_errors(options.verbose):
        from rllib_llm.experiments.stage_result import short_name

        if not algo:
            raise UserError(
                "--algo is missing: it names the algorithm. Write --algo PPOPtx --env "
                "rllib_llm/Reviews-v0, or run a file: rllib train file FILE."
            )
        spec = {"run": algo, "env": env, "config": parse_mapping(config, "--config")}
        name = short_name(algo).lower()
        experiments = load({name: spec}, "the command line", tuple(options.overrides or ()))
    execute(experiments, "default", options)


def _no_algorithm(algo: str | None, env: str | None, config: str) -> None:
    """Refuse what a file says itself."""
    for name, value in (("--algo", algo), ("--env", env), ("--config", config)):
        if value not in (None, "{}"):
            raise UserError(
                f"{name}={value!r} must be left out with a file: the file says it for each "
                "experiment. Change a setting of the file with --set."
            )


def run_file(file: Path, options: RunOptions) -> None:
    """Run the experiments of the YAML file in order, and report."""
    prepare(options.verbose, options.imports)
    with user_errors(options.verbose):
        here = file.resolve().parent
        experiments = load(read(file), str(file), tuple(options.overrides or ()), here)
    execute(experiments, file.stem, options)


def with_options(experiments: list[Experiment], options: RunOptions) -> list[Experiment]:
    """Return the experiments with the command line's options laid over them.

    Raises:
        UserError: an option that cannot be used.
    """
    score, order = options.checkpoint_score_attr, None
    if score:
        order = "min" if score.startswith("min-") else "max"
        score = score.removeprefix("min-")
    checkpoints: dict[str, Any] = {
        "checkpoint_frequency": options.checkpoint_freq,
        "checkpoint_interval_s": options.checkpoint_interval_s,
        "checkpoint_at_end": options.checkpoint_at_end,
        "num_to_keep": options.keep_checkpoints_num,
        "checkpoint_score_attribute": score,
        "checkpoint_score_order": order,
    }
    checkpoints = {key: value for key, value in checkpoints.items() if value is not None}
    stops = parse_mapping(options.stop, "--stop")
    arguments = parse_mapping(options.scheduler_config, "--scheduler-config")
    if options.restore is not None and len(experiments) > 1:
        names = ", ".join(experiment.name for experiment in experiments)
        raise UserError(
            f"--restore={options.restore!r} must be for one experiment: there are {names}. Write "
            "--set NAME.restore=CHECKPOINT."
        )
    return [
        experiment.replace(
            stop={**experiment.stop, **stops},
            num_samples=options.num_samples or experiment.num_samples,
            checkpoint_config={**experiment.checkpoint_config, **checkpoints},
            restore=options.restore or experiment.restore,
            scheduler=options.scheduler or experiment.scheduler,
            scheduler_config={**experiment.scheduler_config, **arguments},
        )
        for experiment in experiments
    ]


def execute(experiments: list[Experiment], name: str, options: RunOptions) -> None:
    """Check the experiments, run them in order, and report. Exits with 1 where one fails."""
    console = Console()
    with user_errors(options.verbose):
        from rllib_llm.experiments.doctor.examine import before_a_run
        from rllib_llm.experiments.plan import check_experiments
        from rllib_llm.experiments.room import check_disk, check_resources

        experiments = with_options(experiments, options)
        with shown_warnings() as told:
            needed = check_experiments(experiments)
            before_a_run(experiments)
        folder = run_folder(name, options, experiments)
        check_disk(experiments, folder)
        loggers = _loggers(options, folder.name, len(experiments))
    from rllib_llm.experiments.report import report
    from rllib_llm.experiments.stages import StageFailed, StageInterrupted, run_stages

    try:
        weights_bytes = weights_in_store(experiments, needed["CPU"])
        session = ray_session(options, needed["CPU"], weights_bytes)
        with user_errors(options.verbose), session as cluster:
            check_resources(needed, cluster)
            results = run_stages(
                experiments, folder, console, resume=options.resume, loggers=loggers, told=told
            )
    except (StageFailed, OSError) as error:
        place = f" from {error.goes_on_from}" if isinstance(error, StageFailed) else ""
        going_on = f"This goes on{place}:\n  {resume_command(folder, options)}"
        show(f"{_explained(error, folder)}\n{going_on}", title="training failed")
        raise typer.Exit(1) from None
    except StageInterrupted as error:
        show(f"{error}\n  {resume_command(folder, options)}", title="stopped")
        raise typer.Exit(130) from None
    passed = report(results, experiments, folder, console)
    if options.as_test and not passed:
        raise typer.Exit(1)


def _explained(error: BaseException, folder: Place) -> str:
    """Return the error's text, a full disk in plain words."""
    full = os.strerror(errno.ENOSPC)
    if full not in str(error):
        return str(error)
    return (
        f"{full}: {str(folder)!r} cannot take another checkpoint. Free some, or keep fewer with "
        f"--keep-checkpoints-num.\n\n{error}"
    )


def resume_command(folder: Place, options: RunOptions) -> str:
    """Return the command line that goes on with the run in `folder`."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if options.experiment_name is None:
        words += ["--experiment-name", folder.name]
    return shlex.join(["rllib", *words, "--resume"])


def _loggers(options: RunOptions, run: str, num_stages: int) -> Callable[[str], list[Any]]:
    """Return a function from a stage's name to the callbacks that log it elsewhere."""
    if not (options.wandb_project or options.wandb_key):
        if options.wandb_run_name:
            raise UserError(
                f"--wandb-run-name={options.wandb_run_name!r} must come with --wandb-project: "
                "alone it has no effect. Name a project, or drop it."
            )
        return lambda stage: []
    from rllib_llm.tune.wandb_logger import check_wandb, wandb_logger

    check_wandb(options.wandb_key)
    project = options.wandb_project or "rllib_llm"
    base = options.wandb_run_name or run

    def loggers(stage: str) -> list[Any]:
        name = base if num_stages == 1 else f"{base}-{stage}"
        return [wandb_logger(project, name, run, options.wandb_key)]

    return loggers


def run_folder(name: str, options: RunOptions, experiments: list[Experiment]) -> Place:
    """Return the folder of this run: a new one, or with --resume the one to continue.

    Raises:
        UserError: nothing to resume, a run of that name is there already, or nothing can be
            written there.
    """
    storage = (
        options.storage_path
        or next((e.storage_path for e in experiments if e.storage_path), None)
        or "~/ray_results"
    )
    root = place(storage)
    if isinstance(root, Path):
        root = root.resolve()
    if options.resume:
        return _run_to_resume(name, root, options)
    if isinstance(root, Path):
        _check_writable(root)
    else:
        _check_url(root)
    if not options.experiment_name:
        return root / f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    folder = root / options.experiment_name
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"experiment_name={options.experiment_name!r} must be new: a run lies in "
            f"{str(folder)!r} already, and two would be mixed. Add --resume to go on with it, or "
            "choose another name."
        )
    return folder


def _run_to_resume(name: str, root: Place, options: RunOptions) -> Place:
    if options.experiment_name:
        folder = root / options.experiment_name
        if not folder.is_dir():
            raise UserError(
                f"--resume: {str(folder)!r} must exist: it is the run to continue. "
                "Check --storage-path and --experiment-name."
            )
        return folder
    # Of `name` alone: a run of name_2 begins with name_ as well.
    of_this_file = re.compile(re.escape(name) + r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
    found = (path for path in root.glob("*") if of_this_file.fullmatch(path.name))
    runs = sorted(found, key=lambda path: path.name)
    if not runs:
        raise UserError(
            f"--resume: no run of {name!r} lies in {str(root)!r}. "
            "Check --storage-path, or start without --resume."
        )
    return runs[-1]


def _check_url(root: UrlPath) -> None:
    """Refuse a URL at which nothing can be written."""
    try:
        root.mkdir()
    except OSError as error:
        raise UserError(
            f"storage_path={str(root)!r} must be a URL that can be written to: {error}. Check the "
            "bucket, and the credentials in the environment."
        ) from error


def _check_writable(root: Path) -> None:
    """Refuse a place for results where none can be made."""
    existing = next(path for path in (root, *root.parents) if path.exists())
    if not existing.is_dir():
        raise UserError(
            f"storage_path={str(root)!r} must be a folder: {str(existing)!r} is a file. Choose "
            "another with --storage-path."
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(root, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise UserError(
            f"storage_path={str(root)!r} must be a folder that can be written to: "
            f"{reason.lower()}. Choose another with --storage-path, or change its permissions."
        )
