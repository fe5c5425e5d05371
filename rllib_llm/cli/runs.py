"""Commands for the folder of a run: `rllib report | rollouts | verify RUN` read its results, `rllib
status | top | pause | resume | scale | checkpoint | stop RUN` ask its overseer while it runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from rllib_llm.cli.options import AsJson
from rllib_llm.cli.session import new_folder, prepare, user_errors
from rllib_llm.overseer.phases import shares
from rllib_llm.overseer.service import DONE, WAITING, find_run
from rllib_llm.shared.errors import require
from rllib_llm.shared.storage import place


def report(
    runs: Annotated[list[str], Argument(
        metavar="RUN [RUN]", help="Folder or URL of a run, a stage or a trial; or of two.")],
    output: Annotated[str | None, Option(
        "--output", "-o", help="The page. Default: report.html in the (first) run's folder."
    )] = None,
) -> None:  # fmt: skip
    """Write a run's report page, during or after the run: one HTML file for any browser."""
    with user_errors():
        from rllib_llm.runs.report_page import PAGE_FILE, find_trials, write_page

        groups = {}
        for run in runs:
            folder = place(run)
            name = (folder.resolve() if isinstance(folder, Path) else folder).name
            groups[run if name in groups else name] = find_trials(folder)
        print(write_page(groups, place(output) if output else place(runs[0]) / PAGE_FILE))


NUM_SHOWN = 5


def rollouts(
    run: Annotated[str, Argument(help="Folder or URL of a run, a stage, a trial or its rollouts.")],
    where: Annotated[str | None, Option(
        "--where", "-w", help="SQL condition: \"status = 'trained' AND score > 0.5\".")] = None,
    sort: Annotated[str | None, Option(
        "--sort", "-s", help="A column, highest first, or 'COLUMN asc'.")] = None,
    show: Annotated[int, Option(
        "--show", "-n", min=0, help="How many completions are printed.")] = NUM_SHOWN,
    export: Annotated[str | None, Option(
        help="FILE.jsonl, or a FOLDER that Hugging Face's load_dataset reads.")] = None,
    form: Annotated[Literal["rows", "examples"], Option(
        "--as", help="What is exported: the rows as they are kept, or examples for a trainer: "
        "ids, positions, segments, loss weights, both log-probs.")] = "rows",
    length: Annotated[int | None, Option(
        "--length", min=1, help="Of examples, tokens: rollouts are packed to it. Default: padded.")
    ] = None,
    columns: Annotated[bool, Option(
        "--columns", help="List the columns and their types.")] = False,
) -> None:  # fmt: skip
    """Look at the completions that a run sampled: trained, rejected, failed and held-out ones.

    Conditions are SQL, read by DuckDB: pip install 'rllib-llm[rollouts]'.
    """
    console = Console(highlight=False)
    with user_errors():
        from rllib_llm.data.rollouts import open_rollouts, query, rollout_folders

        found = open_rollouts(rollout_folders(run))
        if columns:
            for field in found.schema:
                console.print(f"{field.name:16} {field.type}", markup=False)
            return
        limit = None if export is not None else show
        try:
            table = query(found, where=where, sort=sort, limit=limit)
        except FileNotFoundError:  # the run has merged files meanwhile
            found = open_rollouts(rollout_folders(run))
            table = query(found, where=where, sort=sort, limit=limit)
        if form == "examples":
            from rllib_llm.data.examples import training_examples

            require(export is not None, "--as", "examples", "be given with --export", "", "")
            table = training_examples(table, length)
        if export is not None:
            console.print(_export(table, export), soft_wrap=True)
            return
        if where:
            console.print("All rollouts of the run, without --where:")
        envs = _print_summary(console, found)
        rows = table.to_pylist()
    if show and not rows:
        console.print(f"No completion matches --where {where!r}." if where else "There is none.")
    for row in rows:
        _print_row(console, row, names_env=len(envs) > 1)


def _print_summary(console: Console, found: Any) -> Collection[str]:
    """Prints it; the names of the environments."""
    from rllib_llm.data.rollouts import reasons, summary

    of_envs = summary(found, "env")
    several = of_envs if len(of_envs) > 1 else {}
    for status, counted in [*summary(found).items(), *several.items()]:
        score = "" if counted["score"] is None else f", mean score {counted['score']:.4g}"
        console.print(
            f"{status}: {counted['completions']:.0f} completions, {counted['tokens']:.0f} tokens"
            f"{score}"
        )
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons(found).items()))
    if why:
        console.print(f"reasons: {why}")
    return of_envs


