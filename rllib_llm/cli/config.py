"""`rllib config ALGO`: every setting of an algorithm, with unit, range, default and meaning."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rllib_llm.cli.panel import user_errors
from rllib_llm.shared.errors import UserError, suggestion


def show_config(
    algo: Annotated[str, typer.Argument(help="Algorithm: PPOPtx, SFT, GRPO, ...")],
    search: Annotated[
        str, typer.Option("--filter", "-f", help="Only those with this text in them.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of JSON objects instead.")
    ] = False,
) -> None:
    """List an algorithm's settings: what each may be, its default, and when it has an effect."""
    with user_errors():
        from rllib_llm.config.listing import settings_of

        rows = [row for row in settings_of(_config_class(algo)) if _has(row, search)]
        if not rows:
            raise UserError(f"--filter={search!r} must be in a setting: it is in none of {algo}'s.")
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    console = Console()
    for section in dict.fromkeys(row["section"] for row in rows):
        console.print(_table(section, [row for row in rows if row["section"] == section]))


def _config_class(algo: str) -> type:
    from rllib_llm.algorithms.registry import ALGORITHMS
    from rllib_llm.runs.experiment import algorithm_class

    config_class = type(algorithm_class(algo, "algo").get_default_config())
    if not hasattr(config_class, "sections"):
        raise UserError(
            f"algo={algo!r} must be an algorithm of this package: RLlib documents its own. "
            f"{suggestion(algo, ALGORITHMS)}"
        )
    return config_class


def _has(row: dict[str, Any], text: str) -> bool:
    return text.lower() in " ".join(map(str, row.values())).lower()


def _table(section: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f".{section}(...)", title_justify="left", title_style="bold", box=None)
    table.add_column("setting", style="cyan", no_wrap=True)
    table.add_column("default", style="green", max_width=24)
    table.add_column("what it is", ratio=1)
    for row in rows:
        bounds = f" [{row['range']}]" if row["range"] else ""
        parts = [
            f"{row['meaning']}{bounds}.",
            row["note"],
            f"Acts where {row['acts']}." if row["acts"] else "",
            f"TRL: {', '.join(row['trl'])}." if row["trl"] else "",
        ]
        what = " ".join(filter(None, parts))
        table.add_row(row["name"], escape(row["default"]), escape(what))
    return table
