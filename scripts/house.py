"""The rooms of the package and the imports between them, as a Mermaid drawing in a page.

    python scripts/house.py            writes it into docs/explanations/house.md
    python scripts/house.py --check    exits with 1 where the page is not what the code says

An arrow leads from the room that imports to the room that is imported; imports inside functions
and for type checking count like all others. A room is a folder of the package; the files beside
the folders are one room, `shared`.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rllib_llm"
PAGE = ROOT / "docs" / "explanations" / "house.md"
BEGIN, END = "<!-- drawing: made by scripts/house.py -->\n", "<!-- end of drawing -->\n"
SHARED = "shared"


def room(module: str) -> str:
    """The room of a dotted module name of the package."""
    parts = module.split(".")
    if len(parts) > 1 and (PACKAGE / parts[1]).is_dir():
        return parts[1]
    return SHARED


def imported_modules(path: Path) -> set[str]:
    """Dotted names of the package's modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(_module_or_name(node.module, alias.name) for alias in node.names)
    return {name for name in found if name.partition(".")[0] == PACKAGE.name}


def _module_or_name(module: str, name: str) -> str:
    inside = ROOT.joinpath(*module.split("."), f"{name}.py")
    return f"{module}.{name}" if inside.is_file() else module


def module_imports() -> dict[str, set[str]]:
    """For each module of the package the modules of it that it imports."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): imported_modules(path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__init__.py"
    }


def arrows() -> dict[str, set[str]]:
    """For each room the other rooms that it imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, imported in module_imports().items():
        found[room(module)] |= {room(name) for name in imported} - {room(module)}
    return dict(found)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def drawing() -> str:
    """The rooms and arrows in Mermaid's words, and how large each room is."""
    graph = arrows()
    lines = ["```mermaid", "flowchart TD"]
    for name in sorted(graph):
        files = [path for path in PACKAGE.rglob("*.py") if room(_dotted(path)) == name]
        lines.append(f'    {name}["{name}<br/>{len(files)} files"]')
    lines += [f"    {a} --> {b}" for a in sorted(graph) for b in sorted(graph[a])]
    return "\n".join([*lines, "```", ""])


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def with_drawing(page: str) -> str:
    """`page` with the drawing of today between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + drawing() + END + after


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    drawn = with_drawing(page)
    if "--check" in sys.argv:
        return int(page != drawn)
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
