"""Run the experiments of a file one after the other, each as a Ray Tune run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
from rllib_llm.checkpoints.finding import restore_source
from rllib_llm.config_schema import resolve_classes
from rllib_llm.experiments.algorithms import algorithm_class
from rllib_llm.experiments.plan import check_experiment, checkpoint_settings, search_space
from rllib_llm.experiments.stage_result import RECORD, StageResult, collect_result, short_name
from rllib_llm.experiments.yaml_experiments import Experiment, fill
from rllib_llm.ray_compat import replace_callbacks, tuner_from_checkpoint
from rllib_llm.reports.failures import failure_text
from rllib_llm.reports.live_table import LiveTable
from rllib_llm.tune.broken_trials import EndBrokenTrials
from rllib_llm.tune.hung_trials import RestartHungTrials
from rllib_llm.tune.result_files import ProgressCsv, ResultJson
from rllib_llm.tune.scheduling import make_scheduler, make_searcher


class StageFailed(RuntimeError):
    """A trial of a stage ended with an error; the message is the error's end."""


class StageInterrupted(RuntimeError):
    """The user stopped the stage."""


def run_stages(
    experiments: list[Experiment],
    folder: Path,
    console: Console,
    *,
    resume: bool = False,
    loggers: Callable[[str], list[Any]] = lambda stage: [],
) -> list[StageResult]:
    """Run the experiments in order, each with what the earlier ones produced.

    Args:
        folder: of the run; each stage's results go to the subfolder of its name.
        resume: keep finished stages that lie there and continue the others.
        loggers: name of a stage -> further callbacks of its Tune run.

    Raises:
        StageFailed: a trial ended with an error.
        StageInterrupted: the user pressed Ctrl-C.
    """
    products: dict[str, Any] = {}
    results = []
    for experiment in experiments:
        result = StageResult.load(folder / experiment.name) if resume else None
        if result is None:
            resolved = fill(experiment, lambda ref, where: products[ref])
            result = run_stage(resolved, folder, console, resume, loggers(experiment.name))
        products[f"{experiment.name}.model"] = str(result.model)
        products[f"{experiment.name}.checkpoint"] = str(result.checkpoint)
        results.append(result)
    return results


def run_stage(
    experiment: Experiment, run_folder: Path, console: Console, resume: bool, loggers: list[Any]
) -> StageResult:
    """Run one experiment, every reference resolved, to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of was said before the first stage
        check_experiment(experiment)
    folder = run_folder / experiment.name
    (folder / RECORD).unlink(missing_ok=True)  # of an earlier run in the same folder
    short = short_name(experiment.run)
    with LiveTable(f"{experiment.name} · {short}", experiment.stop, console) as table:
        callbacks = [table, ResultJson(), ProgressCsv(), RestartHungTrials(), EndBrokenTrials()]
        callbacks += loggers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries; they would tear the table
            if resume and _can_resume(folder):
                grid = _restored_tuner(experiment, folder, callbacks).fit()
            else:
                grid = _tuner(experiment, run_folder, callbacks).fit()
    trials = [grid[index] for index in range(len(grid))]
    if table.interrupted:
        raise StageInterrupted(stopped_text(experiment.name, trials))
    if grid.num_errors:
        raise StageFailed(_failure_text(experiment.name, trials))
    return collect_result(experiment, folder, trials)


def _tuner(experiment: Experiment, run_folder: Path, callbacks: list[Any]) -> Any:
    from ray import tune

    algo_class = algorithm_class(experiment.run, experiment.name)
    tune_config = tune.TuneConfig(
        num_samples=experiment.num_samples,
        metric=experiment.metric,
        mode=experiment.mode or ("max" if experiment.metric else None),
        scheduler=make_scheduler(experiment),
        search_alg=make_searcher(experiment),
        max_concurrent_trials=experiment.max_concurrent_trials,
        time_budget_s=experiment.time_budget_s,
        trial_dirname_creator=_trial_folder_name,
        # Schedulers stop and restart trials; a process that has imported everything is worth much.
        reuse_actors=bool(experiment.scheduler) and issubclass(algo_class, LanguageModelAlgorithm),
    )
    run_config = tune.RunConfig(
        name=experiment.name,
        storage_path=str(run_folder),
        stop=experiment.stop or None,
        verbose=0,
        callbacks=callbacks,
        failure_config=tune.FailureConfig(max_failures=experiment.max_failures),
        checkpoint_config=checkpoint_settings(experiment),
    )
    source = None
    if experiment.restore:
        source = str(restore_source(experiment.restore, algo_class, f"{experiment.name}.restore"))
    return tuner_from_checkpoint(
        algo_class,
        source,
        param_space=_param_space(experiment),
        tune_config=tune_config,
        run_config=run_config,
    )


def _can_resume(folder: Path) -> bool:
    """Whether a Tune run got as far as noting its state in `folder`."""
    from ray import tune

    return tune.Tuner.can_restore(str(folder)) and any(folder.glob("experiment_state-*.json"))


def _restored_tuner(experiment: Experiment, folder: Path, callbacks: list[Any]) -> Any:
    from ray import tune

    tuner = tune.Tuner.restore(
        str(folder),
        algorithm_class(experiment.run, experiment.name),
        param_space=_param_space(experiment),
        resume_unfinished=True,
        resume_errored=True,
    )
    # The pickled callbacks of the first run belong to a terminal that is gone.
    replace_callbacks(tuner, callbacks)
    return tuner


def _param_space(experiment: Experiment) -> dict[str, Any]:
    return resolve_classes(search_space(experiment), f"{experiment.name}.config")


def _trial_folder_name(trial: Any) -> str:
    return f"{trial.trainable_name}_{trial.trial_id}"


def stopped_text(name: str, trials: list[Any]) -> str:
    """Return that a stage was stopped, and after which iterations its trials can go on.

    Args:
        trials: `ray.tune.Result` of each trial.
    """
    kept = [[metrics for _, metrics in trial.best_checkpoints or []] for trial in trials]
    saved = [max((metrics["training_iteration"] for metrics in one), default=0) for one in kept]
    if not any(saved):
        return (
            f"{name} was stopped before its end and has no checkpoint: it will begin anew. With "
            "--checkpoint-freq 10 it would save one every 10 iterations."
        )
    iterations = ", ".join(str(iteration) if iteration else "none" for iteration in saved)
    return f"{name} was stopped before its end; its last checkpoint: iteration {iterations}."


def _failure_text(name: str, trials: list[Any]) -> str:
    """Return what ended the first failed trial, where, and the file with the whole error."""
    failed = next(trial for trial in trials if trial.error is not None)
    return failure_text(name, str(failed.error), failed.path)
