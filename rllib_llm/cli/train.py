"""`rllib train file FILE` and `rllib train --algo ... --env ...`."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rllib_llm.cli.errors import UserError, show, user_errors
from rllib_llm.cli.options import RunOptions, takes
from rllib_llm.cli.session import prepare, ray_session
from rllib_llm.cli.yaml_experiments import Experiment, load, substitute
from rllib_llm.cli.yaml_loader import parse_mapping, read

app = typer.Typer(
    help="Train: from a YAML file, or with --algo and --env.", invoke_without_command=True
)


@app.command("file")
@takes(RunOptions)
def train_file(
    file: Annotated[Path, typer.Argument(help="YAML file with experiments.")],
    *,
    options: RunOptions,
) -> None:
    """Run the experiments of a YAML file in order.

    Relative paths in the file are relative to the folder where you run this; ${here} is the
    folder of the file.
    """
    run_file(file, options)


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
            help="Algorithm: PPOPtx, SFT, RewardModel, "
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
        return
    prepare(options.verbose)
    with user_errors():
        if not algo:
            raise UserError(
                "--algo is missing: it names the algorithm. Write --algo PPOPtx --env "
                "rllib_llm/Reviews-v0, or run a file: rllib train file FILE."
            )
        spec = {"run": algo, "env": env, "config": parse_mapping(config, "--config")}
        name = algo.rpartition(".")[2].lower()
        experiments = load({name: spec}, "the command line", tuple(options.overrides or ()))
    execute(experiments, "default", options)


def run_file(file: Path, options: RunOptions) -> None:
    """Run the experiments of the YAML file in order, and report."""
    prepare(options.verbose)
    with user_errors():
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
        dataclasses.replace(
            experiment,
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
    with user_errors():
        experiments = with_options(experiments, options)
        import rllib_llm  # noqa: F401 - registers environments and algorithms
        from rllib_llm.cli.stages import StageFailed, check_experiments

        cpus = check_experiments(experiments)
        folder = run_folder(name, options, experiments)
    try:
        with ray_session(options, cpus):
            results = run_all(experiments, folder, console, options)
    except StageFailed as error:
        show(str(error), title="training failed")
        raise typer.Exit(1) from None
    from rllib_llm.cli.report import report

    passed = report(results, experiments, folder, console)
    if options.as_test and not passed:
        raise typer.Exit(1)


def run_all(
    experiments: list[Experiment], folder: Path, console: Console, options: RunOptions
) -> list[Any]:
    """Run the experiments in order, each with what the earlier ones produced."""
    from rllib_llm.cli.stages import load_stage, run_stage

    products: dict[str, Any] = {}
    results = []
    for experiment in experiments:
        resolved = dataclasses.replace(
            experiment,
            **{
                field.name: substitute(
                    getattr(experiment, field.name),
                    lambda ref, where: products[ref],
                    experiment.name,
                )
                for field in dataclasses.fields(experiment)
            },
        )
        result = load_stage(folder / experiment.name) if options.resume else None
        if result is None:
            result = run_stage(
                resolved,
                folder,
                console,
                resume=options.resume and (folder / experiment.name).is_dir(),
                verbosity=options.verbose,
            )
        products[f"{experiment.name}.model"] = str(result.model)
        products[f"{experiment.name}.checkpoint"] = str(result.checkpoint)
        results.append(result)
    return results


def run_folder(name: str, options: RunOptions, experiments: list[Experiment]) -> Path:
    """Return the folder of this run: a new one, or with --resume the one to continue.

    Raises:
        UserError: nothing to resume.
    """
    storage = (
        options.storage_path
        or next((e.storage_path for e in experiments if e.storage_path), None)
        or "~/ray_results"
    )
    root = Path(storage).expanduser().resolve()
    if options.experiment_name:
        folder = root / options.experiment_name
        if options.resume and not folder.is_dir():
            raise UserError(
                f"--resume: {str(folder)!r} must exist: it is the run to continue. "
                "Check --storage-path and --experiment-name."
            )
        return folder
    if options.resume:
        runs = sorted(root.glob(f"{name}_[0-9]*"))
        if not runs:
            raise UserError(
                f"--resume: no run of {name!r} lies in {str(root)!r}. "
                "Check --storage-path, or start without --resume."
            )
        return runs[-1]
    return root / f"{name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
