"""Two versions of the weights side by side: rows finish on the one they began with.

    new rows ──▶ newest engine ── one step each, in turn ──▶ tokens
    rows that ask for it ──▶ older engine

A third version is loaded into the older engine once that is drained; while a load waits, the older
engine takes no more rows. Texts that are only scored count as rows of their engine: one of them is
read at each step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from rllib_llm.engines.engine_loop import EngineLoop, settle
from rllib_llm.engines.protocol import Ended, Engine, EngineEndedError, InFlight, Row, Tokens
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.modules.text_scores import TextScores


class VersionGoneError(ValueError):
    """The engine has no weights of the version that was asked for."""


@dataclass
class _Scoring:
    """Texts that are scored by the weights of one version."""

    texts: Sequence[Sequence[int]]
    top: int
    version: int | None
    done: Future[list[TextScores]]
    found: list[TextScores] = field(default_factory=list)


class HotSwapEngine(Engine):
    """Two engines as one. `load` is between two steps; `HotSwapLoader`'s does not stop the rows.

    Args:
        newest: a `TorchEngine`, or another engine with its `num_sampling`, `holds` and `score`.
        older: a second engine of the same model, at first without rows. With it rows in flight
            finish on their weights while new ones begin on newer ones.
    """

    def __init__(self, newest: Any, older: TorchEngine | None = None) -> None:
        engines = [newest] if older is None else [newest, older]
        self._engines = engines
        self._takes_older = False  # whether the older engine has weights, and takes rows
        self._waiting: Future[TorchEngine] | None = None
        self._pending: tuple[dict[str, torch.Tensor], int] | None = None  # for the older engine
        self._scorings: dict[TorchEngine, deque[_Scoring]] = {each: deque() for each in engines}

    @property
    def num_running(self) -> int:
        return sum(map(self._num_held, self._engines))

    def _num_held(self, engine: TorchEngine) -> int:
        """Rows of an engine, and texts that it has yet to score."""
        return engine.num_running + sum(
            len(each.texts) - len(each.found)
            for each in self._scorings[engine]
            if not each.done.done()
        )

    @property
    def num_sampling(self) -> int:
        """Rows that have a place in a batch."""
        return sum(engine.num_sampling for engine in self._engines)

    @property
    def num_waiting(self) -> int:
        """Rows that wait for one."""
        return max(0, self.num_running - self.num_sampling)

    @property
    def version(self) -> int | None:
        return self._engines[0].version

    @property
    def versions(self) -> list[int]:
        """The versions that rows may ask for, the newest first."""
        engines = self._engines if self._takes_older else self._engines[:1]
        return [engine.version for engine in engines if engine.version is not None]

    @property
    def rows_by_version(self) -> dict[int, int]:
        """Rows in it, and texts that are scored, by the version that they are of."""
        engines = reversed(self._engines)
        return {e.version: self._num_held(e) for e in engines if e.version is not None}

    def add(self, rows: Sequence[Row]) -> None:
        parts: dict[TorchEngine, list[Row]] = {}
        for row in rows:
            parts.setdefault(self.engine_of(row.version), []).append(row)
        for engine, part in parts.items():
            engine.add(part)

    def engine_of(self, version: int | None) -> TorchEngine:
        """The engine with these weights.

        Raises:
            ValueError: there is none.
        """
        if version is None or version == self._engines[0].version:
            return self._engines[0]
        if self._takes_older and version == self._engines[1].version:
            return self._engines[1]
        raise self._gone(version)

    def _gone(self, version: int | None) -> ValueError:
        return VersionGoneError(f"row.version={version!r} must be one of {self.versions!r}")

    def step(self) -> list[Ended]:
        ended = []
        for engine in reversed(self._engines):
            if self._scorings[engine]:
                self._score_one(engine)
            if engine.num_running:
                ended += engine.step()
        self._hand_over()
        self._load_pending()
        return ended

    def _score_one(self, engine: TorchEngine) -> None:
        """Scores the next text of an engine, of which all are scored by the same version."""
        scoring = self._scorings[engine][0]
        try:
            if not scoring.done.done():  # else it was cancelled
                if engine.version != scoring.version:
                    raise self._gone(scoring.version)
                text = scoring.texts[len(scoring.found)]
                scoring.found.append(engine.score(text, scoring.top))
                if len(scoring.found) < len(scoring.texts):
                    return
                settle(scoring.done, scoring.found)
        except ValueError as error:
            settle(scoring.done, error)
        self._scorings[engine].popleft()

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        found: dict[Hashable, Tokens] = {}
        for engine in self._engines:
            own = {i: at for i, at in zip(ids, starts, strict=True) if engine.holds(i)}
            if own:
                tokens = engine.sampled(list(own), list(own.values()))
                found |= dict(zip(own, tokens, strict=True))
        return [found[i] for i in ids]

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        ended = [each for engine in self._engines for each in engine.abort(ids)]
        self._hand_over()
        return ended

    def score(
        self, texts: Sequence[Sequence[int]], top: int, version: int | None,
        done: Future[list[TextScores]],
    ) -> None:  # fmt: skip
        """Scores texts in the next steps, see `TorchEngine.score`, all by one version, which is
        kept until they are done.

        Args:
            version: of the weights; None: the newest.
            done: gets the scores, or ValueError: there is no such version, or a text is too long.

        Raises:
            ValueError: there is no such version.
        """
        engine = self.engine_of(version)
        self._scorings[engine].append(_Scoring(texts, top, engine.version, done))

    # --- weights -----------------------------------------------------------------------------

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        """See `Engine.load`. Where rows finish, new ones begin on these weights once the older
        engine is drained; weights that come before are passed over for newer ones."""
        if in_flight != "finish" or len(self._engines) == 1 or self.version is None:
            self._engines[0].load(weights, version, in_flight)
            return
        self._takes_older, self._pending = False, (weights, version)
        self._load_pending()

    def _load_pending(self) -> None:
        if self._pending is not None and not self._num_held(self._engines[1]):
            pending, self._pending = self._pending, None
            self._engines[1].load(*pending)
            self.switch()

    def drained(self) -> Future[TorchEngine]:
        """The older engine, once it has no rows. It then accepts none until `switch` or `keep`, and
        the caller may use it in any thread."""
        self._takes_older = False
        self._waiting = Future()
        waiting = self._waiting
        self._hand_over()
        return waiting

    def _hand_over(self) -> None:
        if self._waiting is not None and not self._num_held(self._engines[1]):
            waiting, self._waiting = self._waiting, None
            waiting.set_result(self._engines[1])

    def switch(self) -> None:
        """Makes the older engine the newest."""
        self._engines.reverse()
        self._takes_older = True

    def keep(self) -> None:
        """Takes the older engine back as it is: nothing was put into it."""
        self._takes_older = self._engines[1].version is not None

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.set_exception(EngineEndedError("The engine was closed."))
        for engine in self._engines:
            engine.close()
            for scoring in self._scorings[engine]:
                settle(scoring.done, EngineEndedError("The engine was closed."))


class HotSwapLoader:
    """Loads weights into a `HotSwapEngine` that runs in a loop, in the caller's thread, while rows
    are sampled."""

    def __init__(self, loop: EngineLoop, engine: HotSwapEngine) -> None:
        self._loop, self._engine = loop, engine
        self._lock = threading.Lock()

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Waits until the older engine is drained, and then gives new rows these weights. One after
        the other, if many ask.

        Raises:
            ValueError: they are those of another model; nothing changes.
        """
        with self._lock:
            engine = self._loop.do(self._engine.drained).result().result()
            try:
                engine.load(weights, version)
                engine.open()
            except ValueError:
                self._loop.do(self._engine.keep).result()
                raise
            self._loop.do(self._engine.switch).result()
