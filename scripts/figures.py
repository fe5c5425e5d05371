"""Writes the recorded figures into benchmarks/README.md.

    python scripts/figures.py

`benchmarks/results/recorded.json` holds them, each table with its command, processor, load, rounds,
the day and the commit in which it was recorded. A table's rows stand there, or in a file of the
same folder that its `lines` name, as a benchmark wrote it: one object of JSON a line, of which
`keys` says what goes into the columns. The page has a marker where a table stands.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
PAGE = FOLDER / "README.md"
RECORDED = FOLDER / "results" / "recorded.json"
MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADS = ("question", "value", "processor", "recorded", "rounds", "command")


def rows_of(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def headlines(entries: list[dict[str, Any]]) -> str:
    rows = [[f"`{e[h]}`" if h == "command" else f"{e[h]}" for h in HEADS] for e in entries]
    return rows_of(list(HEADS), rows)


def table(entry: dict[str, Any]) -> str:
    said = [f"`{entry['command']}`", entry.get("processor", "processor not recorded")]
    said += [f"{key} {entry[key]}" for key in ("load", "rounds", "code") if key in entry]
    said.append(f"recorded {entry['recorded']} in {entry['recorded_in']}")
    rows = entry["rows"] if "rows" in entry else rows_of_lines(entry["lines"], entry["keys"])
    return f"{rows_of(entry['columns'], rows)}\n\n{'; '.join(said)}."


def rows_of_lines(name: str, keys: list[str]) -> list[list[str]]:
    lines = (RECORDED.parent / name).read_text(encoding="utf-8").splitlines()
    return [[str(line[key]) for key in keys] for line in map(json.loads, lines)]


def page_with(recorded: dict[str, Any], page: str) -> str:
    """The page with every marked table filled in.

    Raises KeyError for a marker without figures, ValueError for figures without a marker.
    """
    tables = {name: table(entry) for name, entry in recorded["tables"].items()}
    tables["headlines"] = headlines(recorded["headlines"])
    shown = {name for _, name, _ in MARKED.findall(page)}
    if left := sorted(tables.keys() - shown):
        raise ValueError(f"{PAGE.name} has no marker for {', '.join(left)}")
    return MARKED.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[3]}", page)


def read() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


if __name__ == "__main__":
    PAGE.write_text(page_with(read(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
