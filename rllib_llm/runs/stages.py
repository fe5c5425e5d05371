"""Run the experiments of a file one after the other, each as a Ray Tune run."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ray import tune
from rich.console import Console
from rich.text import Text

from rllib_llm.algorithms.language_model import LanguageModelAlgorithm
from rllib_llm.checkpoints.algorithm import restore_source
from rllib_llm.checkpoints.folder import newest_usable
from rllib_llm.config.schema import resolve_classes
from rllib_llm.data.rollouts import rollouts_of
from rllib_llm.runs import default_callbacks
from rllib_llm.runs.callbacks import NewTerms, NoRoomError, fit
from rllib_llm.runs.experiments import Experiment, algorithm_class, fill
from rllib_llm.runs.live_table import LiveTable
from rllib_llm.runs.model_card import model_card
from rllib_llm.runs.plan import INTERVAL, check_experiments, checkpoint_settings, num_trials
from rllib_llm.runs.report_page import PAGE_FILE, find_trials, write_page
from rllib_llm.runs.results import StageResult, collect_result, flatten, is_reached, short_name
from rllib_llm.runs.run_folder import has_saved, set_aside, write_environment
from rllib_llm.runs.search_space import make_scheduler, make_searcher, search_space
from rllib_llm.runs.trackers import tracker_callbacks
from rllib_llm.runs.trial_checkpoints import CUT_SHORT, SaveOnStop, note_saved
from rllib_llm.shared.errors import Problems
from rllib_llm.shared.messages import failure_text
from rllib_llm.shared.ray_compat import replace_callbacks, resume_finished, tuner_from_checkpoint
from rllib_llm.shared.run_layout import (
    CHECKPOINTS,
    MODEL_CARD,
    RUN_RECORD,
    STAGE_RECORD,
    RunFolder,
)
from rllib_llm.shared.storage import Place, UrlPath, placed, read_json, replace_text


class StageFailed(RuntimeError):
    """A trial of a stage ended with an error; the message is the error's end."""

    def __init__(self, message: str, goes_on_from: str):
        """`goes_on_from`: where --resume would continue."""
        super().__init__(message)
        self.goes_on_from = goes_on_from


class StateCutShort(Problems):
    """A run cannot be resumed, since Tune's record of it is damaged."""


class StageInterrupted(RuntimeError):
    """The user stopped the stage; the message says where --resume would continue."""


def run_stages(
    experiments: list[Experiment], folder: Place, console: Console, *, resume: bool = False,
    told: Sequence[str] = (),
) -> list[StageResult]:  # fmt: skip
    """Run the experiments in order, each with the results of the earlier ones.

    Args:
        folder: of the run; each stage's results go to the subfolder of its name.
        resume: keep finished stages that lie there and continue the others.
        told: warnings that the user has read already.

    Raises:
        StageFailed: a trial ended with an error.
        StageInterrupted: the user pressed Ctrl-C.
    """
    products: dict[str, Any] = {}
    results = []
    for index, experiment in enumerate(experiments):
        result = StageResult.load(folder / experiment.name) if resume else None
        later = [folder / other.name for other in experiments[index + 1 :]]
        is_last = not any(stage.exists() for stage in later)
        if result is not None and is_last and result.falls_short(experiment):
            result = None  # it is to continue further than before
        name = experiment.name
        if result is None:
            resolved = fill(experiment, lambda ref, where: _product(products, ref, where))
            result = run_stage(resolved, folder, console, resume, told)
        products[f"{name}.model"] = result.model
        products[f"{name}.checkpoint"] = result.checkpoint
        products[f"{name}.rollouts"] = rollouts_of(result.best_trial_folder)
        results.append(result)
    return results


def _product(products: Mapping[str, Place | None], ref: str, where: str) -> str:
    if products[ref] is None:
        name, _, product = ref.rpartition(".")
        why = f"its algorithm leaves no {product}"
        raise Problems(where, f"name something that {name!r} made", why, "", f"${{{ref}}}")
    return str(products[ref])


