"""Code blocks of Markdown pages: found, written to files where they have a title, and run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its file name (or None), the line it begins at."""

    language: str
    title: str | None
    code: str
    line: int
    runs: bool  # False where the page says `notest`


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        language, _, rest = info.partition(" ")
        title = _TITLE.search(rest)
        found.append(
            Block(
                language=language,
                title=title["title"] if title else None,
                code=match["code"],
                line=text.count("\n", 0, match.start()) + 2,
                runs="notest" not in rest,
            )
        )
    return found


def run_python(block: Block, page: Path, namespace: dict) -> None:
    """Executes the block in `namespace`; a traceback shows the page's own lines."""
    padded = "\n" * (block.line - 1) + block.code
    exec(compile(padded, str(page), "exec"), namespace)
