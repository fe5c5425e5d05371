"""The summary at the end of a run: changes, files, next commands."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rllib_llm.data.rollout_store import ROLLOUTS
from rllib_llm.data.rollouts import is_rollout_folder
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
    seconds = number(rows[-1].get("time_total_s")) if rows else None
    title = f"{result.name} · {result.algorithm}"
    if seconds is not None:
        title += f", {seconds:.0f} s of training"
    if len(result.trial_folders) > 1:
        title += f", best of {len(result.trial_folders)} trials: {result.labels[result.best]}"
        _print_trials(result, rows, console)
    _heading(title, console)
    ends = (
        "Losses and rates are means over an iteration's updates, held-out values an evaluation's."
    )
    table = Table(caption=ends, caption_justify="left")
    table.add_column("result")
    for heading in ("first", "last"):
        table.add_column(heading, justify="right")
    for metric in summary_metrics(rows):
        table.add_row(Text(metric.title), *first_and_last(rows, metric))
    console.print(table)
    for sign in signs(rows):
        line = Text.assemble(("look: ", "yellow"), f"iteration {sign.iteration}: {sign.text}")
        console.print(line, highlight=False)


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
        color, word = ("green", "passed") if ok else ("red", "not passed")
        console.print(
            f"[{color}]{word}[/{color}]  {result.name}: {key} = {shown}, "
            f"at least {least:.4g} wanted",
            highlight=False,
        )
    return met


def _places(results: list[StageResult], folder: Place) -> list[Text]:
    """Lines of stage, what, and where below `folder`, in columns."""
    rows: list[tuple[str, str, str]] = []
    for result in results:
        trial = result.best_trial_folder
        samples, rollouts = trial / SAMPLES_FILE, trial / ROLLOUTS
        places = {
            "model (Hugging Face)": result.model,
            "checkpoint": result.checkpoint,
            "curves and report": result.folder / PAGE_FILE,
            "sampled texts": samples if samples.is_file() else None,
            "rollouts": rollouts if is_rollout_folder(rollouts) else None,
            "logs (TensorBoard, JSON, CSV)": trial,
        }
        known = [(what, path) for what, path in places.items() if path is not None]
        for index, (what, path) in enumerate(known):
            name = "" if index else result.name
            inner = path.relative_to(folder)  # type: ignore[arg-type]  # both are in one storage
            rows.append((name, what, str(inner)))
    widths = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
    return [
        Text.assemble(" ", (name.ljust(widths[0]), "cyan"), what.ljust(widths[1]), path)
        for name, what, path in rows
    ]


def _next_commands(results: list[StageResult], folder: Place, console: Console) -> None:
    commands = []
    policies = [result.model for result in results if result.model and _generates(result.model)]
    if policies:
        commands.append(("talk to the model", f"{rllib_command()} generate {_shown(policies[-1])}"))
    # Where rollouts were kept, and weights that sampled some of them.
    stored = [
        each.folder
        for each in results
        if each.checkpoint and is_rollout_folder(each.best_trial_folder / ROLLOUTS)
    ]
    if stored:
        commands.append(
            ("sample stored completions anew", f"{rllib_command()} verify {_shown(stored[-1])}")
        )
    held_out = any(name.startswith("eval/") for name in results[-1].metrics)
    if (checkpoint := results[-1].checkpoint) and held_out:
        commands.append(("evaluate it again", f"{rllib_command()} evaluate {_shown(checkpoint)}"))
    commands.append(
        ("all curves (pip install tensorboard)", f"tensorboard --logdir {_shown(folder)}")
    )
    offline = "*/*/wandb/offline-run-*"
    if isinstance(folder, Path) and any(folder.glob(offline)):
        commands.append(("upload to Weights & Biases", f"wandb sync {_shown(folder)}/{offline}"))
    _heading("Next", console)
    for purpose, command in commands:
        text = f"  [dim]# {purpose}[/dim]\n  {escape(command)}"
        console.print(text, highlight=False, soft_wrap=True)


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


def _generates(model: Place) -> bool:
    """True for a causal language model, False for a reward model."""
    return is_causal(read_json(model / "config.json"))


MAX_CHARS = 220


def before_after_table(pairs: list[tuple[dict, dict]], num: int = 5) -> Table:
    """Return a table of `num` prompts spread over `pairs`: both completions, with scores."""
    table = Table(show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("before", ratio=3)
    table.add_column("after", ratio=3)
    for before, after in spread(pairs, num):
        prompt = before.get("question") or before["prompt"]
        table.add_row(Text(_short(prompt)), _cell(before), _cell(after))
    return table


def _cell(row: dict[str, Any]) -> Group:
    return Group(Text(_short(row["completion"]) or "(nothing)"), Text(_scores(row), style="dim"))


def _scores(row: dict[str, Any]) -> str:
    """Return the score and, where it is there, the gold score: "score 1.32  gold score 3.00"."""
    shown = {"score": row.get("score"), "gold score": row.get("gold_score")}
    return "  ".join(
        f"{name} {value:.2f}" for name, value in shown.items() if isinstance(value, int | float)
    )


def _short(text: str) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