def run_stage(
    experiment: Experiment, run_folder: Place, console: Console, resume: bool,
    told: Sequence[str] = (),
) -> StageResult:  # fmt: skip
    """Run one experiment, every reference resolved, to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of was said before the first stage
        check_experiments([experiment])
    folder = run_folder / experiment.name
    has_begun = resume and folder.exists()
    goes_on = has_begun and has_saved(folder) and _can_resume(folder)
    # Where nothing was saved, what is asked for now may be something else.
    aside = set_aside(folder, [folder]) if has_begun and not goes_on else ""
    write_environment(folder)
    finished = (folder / STAGE_RECORD).is_file()
    (folder / STAGE_RECORD).unlink(missing_ok=True)
    title = f"{experiment.name} · {short_name(experiment.run)}"
    table = LiveTable(title, experiment.stop, console, told)
    settings, name = experiment.checkpoint_config, "planned_iterations"
    planned = {key: value for key, value in search_space(experiment).items() if key == name}
    callbacks = [
        table,
        *default_callbacks(
            checkpoint_interval_s=settings.get(
                INTERVAL, None if "checkpoint_frequency" in settings else "auto"
            ), metric=experiment.metric, mode=experiment.mode,
        ),
        NewTerms(experiment.stop, experiment.max_failures, checkpoint_settings(experiment),
                 planned),
        *tracker_callbacks(experiment.trackers, run_folder.name, experiment.name),
    ]  # fmt: skip
    stopping = next(one for one in callbacks if isinstance(one, SaveOnStop))
    with table, stopping, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries; they would tear the table

        def restored() -> Any:
            if _can_resume(folder):
                return _restored_tuner(experiment, folder, callbacks, further=False)
            return _tuner(experiment, run_folder, callbacks)

        if goes_on:
            tuner = _restored_tuner(experiment, folder, callbacks, further=finished)
            trials = list(tuner.get_results())
            if ended := _at_their_end(experiment, trials):
                text = f"{experiment.name} is at its stop already, at {last_saved(trials)}."
                console.print(Text(text))
                return _result(experiment, folder, ended)
            console.print(Text(f"{experiment.name} goes on from {last_saved(trials)}."))
            anew = [placed(one.path, folder) for one in trials if _begins_again(one, finished)]
            if anew:
                names = ", ".join(one.name for one in anew)
                table.warn(f"{names} {AGAIN}{set_aside(folder, anew)}")
        else:
            tuner = _tuner(experiment, run_folder, callbacks)
            if has_begun:
                table.warn(f"{experiment.name} {AGAIN}{aside}")
        try:
            grid = fit(
                tuner, restored, experiment.max_failures, table.warn,
                saved=lambda: {*map(str, RunFolder(folder).in_trials(CHECKPOINTS))},
            )  # fmt: skip
        except KeyboardInterrupt:
            raise StageInterrupted(f"{experiment.name} was stopped at once.") from None
        except NoRoomError as error:
            saved = RunFolder(folder).in_trials(CHECKPOINTS)
            goes_on_from = "the last checkpoint" if saved else "the beginning"
            raise StageFailed(f"{experiment.name}: {error}", goes_on_from) from None
    trials = [grid[index] for index in range(len(grid))]
    if stopping.interrupted:
        text = f"{experiment.name} was stopped. It goes on from {last_saved(trials)}."
        raise StageInterrupted(text)
    if grid.num_errors:
        goes_on_from = last_saved(trials, of=f" of {experiment.name}")
        failed = next(trial for trial in trials if trial.error is not None)
        raise StageFailed(failure_text(experiment.name, failed.error, failed.path), goes_on_from)
    return _result(experiment, folder, trials)


def _result(experiment: Experiment, folder: Place, trials: list[Any]) -> StageResult:
    """The stage's result; its record, its models' cards and its page are written."""
    result = collect_result(experiment, folder, trials)
    source = read_json(folder.parent / RUN_RECORD).get("source", "")
    for trial, each in zip(trials, result.trial_folders, strict=True):
        if (each / "model").is_dir():
            card = model_card(experiment, flatten(trial.metrics or {}), source)
            replace_text(each / "model" / MODEL_CARD, card)
    write_page({experiment.name: find_trials(folder)}, folder / PAGE_FILE)
    return result


def _tuner(experiment: Experiment, run_folder: Place, callbacks: list[Any]) -> Any:
    algo_class = algorithm_class(experiment.run, experiment.name)
    tune_config = tune.TuneConfig(
        num_samples=experiment.num_samples,
        metric=experiment.metric,
        mode=experiment.mode or ("max" if experiment.metric else None),
        scheduler=make_scheduler(experiment),
        search_alg=make_searcher(experiment),
        max_concurrent_trials=experiment.max_concurrent_trials,
        time_budget_s=experiment.time_budget_s,
        trial_dirname_creator=lambda trial: f"{trial.trainable_name}_{trial.trial_id}",
        # Schedulers stop and restart trials; a process that has imported everything is worth much.
        reuse_actors=bool(experiment.scheduler) and issubclass(algo_class, LanguageModelAlgorithm),
    )
    run_config = tune.RunConfig(
        name=experiment.name,
        storage_path=str(run_folder),
        # What trials write beside checkpoints lies in their own folder already where that is here.
        sync_config=tune.SyncConfig(sync_artifacts=isinstance(run_folder, UrlPath)),
        stop=experiment.stop or None,
        verbose=0,
        callbacks=callbacks,
        failure_config=tune.FailureConfig(max_failures=experiment.max_failures),
        checkpoint_config=checkpoint_settings(experiment),
    )
    source = None
    if experiment.restore:
        where = f"{experiment.name}.restore"
        source = restore_source(experiment.restore, algo_class, where, experiment.stop)
    return tuner_from_checkpoint(
        algo_class, None if source is None else str(source), tune_config=tune_config,
        run_config=run_config, param_space=resolve_classes(search_space(experiment)),
    )  # fmt: skip


AGAIN = "begins again: no checkpoint of it had been saved."


def _begins_again(trial: Any, further: bool) -> bool:
    """Whether a trial of a resumed stage has begun, and its next start replaces what it left;
    `further`: those that have ended go on as well."""
    metrics = trial.metrics or {}
    has_begun = trial.error is not None or metrics.get("training_iteration")
    goes_on = further or trial.error is not None or not metrics.get("done")
    return bool(has_begun) and trial.checkpoint is None and goes_on


def _at_their_end(experiment: Experiment, trials: list[Any]) -> list[Any]:
    """The trials of a resumed stage with the results of their last checkpoints, where all of them
    are at the experiment's stop; else none. Tune would compute one more iteration of each."""
    ended = []
    for trial in trials if len(trials) == num_trials(experiment) else ():
        kept = {saved.path: metrics for saved, metrics in trial.best_checkpoints or []}
        metrics = kept.get(trial.checkpoint.path) if trial.checkpoint else None
        if metrics is None or not is_reached(experiment.stop, flatten(metrics)):
            return []
        ended.append(dataclasses.replace(trial, metrics=metrics))
    return ended


