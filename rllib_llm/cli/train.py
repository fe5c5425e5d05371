"""`rllib train file FILE` and `rllib train --algo ... --env ...`."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from typer import Argument, Option

from rllib_llm.cli.options import RunOptions, laid_over, takes
from rllib_llm.cli.session import (
    prepare,
    ray_session,
    show,
    show_progress,
    shown_warnings,
    user_errors,
)
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.run_folder import COMMAND_LINE
from rllib_llm.runs.yaml_loader import load, load_file, parse_mapping
from rllib_llm.shared.errors import Problems, refusals, require
from rllib_llm.shared.storage import Place

CHECKING = "Checking {} before anything starts ..."


class TrainGroup(typer.core.TyperGroup):
    """`rllib train x.yaml` means `rllib train file x.yaml`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0].endswith((".yaml", ".yml")):
            args = ["file", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=TrainGroup,
    help="Train: from a YAML file, or with --algo and --env.",
    invoke_without_command=True,
)


@app.command("file")
@takes(RunOptions)
def train_file(
    context: typer.Context,
    file: Annotated[Path, Argument(help="YAML file with experiments.")],
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
    algo: Annotated[str | None, Option(
        "--algo", "--run", "-a", "-r", help="Algorithm: PPOPtx, SFT, RewardModel, DPO, GRPO, ..., "
        "any of RLlib's (PPO, ...), or a dotted path to a class.")] = None,
    env: Annotated[str | None, Option(
        "--env", "-e", help="Environment: a name of `rllib env list`, a gymnasium id, or a dotted "
        "path to a class.")] = None,
    config: Annotated[str, Option(
        "--config", "-c", help="Settings of the algorithm as JSON or YAML, or a file with them."
    )] = "{}",
    *,
    options: RunOptions,
) -> None:  # fmt: skip
    """Train one algorithm named on the command line, or a file: `rllib train file --help`."""
    if context.invoked_subcommand is not None:
        with user_errors(options.verbose):
            for name, value in (("--algo", algo), ("--env", env), ("--config", config)):
                require(value in (None, "{}"), name, value, "be left out with a file", "the file "
                        "has it for each experiment", "Change a setting with --set")  # fmt: skip
        context.obj = options  # given before `file`
        return
    prepare(options.verbose, options.imports)
    with user_errors(options.verbose):
        require(algo, "--algo", algo, "name an algorithm", "", "Write --algo PPOPtx --env "
                "rllib_llm/Reviews-v0, or run a file: rllib train file FILE")  # fmt: skip
        assert algo is not None, "as required"
        show_progress(CHECKING.format(algo))
        from rllib_llm.runs.results import short_name

        spec = {"run": algo, "env": env, "config": parse_mapping(config, "--config")}
        name = short_name(algo).lower()
        experiments = load({name: spec}, COMMAND_LINE, tuple(options.overrides or ()))
    execute(experiments, "default", options, COMMAND_LINE)


def run_file(file: Path, options: RunOptions) -> None:
    """Run the experiments of the YAML file in order, and report."""
    prepare(options.verbose, options.imports)
    with user_errors(options.verbose):
        from rllib_llm.runs.doctor.examine import run_rules
        from rllib_llm.runs.plan import check_experiments

        show_progress(CHECKING.format(file.stem))
        experiments, errors = load_file(file, options.overrides)
        if errors:  # told with those of the settings of the file's sound experiments
            with shown_warnings():
                further = refusals(
                    lambda: check_experiments(with_options(experiments, options), run_rules)
                )
            raise Problems([*errors, *further])
    execute(experiments, file.stem, options, str(file.resolve()))


