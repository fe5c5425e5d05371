"""Two versions of the weights side by side: rows finish on the one they began with.

    new rows ──▶ newest lane ── one step each, in turn ──▶ tokens
    rows that ask for it ──▶ older lane

The weights of a third version are put into the older lane once it is empty; from the moment that
somebody waits for it, it takes no more rows. Texts that are only scored are rows of their lane,
too: one of them is read at each step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from rllib_llm.engines.engine_loop import EngineLoop, settle
from rllib_llm.engines.protocol import Ended, EngineEndedError, InFlight, Row, Tokens
from rllib_llm.engines.torch_engine import Scores, TorchEngine


class VersionGoneError(ValueError):
    """The engine has no weights of the version that was asked for."""


@dataclass
class _Scoring:
    """Texts that are scored by the weights of one version."""

    texts: Sequence[Sequence[int]]
    top: int
    version: int | None
    done: Future[list[Scores]]
    found: list[Scores] = field(default_factory=list)


class LaneEngine:
    """See `protocol.Engine`. `load` is between two steps; `LaneLoader`'s does not stop the rows.

    Args:
        older: an engine of its own with the same model and, at first, without rows. With it rows
            that are in the engine finish on their weights while new ones begin on newer ones.
    """

    def __init__(self, newest: TorchEngine, older: TorchEngine | None = None) -> None:
        self._lanes = [newest] if older is None else [newest, older]
        self._takes_older = False  # the older lane has weights, and takes rows
        self._waiting: Future[TorchEngine] | None = None
        self._pending: tuple[dict[str, torch.Tensor], int] | None = None  # for the older lane
        self._scorings: dict[TorchEngine, deque[_Scoring]] = {each: deque() for each in self._lanes}

    @property
    def num_running(self) -> int:
        return sum(map(self._num_held, self._lanes))

    def _num_held(self, lane: TorchEngine) -> int:
        """Rows of a lane, and texts that it is to score and that somebody waits for."""
        return lane.num_running + sum(
            len(each.texts) - len(each.found)
            for each in self._scorings[lane]
            if not each.done.done()
        )

    @property
    def num_sampling(self) -> int:
        """Rows that have a place in a batch."""
        return sum(lane.num_sampling for lane in self._lanes)

    @property
    def num_waiting(self) -> int:
        """Rows that wait for one."""
        return max(0, self.num_running - self.num_sampling)

    @property
    def version(self) -> int | None:
        return self._lanes[0].version

    @property
    def versions(self) -> list[int]:
        """Those that rows may ask for, the newest first."""
        lanes = self._lanes if self._takes_older else self._lanes[:1]
        return [lane.version for lane in lanes if lane.version is not None]

    @property
    def rows_by_version(self) -> dict[int, int]:
        """Rows in it, and texts that are scored, by the version that they are of."""
        lanes = reversed(self._lanes)
        return {lane.version: self._num_held(lane) for lane in lanes if lane.version is not None}

    def add(self, rows: Sequence[Row]) -> None:
        parts: dict[TorchEngine, list[Row]] = {}
        for row in rows:
            parts.setdefault(self.lane(row.version), []).append(row)
        for lane, part in parts.items():
            lane.add(part)

    def lane(self, version: int | None) -> TorchEngine:
        """The engine with these weights.

        Raises:
            ValueError: there is none.
        """
        if version is None or version == self._lanes[0].version:
            return self._lanes[0]
        if self._takes_older and version == self._lanes[1].version:
            return self._lanes[1]
        raise self._gone(version)

    def _gone(self, version: int | None) -> ValueError:
        return VersionGoneError(
            f"row.version={version!r} must be one of {self.versions!r}: other weights are gone. "
            "Leave it out for the newest."
        )

    def step(self) -> list[Ended]:
        ended = []
        for lane in reversed(self._lanes):
            if self._scorings[lane]:
                self._score_one(lane)
            if lane.num_running:
                ended += lane.step()
        self._hand_over()
        self._load_pending()
        return ended

    def _score_one(self, lane: TorchEngine) -> None:
        """Scores the next text of a lane, of which all are scored by the same version."""
        scoring = self._scorings[lane][0]
        try:
            if not scoring.done.done():  # else nobody waits for it any more
                if lane.version != scoring.version:
                    raise self._gone(scoring.version)
                text = scoring.texts[len(scoring.found)]
                scoring.found.append(lane.score(text, scoring.top))
                if len(scoring.found) < len(scoring.texts):
                    return
                settle(scoring.done, scoring.found)
        except ValueError as error:
            settle(scoring.done, error)
        self._scorings[lane].popleft()

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        found: dict[Hashable, Tokens] = {}
        for lane in self._lanes:
            own = {i: at for i, at in zip(ids, starts, strict=True) if lane.holds(i)}
            if own:
                tokens = lane.sampled(list(own), list(own.values()))
                found |= dict(zip(own, tokens, strict=True))
        return [found[i] for i in ids]

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        ended = [each for lane in self._lanes for each in lane.abort(ids)]
        self._hand_over()
        return ended

    def score(
        self,
        texts: Sequence[Sequence[int]],
        top: int,
        version: int | None,
        done: Future[list[Scores]],
    ) -> None:
        """Scores texts in the next steps, see `TorchEngine.score`, all by one version, which is
        kept until they are done.

        Args:
            version: of the weights; None: the newest.
            done: gets what was found, or ValueError: the version is gone, or a text is too long.

        Raises:
            ValueError: the version is gone.
        """
        lane = self.lane(version)
        self._scorings[lane].append(_Scoring(texts, top, lane.version, done))

    # --- weights -----------------------------------------------------------------------------

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        """See `Engine.load`. Where rows finish, new ones begin on these weights once the older lane
        is empty; weights that come before are passed over for newer ones."""
        if in_flight != "finish" or len(self._lanes) == 1 or self.version is None:
            self._lanes[0].load(weights, version, in_flight)
            return
        self._takes_older, self._pending = False, (weights, version)
        self._load_pending()

    def _load_pending(self) -> None:
        if self._pending is not None and not self._num_held(self._lanes[1]):
            pending, self._pending = self._pending, None
            self._lanes[1].load(*pending)
            self.switch()

    def empty_lane(self) -> Future[TorchEngine]:
        """The older lane, once it has no rows. It then accepts none until `switch` or `keep`, and
        the caller may use it in any thread."""
        self._takes_older = False
        self._waiting = Future()
        waiting = self._waiting
        self._hand_over()
        return waiting

    def _hand_over(self) -> None:
        if self._waiting is not None and not self._num_held(self._lanes[1]):
            waiting, self._waiting = self._waiting, None
            waiting.set_result(self._lanes[1])

    def switch(self) -> None:
        """New rows go to the other lane from now on."""
        self._lanes.reverse()
        self._takes_older = True

    def keep(self) -> None:
        """Takes the older lane back as it is: nothing was put into it."""
        self._takes_older = self._lanes[1].version is not None

    def close(self) -> None:
        if self._waiting is not None:
            self._waiting.set_exception(EngineEndedError("The engine was closed."))
        for lane in self._lanes:
            lane.close()
            for scoring in self._scorings[lane]:
                settle(scoring.done, EngineEndedError("The engine was closed."))


class LaneLoader:
    """Puts weights into the lanes of an engine that runs in a loop, in the caller's thread: rows go
    on being sampled meanwhile.
    """

    def __init__(self, loop: EngineLoop, engine: LaneEngine) -> None:
        self._loop, self._engine = loop, engine
        self._lock = threading.Lock()

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """Waits until the rows of the version before the newest have ended, and then gives new rows
        these weights. One after the other, if many ask.

        Raises:
            ValueError: they are those of another model; nothing changes.
        """
        with self._lock:
            lane = self._loop.do(self._engine.empty_lane).result().result()
            try:
                lane.load(weights, version)
                lane.open()
            except ValueError:
                self._loop.do(self._engine.keep).result()
                raise
            self._loop.do(self._engine.switch).result()
