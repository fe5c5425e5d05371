"""The summary at the end of a run: changes, files, next commands."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rllib_llm.data.rollout_store import is_rollout_folder
from rllib_llm.data.rollouts import rollouts_of
from rllib_llm.rollouts.recorder import SAMPLES_FILE
from rllib_llm.runs.doctor.model_rules import is_causal
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.metrics import NONE, columns, first_and_last, summary_metrics
from rllib_llm.runs.report_page import PAGE_FILE, spread
from rllib_llm.runs.results import (
    StageResult,
    as_shown,
    before_and_after,
    number,
    older_evaluation,
    read_json_lines,
    read_results,
)
from rllib_llm.runs.signs import signs
from rllib_llm.shared.storage import Place, read_json


def report(
    results: list[StageResult], experiments: list[Experiment], folder: Place, console: Console
) -> bool:
    """Print the report of a run; True where every pass criterion is met.

    Args:
        results: what the stages left behind, in order.
    """
    for result in results:
        trial = result.best_trial_folder
        _print_summary(result, [*map(as_shown, read_results(trial))], console)
        pairs = before_and_after(read_json_lines(trial / SAMPLES_FILE))
        if pairs:
            _heading("Held-out prompts: completions before and after training", console)
            console.print(before_after_table(pairs))
    verdicts = [_criteria(r, e, console) for r, e in zip(results, experiments, strict=True)]
    _heading(f"Everything is in {_shown(folder)}", console)
    for line in _places(results, folder):
        console.print(line, highlight=False, soft_wrap=True)  # a path can be copied
    _next_commands(results, folder, console)
    return all(verdicts)


def _heading(text: str, console: Console) -> None:
    console.print(Text(f"\n{text}", style="bold"), soft_wrap=True)


def _print_summary(result: StageResult, rows: list[dict[str, Any]], console: Console) -> None:
    title = f"{result.name} · {result.algorithm}"
    if rows and (seconds := number(rows[-1].get("time_total_s"))) is not None:
        title += f", {seconds:.0f} s of training"
    if len(result.trial_folders) > 1:
        title += f", best of {len(result.trial_folders)} trials: {result.labels[result.best]}"
        _print_trials(result, rows, console)
    _heading(title, console)
    ends = "Losses and rates: means over an iteration's updates; held-out values: an evaluation's."
    table = Table("result", caption=ends, caption_justify="left")
    table.add_column("first", justify="right")
    table.add_column("last", justify="right")
    for metric in summary_metrics(rows):
        table.add_row(Text(metric.title), *first_and_last(rows, metric))
    console.print(table)
    for sign in signs(rows):
        text = f"iteration {sign.iteration}: {sign.text}"
        console.print(Text.assemble(("look: ", "yellow"), text))


def _print_trials(result: StageResult, best: list[dict[str, Any]], console: Console) -> None:
    """Print the last results of all trials, side by side; `best` are those of the best one."""
    read = [best if i == result.best else [*map(as_shown, read_results(folder))]
            for i, folder in enumerate(result.trial_folders)]  # fmt: skip
    last = [rows[-1] if rows else {} for rows in read]
    shown = columns(last)
    _heading(f"{result.name}: last result of each trial", console)
    reached = {row["training_iteration"] for row in last if "training_iteration" in row}
    fewer = "Trials with fewer iterations were ended earlier, by the scheduler or a stop criterion."
    table = Table("trial", caption=fewer if len(reached) > 1 else None, caption_justify="left")
    for heading in ("iteration", *(metric.title for metric in shown)):
        table.add_column(heading, justify="right")
    for label, row in zip(result.labels, last, strict=True):
        values = [(metric, number(row.get(metric.key))) for metric in shown]
        texts = (NONE if value is None else metric.text(value) for metric, value in values)
        table.add_row(Text(label), str(row.get("training_iteration", NONE)), *texts)
    console.print(table)


def _criteria(result: StageResult, experiment: Experiment, console: Console) -> bool:
    """Print whether each pass criterion is met; True where all are."""
    met = True
    for key, least in experiment.pass_criteria.items():
        value = number(result.metrics.get(key))
        ok = value is not None and value >= least
        met = met and ok
        shown = "missing" if value is None else f"{value:.4g}"
        made = older_evaluation(result.metrics, key)
        if value is not None and made is not None:
            done = result.metrics["training_iteration"]
            shown += f" (of iteration {made:.0f} of {done:.0f})"
        verdict = ("passed", "green") if ok else ("not passed", "red")
        text = f"  {result.name}: {key} = {shown}, at least {least:.4g} wanted"
        console.print(Text.assemble(verdict, text))
    return met


def _places(results: list[StageResult], folder: Place) -> list[Text]:
    """Lines of stage, what, and where below `folder`, in columns."""
    rows: list[tuple[str, str, str]] = []
    for result in results:
        trial = result.best_trial_folder
        samples, rollouts = trial / SAMPLES_FILE, rollouts_of(trial)
        name = result.name
        for what, path in (
            ("model (Hugging Face)", result.model),
            ("checkpoint", result.checkpoint),
            ("curves and report", result.folder / PAGE_FILE),
            ("sampled texts", samples if samples.is_file() else None),
            ("rollouts", rollouts if is_rollout_folder(rollouts) else None),
            ("logs (TensorBoard, JSON, CSV)", trial),
        ):
            if path is not None:
                is_elsewhere = what == "rollouts" and path.parent != trial
                inner = path if is_elsewhere else path.relative_to(folder)  # type: ignore[arg-type]
                rows.append((name, what, str(inner)))
                name = ""
    widths = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
    return [
        Text.assemble(" ", (name.ljust(widths[0]), "cyan"), what.ljust(widths[1]), path)
        for name, what, path in rows
    ]


def _next_commands(results: list[StageResult], folder: Place, console: Console) -> None:
    rllib, last = rllib_command(), results[-1]
    models = [one.model for one in results if one.model]
    policies = [model for model in models if is_causal(read_json(model / "config.json"))]
    saved = [one for one in results if one.checkpoint]  # weights that sampled some of the rollouts
    stored = [one.folder for one in saved if is_rollout_folder(rollouts_of(one.best_trial_folder))]
    held_out = any(name.startswith("eval/") for name in last.metrics)
    offline = "*/*/wandb/offline-run-*"
    has_offline = isinstance(folder, Path) and any(folder.glob(offline))
    _heading("Next", console)
    commands: tuple[tuple[str, str, Sequence[Place | None]], ...] = (
        ("talk to the model", f"{rllib} generate", policies[-1:]),
        ("sample stored completions anew", f"{rllib} verify", stored[-1:]),
        ("evaluate it again", f"{rllib} evaluate", [last.checkpoint] if held_out else []),
        ("all curves (pip install tensorboard)", "tensorboard --logdir", [folder]),
        ("upload to Weights & Biases", "wandb sync", [folder] if has_offline else []),
    )
    for purpose, command, paths in commands:
        for path in [one for one in paths if one is not None]:
            inner = f"/{offline}" if command == "wandb sync" else ""
            text = Text.assemble((f"  # {purpose}", "dim"), f"\n  {command} {_shown(path)}{inner}")
            console.print(text, soft_wrap=True)


def rllib_command() -> str:
    """Return how this command was called, where it is not on the PATH as `rllib`."""
    called = Path(sys.argv[0])
    if called.name not in ("rllib", "rllib-llm") or shutil.which(called.name):
        return "rllib"
    return _shown(called)


def _shown(path: Place) -> str:
    """Return `path` as a word of a shell, relative to the current folder where it lies below it."""
    if isinstance(path, Path) and path.is_relative_to(here := Path.cwd()):
        path = path.relative_to(here)
    return shlex.quote(str(path))


MAX_CHARS = 220


def before_after_table(pairs: list[tuple[dict, dict]], num: int = 5) -> Table:
    """Return a table of `num` prompts spread over `pairs`: both completions, with scores."""
    table = Table(show_lines=True, expand=True)
    for name, ratio in (("prompt", 2), ("before", 3), ("after", 3)):
        table.add_column(name, ratio=ratio)
    for before, after in spread(pairs, num):
        prompt = Text(_short(before.get("question") or before["prompt"]))
        env = Text(before.get("env", ""), style="dim")  # of several environments
        shown = Group(prompt, env) if env else prompt
        table.add_row(shown, _cell(before), _cell(after))
    return table


def _cell(row: dict[str, Any]) -> Group:
    """A completion with its score and, where it is there, the gold score."""
    scores = {"score": row.get("score"), "gold score": row.get("gold_score")}
    known = (f"{name} {value:.2f}" for name, value in scores.items() if value is not None)
    return Group(
        Text(_short(row["completion"]) or "(nothing)"), Text("  ".join(known), style="dim")
    )


def _short(text: str) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
