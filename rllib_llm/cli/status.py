"""`rllib status | top | pause | resume | scale | checkpoint | stop RUN`: commands for a running
run."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rllib_llm.cli.session import user_errors
from rllib_llm.overseer.client import find_run
from rllib_llm.overseer.overseer import DONE, WAITING
from rllib_llm.shared.errors import UserError

Folder = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, or a stage's.")]
REFRESH_S = 1.0
PHASE_WIDTH = 24
SILENT_STYLE = "red"


def status(
    run: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the state of every process of a run, and what limits its speed."""
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


DEFAULT_WAIT_S = 60.0
NOT_ANSWERED = 2  # the exit code where a command was refused or lost
Wait = Annotated[
    float,
    typer.Option(
        "--wait", min=0, help="Seconds to wait for the answer, which comes after this iteration."
    ),
]


def pause(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a run wait after its iteration; nothing is lost."""
    _tell(run, "pause", wait)


def resume(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a paused run go on."""
    _tell(run, "resume", wait)


def scale(
    run: Folder,
    samplers: Annotated[int, typer.Option("--samplers", help="Samplers from now on.")],
    wait: Wait = DEFAULT_WAIT_S,
) -> None:
    """Change the number of samplers of a running run; does not change what is learnt."""
    _tell(run, "scale", wait, samplers=samplers)


def checkpoint(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Have a checkpoint saved after this iteration."""
    _tell(run, "checkpoint", wait)


def stop(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Save a checkpoint and end the run, like one Ctrl-C; continue with --resume."""
    _tell(run, "stop", wait)


def _tell(folder: str, command: str, wait: float, **arguments: Any) -> None:
    with user_errors():
        told = find_run(folder).tell(command, timeout_s=wait, **arguments)
        if not told:
            raise UserError(
                f"run={folder!r} must have a trial that answers: none has been heard in the last "
                "seconds. Look with rllib status."
            )
    for one in told:
        print(f"{one['part']}: {one['answer'] or 'told; it does so after this iteration'}")
    if any(one["state"] not in (DONE, WAITING) for one in told):
        raise typer.Exit(NOT_ANSWERED)
