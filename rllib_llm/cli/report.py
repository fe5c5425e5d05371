"""The report at the end of a run: what changed, what was made, what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rllib_llm.cli.before_after import before_after_table
from rllib_llm.cli.metrics_view import SUMMARY_METRICS, number, present
from rllib_llm.cli.plot import plot_stage
from rllib_llm.cli.stages import StageResult
from rllib_llm.cli.trial_logs import SAMPLES, before_and_after, read_json_lines, read_results
from rllib_llm.cli.yaml_experiments import Experiment


def report(
    results: list[StageResult], experiments: list[Experiment], folder: Path, console: Console
) -> bool:
    """Print the report of a run and draw its curves; True where every pass criterion is met.

    Args:
        results: what the stages left behind, in order; a picture goes to each stage's folder.
        folder: of the run.
    """
    figures = {}
    for result in results:
        trial = result.trial_folders[result.best]
        console.print(_summary(result, read_results(trial)))
        pairs = before_and_after(read_json_lines(trial / SAMPLES))
        if pairs:
            console.print(before_after_table(pairs))
        figures[result.name] = plot_stage(
            f"{result.name} · {result.algorithm}",
            result.trial_folders,
            result.labels,
            result.folder / "curves.png",
        )
    passed = all([_criteria(r, e, console) for r, e in zip(results, experiments, strict=True)])
    console.print(_places(results, figures, folder))
    _next_commands(results, folder, console)
    return passed


def _summary(result: StageResult, rows: list[dict[str, Any]]) -> Table:
    title = f"{result.name} · {result.algorithm}"
    if len(result.trial_folders) > 1:
        title += f"   best of {len(result.trial_folders)} trials: {result.labels[result.best]}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("result")
    for heading in ("first", "last"):
        table.add_column(heading, justify="right")
    for metric in present(rows, SUMMARY_METRICS):
        values = [value for row in rows if (value := number(row.get(metric.key))) is not None]
        table.add_row(metric.title, format(values[0], metric.form), format(values[-1], metric.form))
    if rows and (seconds := number(rows[-1].get("time_total_s"))) is not None:
        table.add_row("time", "", f"{seconds:.0f} s")
    return table


def _criteria(result: StageResult, experiment: Experiment, console: Console) -> bool:
    """Print whether each pass criterion is met; True where all are."""
    met = True
    for key, least in experiment.pass_criteria.items():
        value = number(result.metrics.get(key))
        ok = value is not None and value >= least
        met = met and ok
        shown = "missing" if value is None else f"{value:.4g}"
        color, word = ("green", "passed") if ok else ("red", "not passed")
        console.print(
            f"[{color}]{word}[/{color}]  {result.name}: {key} = {shown}, "
            f"at least {least:.4g} wanted",
            highlight=False,
        )
    return met


def _places(results: list[StageResult], figures: Mapping[str, Path | None], folder: Path) -> Table:
    table = Table(
        title=f"Everything is in {folder}",
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
        pad_edge=False,
    )
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def add(stage: str, what: str, path: Path | None) -> None:
        if path is not None:
            table.add_row(stage, what, str(path.relative_to(folder)))

    for result in results:
        trial = result.trial_folders[result.best]
        add(result.name, "model (Hugging Face)", result.model)
        add("", "checkpoint", result.checkpoint)
        add("", "curves", figures[result.name])
        add("", "logs (TensorBoard, JSON, CSV)", trial)
        if (trial / SAMPLES).is_file():
            add("", "sampled texts", trial / SAMPLES)
    return table


def _next_commands(results: list[StageResult], folder: Path, console: Console) -> None:
    commands = []
    policies = [result for result in results if result.model and _generates(result.model)]
    if policies:
        commands.append(("talk to the model", f"rllib generate {policies[-1].model}"))
    if results[-1].checkpoint:
        commands.append(("evaluate it again", f"rllib evaluate {results[-1].checkpoint}"))
    commands.append(("all curves", f"tensorboard --logdir {folder}"))
    console.print("\n[bold]Next[/bold]")
    for purpose, command in commands:
        console.print(f"  {command}   [dim]# {purpose}[/dim]", highlight=False, soft_wrap=True)


def _generates(model: Path) -> bool:
    """True for a causal language model, False for a reward model."""
    return "CausalLM" in (model / "config.json").read_text(encoding="utf-8")
