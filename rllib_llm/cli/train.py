"""`rllib train file FILE` and `rllib train --algo ... --env ...`."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rllib_llm.cli import options as opt
from rllib_llm.cli.errors import UserError, show, user_errors
from rllib_llm.cli.ray_session import RayOptions, quiet_environment, ray_session
from rllib_llm.cli.yaml_experiments import Experiment, load, substitute
from rllib_llm.cli.yaml_loader import parse_mapping, read

app = typer.Typer(help="Train: from a YAML file, or with --algo and --env.",
                  invoke_without_command=True, no_args_is_help=False)


@dataclass(frozen=True)
class RunOptions:
    """What the command line says about a run, whatever the experiments are."""

    storage_path: str | None
    experiment_name: str | None
    resume: bool
    as_test: bool
    wandb_key: str | None
    wandb_project: str | None
    wandb_run_name: str | None
    ray: RayOptions


@app.command("file")
def train_file(
    file: Annotated[Path, typer.Argument(help="YAML file with experiments.")],
    overrides: opt.Set = None,
    stop: opt.Stop = "{}",
    experiment_name: opt.ExperimentName = None,
    storage_path: opt.StoragePath = None,
    num_samples: opt.NumSamples = None,
    checkpoint_freq: opt.CheckpointFreq = None,
    checkpoint_at_end: opt.CheckpointAtEnd = None,
    keep_checkpoints_num: opt.KeepCheckpointsNum = None,
    checkpoint_score_attr: opt.CheckpointScoreAttr = None,
    restore: opt.Restore = None,
    resume: opt.Resume = False,
    scheduler: opt.Scheduler = None,
    scheduler_config: opt.SchedulerConfig = "{}",
    ray_address: opt.RayAddress = None,
    ray_num_cpus: opt.RayNumCpus = None,
    ray_num_gpus: opt.RayNumGpus = None,
    ray_object_store_memory: opt.RayObjectStoreMemory = None,
    wandb_key: opt.WandbKey = None,
    wandb_project: opt.WandbProject = None,
    wandb_run_name: opt.WandbRunName = None,
    as_test: opt.AsTest = False,
    verbose: opt.Verbose = 0,
) -> None:
    """Run the experiments of a YAML file in order.

    Relative paths in the file are relative to the folder where you run this; ${here} is the
    folder of the file.
    """
    prepare(verbose)
    with user_errors():
        experiments = load(read(file), str(file), tuple(overrides or ()), file.resolve().parent)
        experiments = with_options(
            experiments, stop=stop, num_samples=num_samples, checkpoint_freq=checkpoint_freq,
            checkpoint_at_end=checkpoint_at_end, keep_checkpoints_num=keep_checkpoints_num,
            checkpoint_score_attr=checkpoint_score_attr, restore=restore, scheduler=scheduler,
            scheduler_config=scheduler_config,
        )
    ray = RayOptions(ray_address, ray_num_cpus, ray_num_gpus, ray_object_store_memory, verbose)
    execute(experiments, file.stem, RunOptions(
        storage_path, experiment_name, resume, as_test, wandb_key, wandb_project, wandb_run_name,
        ray))


@app.callback()
def train(
    context: typer.Context,
    algo: opt.Algo = None,
    env: opt.Env = None,
    config: opt.Config = "{}",
    stop: opt.Stop = "{}",
    experiment_name: opt.ExperimentName = None,
    storage_path: opt.StoragePath = None,
    num_samples: opt.NumSamples = None,
    checkpoint_freq: opt.CheckpointFreq = None,
    checkpoint_at_end: opt.CheckpointAtEnd = None,
    keep_checkpoints_num: opt.KeepCheckpointsNum = None,
    checkpoint_score_attr: opt.CheckpointScoreAttr = None,
    restore: opt.Restore = None,
    resume: opt.Resume = False,
    scheduler: opt.Scheduler = None,
    scheduler_config: opt.SchedulerConfig = "{}",
    ray_address: opt.RayAddress = None,
    ray_num_cpus: opt.RayNumCpus = None,
    ray_num_gpus: opt.RayNumGpus = None,
    ray_object_store_memory: opt.RayObjectStoreMemory = None,
    wandb_key: opt.WandbKey = None,
    wandb_project: opt.WandbProject = None,
    wandb_run_name: opt.WandbRunName = None,
    as_test: opt.AsTest = False,
    verbose: opt.Verbose = 0,
) -> None:
    """Train one algorithm named on the command line, or a file: `rllib train file --help`."""
    if context.invoked_subcommand is not None:
        return
    prepare(verbose)
    with user_errors():
        if not algo:
            raise UserError(
                "--algo is missing: it names the algorithm. Write --algo PPOPtx --env "
                "rllib_llm/Reviews-v0, or run a file: rllib train file FILE."
            )
        spec = {"run": algo, "env": env, "config": parse_mapping(config, "--config")}
        experiments = with_options(
            load({algo.rpartition(".")[2].lower(): spec}, "the command line"),
            stop=stop, num_samples=num_samples, checkpoint_freq=checkpoint_freq,
            checkpoint_at_end=checkpoint_at_end, keep_checkpoints_num=keep_checkpoints_num,
            checkpoint_score_attr=checkpoint_score_attr, restore=restore, scheduler=scheduler,
            scheduler_config=scheduler_config,
        )
    ray = RayOptions(ray_address, ray_num_cpus, ray_num_gpus, ray_object_store_memory, verbose)
    execute(experiments, "default", RunOptions(
        storage_path, experiment_name, resume, as_test, wandb_key, wandb_project, wandb_run_name,
        ray))


def prepare(verbosity: int) -> None:
    """Make this process ready to load algorithms: quiet, and able to import from its folder."""
    quiet_environment(verbosity)
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:  # Ray's workers inherit it
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])


def with_options(experiments: list[Experiment], *, stop: str, num_samples: int | None,
                 checkpoint_freq: int | None, checkpoint_at_end: bool | None,
                 keep_checkpoints_num: int | None, checkpoint_score_attr: str | None,
                 restore: str | None, scheduler: str | None, scheduler_config: str,
                 ) -> list[Experiment]:
    """Return the experiments with the command line's options laid over them."""
    score, order = checkpoint_score_attr, None
    if score:
        order = "min" if score.startswith("min-") else "max"
        score = score.removeprefix("min-")
    checkpoints: dict[str, Any] = {
        "checkpoint_frequency": checkpoint_freq,
        "checkpoint_at_end": checkpoint_at_end,
        "num_to_keep": keep_checkpoints_num,
        "checkpoint_score_attribute": score,
        "checkpoint_score_order": order,
    }
    checkpoints = {key: value for key, value in checkpoints.items() if value is not None}
    stops = parse_mapping(stop, "--stop")
    arguments = parse_mapping(scheduler_config, "--scheduler-config")
    if restore is not None and not Path(restore).is_dir():
        raise UserError(
            f"--restore={restore!r} must be a checkpoint folder: there is none. "
            "`rllib train` prints the checkpoints it wrote."
        )
    return [
        dataclasses.replace(
            experiment,
            stop={**experiment.stop, **stops},
            num_samples=num_samples or experiment.num_samples,
            checkpoint_config={**experiment.checkpoint_config, **checkpoints},
            restore=restore or experiment.restore,
            scheduler=scheduler or experiment.scheduler,
            scheduler_config={**experiment.scheduler_config, **arguments},
        )
        for experiment in experiments
    ]


