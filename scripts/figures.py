"""Writes the recorded figures into benchmarks/README.md and docs/explanations/scale.md.

    python scripts/figures.py

`benchmarks/results/recorded.json` holds them, each table with its command, processor, load, rounds,
the day and the commit in which it was recorded. A table's rows stand there, or in a file of the
same folder that its `lines` name, as a benchmark wrote it: one object of JSON a line, of which
`keys` says what goes into the columns: a key of the object, or a name of `COMPUTED`. A page has a
marker where a table stands.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "benchmarks" / "README.md", ROOT / "docs" / "explanations" / "scale.md")
RECORDED = ROOT / "benchmarks" / "results" / "recorded.json"
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


Line = dict[str, Any]


def tree_rounds(line: Line, _: list[Line]) -> int:
    """Copies that one node after the other sends until all nodes have one, each holder sending."""
    return math.ceil(math.log2(line["nodes"] + 1))


def tree_s(line: Line, lines: list[Line]) -> str:
    """Seconds of a tree: as many rounds as `tree_rounds`, each as long as one measured link's copy
    to one receiver takes; of a size that has none, the largest's, by bytes."""
    alone = {each["mb"]: each for each in lines if each["receivers"] == 1}
    link = alone.get(line["mb"], alone[max(alone)])
    seconds = min(link["s_at_once"], link["s_in_turns"]) * line["mb"] / link["mb"]
    return f"{tree_rounds(line, lines) * seconds:.2f}"


COMPUTED: dict[str, Callable[[Line, list[Line]], Any]] = {
    "tree_rounds": tree_rounds,
    "tree_s": tree_s,
}


def rows_of_lines(name: str, keys: list[str]) -> list[list[str]]:
    lines = [json.loads(text) for text in (RECORDED.parent / name).read_text("utf-8").splitlines()]
    return [
        [str(COMPUTED[key](line, lines) if key in COMPUTED else line[key]) for key in keys]
        for line in lines
    ]


def pages_with(recorded: dict[str, Any], pages: dict[Path, str]) -> dict[Path, str]:
    """The pages with every marked table filled in.

    Raises KeyError for a marker without figures, ValueError for figures without a marker.
    """
    tables = {name: table(entry) for name, entry in recorded["tables"].items()}
    tables["headlines"] = headlines(recorded["headlines"])
    shown = {name for page in pages.values() for _, name, _ in MARKED.findall(page)}
    if left := sorted(tables.keys() - shown):
        raise ValueError(f"no page has a marker for {', '.join(left)}")
    return {
        path: MARKED.sub(lambda m: f"{m[1]}\n{tables[m[2]]}\n\n{m[3]}", page)
        for path, page in pages.items()
    }


def read() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text(encoding="utf-8")))


if __name__ == "__main__":
    written = {page: page.read_text(encoding="utf-8") for page in PAGES}
    for path, filled in pages_with(read(), written).items():
        path.write_text(filled, encoding="utf-8")