def with_options(experiments: list[Experiment], options: RunOptions) -> list[Experiment]:
    """Return the experiments with the command line's options laid over them.

    Raises:
        Problems: an option that cannot be used.
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
    names = ", ".join(experiment.name for experiment in experiments)
    require(options.restore is None or len(experiments) <= 1, "--restore", options.restore,
            "be for one experiment", f"there are {names}",
            "Write --set NAME.restore=CHECKPOINT")  # fmt: skip
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


def execute(experiments: list[Experiment], name: str, options: RunOptions, source: str) -> None:
    """Check the experiments, run them in order, and report. Exits with 1 where one fails.

    Args:
        name: what the run's folder is called, with the time.
        source: the file that describes them, or `COMMAND_LINE`.
    """
    console = Console()
    with user_errors(options.verbose):
        from rllib_llm.runs.doctor.examine import run_rules
        from rllib_llm.runs.plan import check_disk, check_experiments, check_resources
        from rllib_llm.runs.run_folder import (
            alone_in,
            check_writable,
            continue_run,
            new_folder,
            resumed_folder,
            storage_root,
        )

        experiments = with_options(experiments, options)
        with shown_warnings() as warned:
            reserved = check_experiments(experiments, run_rules)
        root = storage_root(options.storage_path, experiments)
        if not options.resume:  # one that resumes may be to free a full disk
            check_writable(root)
            check_disk(experiments, root)
        run = (root, name, options.experiment_name, source)
        folder = resumed_folder(*run) if options.resume else new_folder(*run, experiments)
    from rllib_llm.runs.report import report
    from rllib_llm.runs.stages import StageFailed, StageInterrupted, StateCutShort, run_stages
    from rllib_llm.shared.ray_compat import own_ray_has_ended

    try:
        needed_cpus = max([1.0, *(reservation.totals.get("CPU", 0) for reservation in reserved)])
        with contextlib.ExitStack() as stack:
            with user_errors(options.verbose):
                stack.enter_context(alone_in(folder))
                if options.resume:
                    continue_run(folder, source, experiments)
                show_progress(f"Starting Ray; results go to {folder} ...")
                nodes = stack.enter_context(ray_session(options, needed_cpus))
                for reservation in reserved:
                    check_resources(reservation, nodes)
            results = run_stages(
                experiments, folder, console, resume=options.resume, told=warned
            )
    except (StageFailed, OSError, ValueError) as error:
        place = f" from {error.goes_on_from}" if isinstance(error, StageFailed) else ""
        next_step = f"This goes on{place}:\n  {resume_command(folder, options)}"
        with contextlib.suppress(OSError):  # the storage may be what failed
            if isinstance(error, StateCutShort):
                next_step = ""
            elif not _saved(experiments, folder):
                next_step = "Nothing was saved: once the cause is mended, start anew."
        text, full = str(error), os.strerror(errno.ENOSPC)
        if full in text:
            text = (f"{full}: {str(folder)!r} cannot take another checkpoint. Free some space, or "
                    f"keep fewer with --keep-checkpoints-num.\n\n{text}")  # fmt: skip
        show(f"{text}\n{next_step}", title="training failed")
        raise typer.Exit(1) from None
    except StageInterrupted as error:
        show(f"{error}\n  {resume_command(folder, options)}", title="stopped")
        if own_ray_has_ended():
            os._exit(130)  # Ray's own functions for the end of this process would wait a minute
        raise typer.Exit(130) from None
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != signal.SIGTERM:
            raise  # not Ray's, which ends so on this signal, but of the user's code
        saved = _saved(experiments, folder)
        kept = f"What {', '.join(saved)} saved is kept" if saved else "Nothing was saved yet"
        text = f"Stopped while no trial was running. {kept}. This goes on:"
        show(f"{text}\n  {resume_command(folder, options)}", title="stopped")
        raise typer.Exit(130) from None
    passed = report(results, experiments, folder, console)
    if options.as_test and not passed:
        raise typer.Exit(1)


def _saved(experiments: list[Experiment], folder: Place) -> list[str]:
    """Return the names of the experiments of which something is kept."""
    from rllib_llm.runs.run_folder import has_saved

    return [each.name for each in experiments if has_saved(folder / each.name)]


def resume_command(folder: Place, options: RunOptions) -> str:
    """Return the command line that resumes the run in `folder`."""
    from rllib_llm.runs.report import rllib_command

    words = [word for word in sys.argv[1:] if word != "--resume"]
    if options.experiment_name is None:
        words += ["--experiment-name", folder.name]
    return f"{rllib_command()} {shlex.join([*words, '--resume'])}"
