"""`rllib status RUN` and `rllib top RUN`: a run that goes on."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rllib_llm.cli.panel import user_errors
from rllib_llm.overseer.client import find_run

Folder = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or a stage's.")]
REFRESH_S = 1.0
PHASE_WIDTH = 24
SILENT_STYLE = "red"


def status(
    run: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what every process of a run does, and what the run waits for."""
    with user_errors():
        found = find_run(run).status()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        Console().print(view(found))


def top(run: Folder) -> None:
    """Show a run's status again and again, until Ctrl-C."""
    with user_errors():
        overseen = find_run(run)
        with Live(view(overseen.status()), screen=False, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(REFRESH_S)
                    live.update(view(overseen.status()), refresh=True)
            except KeyboardInterrupt:
                return


def view(found: dict[str, Any]) -> Group:
    """The processes of a run as a table of 80 columns, the diagnosis of each trial below it."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, justify in (("part", "left"), ("node", "left"), ("pid", "right"), ("v", "right")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("what it does")
    lines: list[Text] = []
    trials = [part for part in found["parts"] if part["kind"] == "trial"]
    for trial in trials:
        several = len(trials) > 1
        _add(table, trial, _short(trial, several))
        for part in found["parts"]:
            if part["kind"] != "trial" and part.get("trial") == trial.get("trial"):
                _add(table, part, f"  {_short(part, several)}")
        diagnosis = found["diagnoses"].get(trial["part"], {})
        lines.append(Text(diagnosis.get("text", ""), style="bold"))
        lines.append(_shares(trial))
    if not trials:
        return Group(Text("No trial has reported yet."))
    return Group(table, Text(""), *lines)


def _short(part: dict[str, Any], several: bool) -> str:
    name = part["part"]
    if part["kind"] == "trial":
        head = f"{part.get('stage', '')} · {part.get('algorithm', '')}"
        return f"{head} {part.get('trial', '')}" if several else head
    return name.partition(" of trial ")[0]


def _add(table: Table, part: dict[str, Any], name: str) -> None:
    if part["is_silent"]:
        text = Text(f"silent for {part['silent_seconds']:.0f} s", style=SILENT_STYLE)
    elif part["kind"] == "trial":
        doing = part.get("activity") or part["phase"]
        text = Text(f"iteration {part['iteration'] + 1}: {doing}, {part['seconds_in_phase']:.0f} s")
    else:
        text = Text(part["activity"])
    version = part.get("version", part.get("iteration"))
    table.add_row(name, part["node"], str(part["pid"]), _number(version), text)


def _number(value: Any) -> str:
    return "" if value is None else str(value)


def _shares(trial: dict[str, Any]) -> Text:
    """Where the time of the last iterations went, the most first."""
    recent = trial.get("recent_seconds") or {}
    total = sum(recent.values())
    if not total:
        return Text("")
    most = sorted(recent.items(), key=lambda item: -item[1])
    return Text(
        ", ".join(f"{name} {value / total:.0%}" for name, value in most if value / total >= 0.005),
        style="dim",
    )
