"""Prompts with their completions before and after training, side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

MAX_CHARS = 220


def before_after_table(pairs: list[tuple[dict, dict]], num: int = 5) -> Table:
    """Return a table of `num` prompts spread over `pairs`: both completions, with scores."""
    step = max(1, len(pairs) // num)
    table = Table(show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("before", ratio=3)
    table.add_column("after", ratio=3)
    for before, after in pairs[::step][:num]:
        table.add_row(Text(_short(before["prompt"])), _cell(before), _cell(after))
    return table


def _cell(row: dict[str, Any]) -> Group:
    return Group(Text(_short(row["completion"]) or "(nothing)"), Text(_scores(row), style="dim"))


def _scores(row: dict[str, Any]) -> str:
    """Return the score and, where it is there, the gold score, e.g. "score 1.32  gold 3.00"."""
    shown = {"score": row.get("score"), "gold": row.get("gold_score")}
    return "  ".join(
        f"{name} {value:.2f}" for name, value in shown.items() if isinstance(value, int | float)
    )


def _short(text: str) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
