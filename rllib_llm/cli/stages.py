"""Run the experiments of a file one after the other, each as a Ray Tune run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rllib_llm.algorithms.language_model import MODEL_IN_CHECKPOINT
from rllib_llm.cli.algorithms import algorithm_class
from rllib_llm.cli.errors import UserError
from rllib_llm.cli.metrics_view import BEST, flatten, number
from rllib_llm.cli.search_space import examples, to_tune
from rllib_llm.cli.yaml_experiments import Experiment, references, substitute
from rllib_llm.config_schema import build_config, resolve_classes

if TYPE_CHECKING:
    from ray.tune import ResultGrid


@dataclass
class StageResult:
    """What a finished stage left behind. Paths are absolute; lists hold one entry per trial."""

    name: str
    algorithm: str
    folder: Path
    trial_folders: list[Path]
    labels: list[str]
    best: int
    model: Path | None
    checkpoint: Path | None
    metrics: dict[str, Any]


class StageFailed(RuntimeError):
    """A trial of a stage ended with an error; the message is the error's end."""


# --- before anything runs -------------------------------------------------------------------


def check_experiments(experiments: list[Experiment]) -> float:
    """Validate every experiment and return the CPUs that the hungriest single trial reserves.

    What a later stage takes from an earlier one does not exist yet. For the check, the earlier
    stage's own `model` stands in for it: the same architecture and tokenizer.

    Raises:
        ValueError: whatever is wrong, with the experiment's name.
    """
    stand_ins: dict[str, Any] = {}
    cpus = 1.0
    for experiment in experiments:
        _check_products(experiment, experiments)
        config = substitute(experiment.config, lambda ref, _: stand_ins.get(ref), experiment.name)
        stand_ins[f"{experiment.name}.model"] = config.get("model")
        cpus = max(cpus, _check(dataclasses.replace(experiment, config=config)))
    return cpus


def _check_products(experiment: Experiment, experiments: list[Experiment]) -> None:
    by_name = {other.name: other for other in experiments}
    for name, product in references(vars(experiment)):
        if by_name[name].checkpoint_config.get("checkpoint_at_end") is False:
            raise UserError(
                f"{name}.checkpoint_config.checkpoint_at_end=False must be true: "
                f"{experiment.name!r} uses ${{{name}.{product}}}. Drop the key."
            )


def _check(experiment: Experiment) -> float:
    from rllib_llm.cli.scheduling import make_scheduler, make_searcher

    algo_class = algorithm_class(experiment.run, experiment.name)
    where = f"{experiment.name}.config"
    make_scheduler(experiment)
    make_searcher(experiment)
    cpus = 1.0
    for settings in examples(search_space(experiment)):
        config = build_config(algo_class, settings, where)
        request = algo_class.default_resource_request(config)
        cpus = max(cpus, sum(bundle.get("CPU", 0) for bundle in request.bundles))
    return cpus