def _can_resume(folder: Place) -> bool:
    """Whether a Tune run got as far as noting its state in `folder`."""
    return tune.Tuner.can_restore(str(folder)) and any(folder.glob("experiment_state-*.json"))


def _restored_tuner(
    experiment: Experiment, folder: Place, callbacks: list[Any], further: bool
) -> Any:
    """A Tuner that goes on from the trials' newest checkpoints; `further`: trials that have ended
    go on as well."""
    try:
        note_saved(folder)
        tuner = tune.Tuner.restore(
            str(folder), algorithm_class(experiment.run, experiment.name),
            param_space=resolve_classes(search_space(experiment)), resume_unfinished=True,
            resume_errored=True,
        )  # fmt: skip
    except CUT_SHORT:
        remedy = "Start anew"
        with contextlib.suppress(ValueError):
            remedy = f"Start a new run, with `restore: {newest_usable(folder)}` in {folder.name}"
        name, why = f"{folder.name}: Tune's record of the run", "a full disk may have cut it short"
        raise StateCutShort(name, "be whole", why, remedy) from None
    # The pickled callbacks of the first run belong to a terminal that is gone.
    replace_callbacks(tuner, callbacks)
    if further:
        resume_finished(tuner)
    return tuner


def last_saved(trials: list[Any], of: str = "") -> str:
    """Return the iterations of the trials' last checkpoints, from which a stage would continue.

    Args:
        trials: `ray.tune.Result` of each trial.
        of: what stands behind them, to name the stage.
    """
    kept = [[metrics for _, metrics in trial.best_checkpoints or []] for trial in trials]
    saved = [max((metrics["training_iteration"] for metrics in one), default=0) for one in kept]
    if not any(saved):
        return f"the beginning{of}, since there is no checkpoint"
    plural = "s" if len(saved) > 1 else ""
    return f"iteration{plural} {', '.join(str(one) if one else 'none' for one in saved)}{of}"
