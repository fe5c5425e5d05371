"""`rllib report RUN [RUN]`: the report page of a run, or of two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rllib_llm.cli.panel import user_errors


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN]", help="Folder of a run, a stage or a trial; or of two."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page. Default: report.html in the (first) run's folder."
        ),
    ] = None,
) -> None:
    """Write a run's report page, also while the run goes on: one HTML file, for any browser."""
    with user_errors():
        from rllib_llm.runs.report_page import PAGE_FILE, find_trials, write_page

        groups = {}
        for run in runs:
            name = run.expanduser().resolve().name
            name = name if name not in groups else str(run)
            groups[name] = find_trials(run)
        print(write_page(groups, output or runs[0].expanduser() / PAGE_FILE))