def search_space(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's config and environment, search spaces as Tune's objects."""
    config = dict(experiment.config)
    if experiment.env is not None:
        config["env"] = experiment.env
    return to_tune(config, f"{experiment.name}.config")


# --- running --------------------------------------------------------------------------------


def run_stage(
    experiment: Experiment,
    run_folder: Path,
    console: Console,
    *,
    resume: bool = False,
    callbacks: list | None = None,
    verbosity: int = 0,
) -> StageResult:
    """Run one experiment to its end and return what it left behind.

    Args:
        experiment: with every `${reference}` resolved.
        run_folder: the stage's results go to the subfolder of its name.
        resume: continue the run that lies there.

    Raises:
        StageFailed: a trial ended with an error.
    """
    from rllib_llm.cli.live_table import LiveTable

    _check(experiment)
    with LiveTable(f"{experiment.name} · {experiment.run}", experiment.stop, console) as table:
        tuner = _tuner(experiment, run_folder, [table, *(callbacks or [])], resume)
        with _quiet_stdout(verbosity):
            grid = tuner.fit()
    if grid.errors:
        raise StageFailed(_failure_text(grid))
    return _stage_result(experiment, run_folder / experiment.name, grid)


def _tuner(experiment: Experiment, run_folder: Path, callbacks: list, resume: bool) -> Any:
    from ray import tune

    from rllib_llm.cli.scheduling import make_scheduler, make_searcher

    algo_class = algorithm_class(experiment.run, experiment.name)
    space = resolve_classes(search_space(experiment), f"{experiment.name}.config")
    run_config = tune.RunConfig(
        name=experiment.name,
        storage_path=str(run_folder),
        stop=experiment.stop or None,
        verbose=0,
        log_to_file=True,
        callbacks=callbacks,
        failure_config=tune.FailureConfig(max_failures=experiment.max_failures),
        checkpoint_config=tune.CheckpointConfig(
            **{"checkpoint_at_end": True, **experiment.checkpoint_config}
        ),
    )
    if resume:
        tuner = tune.Tuner.restore(
            str(run_folder / experiment.name),
            algo_class,
            param_space=space,
            resume_unfinished=True,
            resume_errored=True,
        )
        tuner._local_tuner._run_config.callbacks = callbacks
        return tuner
    tune_config = tune.TuneConfig(
        num_samples=experiment.num_samples,
        metric=experiment.metric,
        mode=experiment.mode or ("max" if experiment.metric else None),
        scheduler=make_scheduler(experiment),
        search_alg=make_searcher(experiment),
        max_concurrent_trials=experiment.max_concurrent_trials,
        time_budget_s=experiment.time_budget_s,
        trial_dirname_creator=_trial_folder_name,
    )
    # Tuner has no public way to start trials from a checkpoint; `tune.run`, which it calls, has.
    extra = {"restore": str(Path(experiment.restore).resolve())} if experiment.restore else None
    return tune.Tuner(
        algo_class,
        param_space=space,
        tune_config=tune_config,
        run_config=run_config,
        _tuner_kwargs=extra,
    )


def _trial_folder_name(trial: Any) -> str:
    return f"{trial.trainable_name}_{trial.trial_id}"


@contextlib.contextmanager
def _quiet_stdout(verbosity: int):
    """Keep what libraries print while a live table stands out of the way; errors still raise."""
    import warnings

    with warnings.catch_warnings():
        if verbosity == 0:
            warnings.simplefilter("ignore")
        yield


def _stage_result(experiment: Experiment, folder: Path, grid: ResultGrid) -> StageResult:
    flats = [flatten(result.metrics or {}) for result in grid]
    best = best_trial(experiment, flats)
    trial_folders = [Path(result.path) for result in grid]
    checkpoint = grid[best].checkpoint
    result = StageResult(
        name=experiment.name,
        algorithm=experiment.run,
        folder=folder,
        trial_folders=trial_folders,
        labels=trial_labels([result.config or {} for result in grid]),
        best=best,
        model=None,
        checkpoint=Path(checkpoint.path) if checkpoint else None,
        metrics=flats[best],
    )
    for index, trial in enumerate(grid):
        model = export_model(trial.checkpoint, trial_folders[index])
        if index == best:
            result.model = model
    save_stage(result)
    return result


def trial_labels(configs: list[Mapping[str, Any]]) -> list[str]:
    """Return a label for each trial: the settings in which the trials differ, else its number."""
    flats = [flatten(config) for config in configs]
    keys = sorted({key for flat in flats for key in flat})
    varied = [key for key in keys if len({repr(flat.get(key)) for flat in flats}) > 1]
    labels = [", ".join(setting(key, flat.get(key)) for key in varied) for flat in flats]
    return [label or f"trial {index + 1}" for index, label in enumerate(labels)]


def setting(key: str, value: Any) -> str:
    """Return "name=value", short: the last part of the key, numbers to four digits."""
    number_text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"{key.rpartition('/')[2]}={number_text}"


def best_trial(experiment: Experiment, flats: list[Mapping[str, Any]]) -> int:
    """Return the index of the trial with the best last result, by the experiment's metric."""
    ranking = BEST
    if experiment.metric:
        ranking = ((experiment.metric, experiment.mode or "max"),)
    for key, mode in ranking:
        values = {i: number(flat.get(key)) for i, flat in enumerate(flats)}
        known = {i: value for i, value in values.items() if value is not None}
        if known:
            return (max if mode == "max" else min)(known, key=known.__getitem__)
    return 0


def export_model(checkpoint: Any, trial_folder: Path) -> Path | None:
    """Copy the Hugging Face folder out of `checkpoint` to `<trial_folder>/model`, if it has one."""
    if checkpoint is None:
        return None
    source = Path(checkpoint.path) / MODEL_IN_CHECKPOINT
    if not (source / "config.json").is_file():
        return None
    target = trial_folder / "model"
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))


def save_stage(result: StageResult) -> None:
    """Write `stage.json`, the mark of a finished stage, which `--resume` reads."""
    record = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in dataclasses.asdict(result).items()
        if key not in ("metrics", "trial_folders")
    }
    record["trial_folders"] = [str(folder) for folder in result.trial_folders]
    record["metrics"] = {k: number(v) for k, v in result.metrics.items() if number(v) is not None}
    (result.folder / "stage.json").write_text(json.dumps(record, indent=1), encoding="utf-8")


def load_stage(folder: Path) -> StageResult | None:
    """Return the finished stage that lies in `folder`, or None."""
    file = folder / "stage.json"
    if not file.is_file():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    for key in ("folder", "model", "checkpoint"):
        record[key] = Path(record[key]) if record[key] else None
    record["trial_folders"] = [Path(path) for path in record["trial_folders"]]
    return StageResult(**record)


def _failure_text(grid: ResultGrid, num_lines: int = 12) -> str:
    """Return the end of the first failed trial's error, and where the whole of it lies."""
    for result in grid:
        if result.error is not None:
            lines = str(result.error).strip().splitlines()[-num_lines:]
            return "\n".join([*lines, "", f"The whole error: {Path(result.path) / 'error.txt'}"])
    return ""
