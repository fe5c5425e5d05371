"""Search over a folder of texts by words, ranked as BM25 does."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_llm.envs.tools.toolbox import text_parameter, tool_schema

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # Robertson & Zaragoza 2009, section 3: usual values
_SUFFIXES = (".txt", ".md")


class SearchTool:
    """A tool `search(query)` over passages, the paragraphs of the texts in a folder.

    Args:
        folder: with .txt or .md files of UTF-8, whose titles are their paths in it without the
            suffix; or {title: text}.
        num_results: passages in an answer.
        max_chars: of a passage.
        name: of the tool.

    Raises:
        ValueError: no text there, or a file in another encoding.
    """

    def __init__(
        self, folder: str | Path | Mapping[str, str], *, num_results: int = 3,
        max_chars: int = 500, name: str = "search",
    ) -> None:  # fmt: skip
        texts = folder.items() if isinstance(folder, Mapping) else _read(Path(folder))
        self.passages = [
            (title, passage.strip())
            for title, text in texts
            for passage in re.split(r"\n\s*\n", text)
            if passage.strip()
        ]
        if not self.passages:
            raise ValueError(
                f"folder={str(folder)[:80]!r} must hold texts ({', '.join(_SUFFIXES)}): there is "
                "nothing to search. Name the folder of the texts."
            )
        self.num_results, self.max_chars, self.name = num_results, max_chars, name
        self._counts = [Counter(_words(f"{title} {text}")) for title, text in self.passages]
        self._lengths = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._lengths) / len(self._lengths)
        self._places: dict[str, list[int]] = {}  # of the passages that hold a word
        for place, counts in enumerate(self._counts):
            for word in counts:
                self._places.setdefault(word, []).append(place)
        query = text_parameter("query", "words to look for")
        self.schema = tool_schema(name, "Finds passages about the words of a query.", query)

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """The best passages, best first, or that there is none."""
        found = self.search(str(arguments["query"]))
        if not found:
            return "Nothing found."
        return "\n\n".join(f"{title}: {text[: self.max_chars]}" for title, text in found)

    def search(self, query: str) -> list[tuple[str, str]]:
        """(title, passage) of the passages that match best, those of no common word left out."""
        words = _words(query)
        places = {place for word in words for place in self._places.get(word, ())}
        scored = [(self._score(words, place), -place) for place in places]
        best = sorted(scored, reverse=True)[: self.num_results]
        return [self.passages[-place] for _, place in best]

    def _score(self, words: list[str], i: int) -> float:
        counts, total = self._counts[i], len(self.passages)
        norm = _K1 * (1 - _B + _B * self._lengths[i] / self._mean)
        score = 0.0
        for word in words:
            if count := counts.get(word, 0):
                holding = len(self._places[word])
                rarity = math.log(1 + (total - holding + 0.5) / (holding + 0.5))
                score += rarity * count * (_K1 + 1) / (count + norm)
        return score


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _read(folder: Path) -> list[tuple[str, str]]:
    """(title, text) of the files in a folder and in those within it."""
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()
    )
    return [(path.relative_to(folder).with_suffix("").as_posix(), _text(path)) for path in files]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without a mark of byte order
    except UnicodeDecodeError as error:
        raise ValueError(
            f"folder: {str(path)!r} must be written in UTF-8: {error}. Convert it, for example "
            "with iconv -f latin1 -t utf8."
        ) from error