def _print_row(console: Console, row: dict[str, Any], *, names_env: bool = False) -> None:
    reason = f" ({row['reason']})" if row["reason"] else ""
    parts = [
        f"iteration {row['iteration']}",
        f"prompt {row['position']}, completion {row['sample']}",
        *([row["env"]] if names_env else ()),
        f"{row['status']}{reason}",
        *(f"{name} {row[name]:.4g}" for name in ("score", "reward") if row[name] is not None),
        *(f"{name} {value:.4g}" for name, value in json.loads(row["rewards"] or "{}").items()),
        f"{row['tokens']} tokens, {row['finish_reason']}",
        *([f"row {row['row']}"] if row["row"] else ()),
    ]
    console.print(f"\n[bold]{escape(' · '.join(parts))}[/bold]", soft_wrap=True)
    if row["images"]:
        console.print(f"images: {', '.join(row['images'])}", soft_wrap=True)
    if row["prompt"] is None:
        console.print(f"prompt ids {row['prompt_ids']}\ncompletion ids {row['completion_ids']}")
        return
    # A terminal shows by its brightness where the completion begins; turns have lines of their own.
    glued = console.is_terminal and row["messages"] is None
    for name, style in (("prompt", "dim"), ("completion", "")):
        if not console.is_terminal:
            console.print(f"{name}: ", end="")
        end = "" if glued and name == "prompt" else "\n"
        console.print(row[name], style=style, markup=False, end=end, soft_wrap=True)


def _export(table: Any, target: str) -> str:
    """Write the rows of `table`, and say where they are."""
    require(table.num_rows, "--where", ..., "match at least one row", "there is none to export", "")
    path = Path(target).expanduser()
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for batch in table.to_batches(max_chunksize=1024):
                for row in batch.to_pylist():
                    file.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")
        return f"{table.num_rows} rows in {path}"
    is_folder = not path.suffix and not path.is_file()
    require(is_folder, "--export", target, "end in .jsonl, or be a folder", "", "")
    import pyarrow.parquet as pq

    path = new_folder("--export", target, "a data set is all that is in it")
    path.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path / "train-00000-of-00001.parquet", compression="zstd")
    return f"{table.num_rows} rows in {path}: datasets.load_dataset({str(path)!r})"


def verify(
    run: Annotated[str, Argument(help="Folder or URL of a run, a stage or a trial.")],
    samples: Annotated[int, Option(
        "--samples", "-n", min=1, help="Completions of each trial.")] = 16,
    seed: Annotated[int, Option(help="Which completions are drawn.")] = 0,
) -> None:  # fmt: skip
    """Sample stored completions again from the checkpoints' weights, and compare.

    Exits with 1 where more than round-off differs, or nothing can be compared.
    """
    prepare()
    with user_errors():
        from rllib_llm.runs import verify as verification

        found = verification.verify(run, samples, seed)
    console = Console(highlight=False)
    for each in found:
        console.print(str(each), markup=False, soft_wrap=True)
    if not all(each.agrees for each in found):
        raise typer.Exit(1)


Folder = Annotated[str, Argument(
    metavar="RUN", help="The folder of a run with `overseer: true`, or of a stage of it."
)]  # fmt: skip
REFRESH_S = 1.0
SILENT_STYLE = "red"


def status(run: Folder, as_json: AsJson = False) -> None:
    """Show the state of every process of a run, and what limits its speed."""
    with user_errors():
        found = find_run(run).status()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        Console().print(view(found))


def top(run: Folder) -> None:
    """Show a run's status, refreshed every second, until Ctrl-C."""
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
        # Where the time of the last iterations went, the most first.
        found_shares = shares(trial.get("recent_seconds") or {}).items()
        most = sorted(found_shares, key=lambda item: -item[1])
        text = ", ".join(f"{name} {x:.0%}" for name, x in most if x >= 0.005)
        lines.append(Text(text, style="dim"))
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
        iteration, seconds = part["iteration"] + 1, part["seconds_in_phase"]
        text = Text(f"iteration {iteration}: {part['activity']}, {seconds:.0f} s")
    else:
        text = Text(f"{part['seconds_in_phase']:.0f} s {part['activity']}")
    version = part.get("version", part.get("iteration"))
    shown = "" if version is None else str(version)
    table.add_row(name, part["node"], str(part["pid"]), shown, text)


DEFAULT_WAIT_S = 60.0
NOT_ANSWERED = 2  # the exit code where a command was refused or lost
Wait = Annotated[float, Option(
    min=0, help="Seconds to wait for the answer, which comes after the iteration."
)]  # fmt: skip


def pause(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Pause a run after its current iteration; nothing is lost."""
    _tell(run, "pause", wait)


def resume(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Resume a paused run."""
    _tell(run, "resume", wait)


def scale(
    run: Folder,
    samplers: Annotated[int, Option(help="The new number of samplers.")],
    wait: Wait = DEFAULT_WAIT_S,
) -> None:
    """Change the number of samplers of a running run; does not change what is learnt."""
    _tell(run, "scale", wait, samplers=samplers)


def checkpoint(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Save a checkpoint after the current iteration."""
    _tell(run, "checkpoint", wait)


def stop(run: Folder, wait: Wait = DEFAULT_WAIT_S) -> None:
    """Save a checkpoint and end the run, like one Ctrl-C; continue with --resume."""
    _tell(run, "stop", wait)


def _tell(folder: str, command: str, wait: float, **arguments: Any) -> None:
    with user_errors():
        commands = find_run(folder).tell(command, timeout_s=wait, **arguments)
        require(commands, "run", folder, "have a running trial", "none has reported lately",
                "See rllib status")  # fmt: skip
    for each in commands:
        answer = each["answer"] or "received; carried out after the current iteration"
        print(f"{each['part']}: {answer}")
    if any(each["state"] not in (DONE, WAITING) for each in commands):
        raise typer.Exit(NOT_ANSWERED)