def execute(experiments: list[Experiment], name: str, options: RunOptions) -> None:
    """Check the experiments, run them in order, and report. Exits with 1 where one fails."""
    console = Console()
    with user_errors():
        import rllib_llm  # noqa: F401 - registers environments and algorithms
        from rllib_llm.cli.stages import StageFailed, check_experiments

        cpus = check_experiments(experiments)
        folder = run_folder(name, options, experiments)
    try:
        with ray_session(options.ray, cpus):
            results = run_all(experiments, folder, console, options)
    except StageFailed as error:
        show(str(error), title="training failed")
        raise typer.Exit(1) from None
    from rllib_llm.cli.report import report

    passed = report(results, experiments, folder, console)
    if options.as_test and not passed:
        raise typer.Exit(1)


def run_all(experiments: list[Experiment], folder: Path, console: Console, options: RunOptions
            ) -> list[Any]:
    """Run the experiments in order, each with what the earlier ones produced."""
    from rllib_llm.cli.stages import load_stage, run_stage

    products: dict[str, Any] = {}
    results = []
    for experiment in experiments:
        resolved = dataclasses.replace(experiment, **{
            field.name: substitute(
                getattr(experiment, field.name), lambda ref, where: products[ref], experiment.name)
            for field in dataclasses.fields(experiment)
        })
        result = load_stage(folder / experiment.name) if options.resume else None
        if result is None:
            result = run_stage(
                resolved, folder, console,
                resume=options.resume and (folder / experiment.name).is_dir(),
                verbosity=options.ray.verbosity,
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
    storage = options.storage_path or next(
        (e.storage_path for e in experiments if e.storage_path), None) or "~/ray_results"
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
