"""A sampler's progress: current prompts, activity and duration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_llm.overseer.diagnosis import PhaseClock
from rllib_llm.overseer.link import Link

IDLE, WEIGHTS, GENERATING = "waiting for a request", "loading weights", "generating"
JUDGING, STARTING = "judging", "starting"
SECONDS_BETWEEN_WORDS = 1.0


class SamplerWatch:
    """Phases of a sampler, and how far it is; silent until it is joined to a run's overseer."""

    def __init__(self) -> None:
        self.clock = PhaseClock(STARTING)
        self._prompts: tuple[int, int] | None = None
        self._tokens = self._max_tokens = 0
        self._version: int | None = None
        self._link: Link | None = None
        self._facts: dict[str, Any] = {}
        self._say: Callable[[str], None] | None = None
        self._said = 0.0  # monotonic seconds

    def tell(self, say: Callable[[str], None]) -> None:
        """Calls `say` once a second while the next request is generated, to report its progress."""
        self._say = say

    def join(self, folder: Path, part: str, **facts: Any) -> None:
        """Reports to the overseer of the Tune run in `folder` from now on."""
        self._facts = facts
        self._link = Link(folder, part, self._describe)

    @property
    def on_step(self) -> Callable[[], None] | None:
        """The callback of a decode loop after each token; None if nobody listens."""
        return None if self._link is None and self._say is None else self._token

    def begin(self, position: int, num_prompts: int) -> None:
        """Prompts of a request."""
        self._prompts = (position, position + num_prompts - 1)
        self._tokens = self._max_tokens = 0
        self.clock.enter(WEIGHTS)

    def generating(self, version: int, max_tokens: int) -> None:
        """With these weights, so many tokens at most."""
        self._version, self._max_tokens = version, max_tokens
        self.clock.enter(GENERATING)

    def _token(self) -> None:
        """One more token of each completion in the batch."""
        self._tokens += 1
        if self._say is not None and time.monotonic() - self._said >= SECONDS_BETWEEN_WORDS:
            self._said = time.monotonic()
            self._say(f"{GENERATING} token {self._tokens} of {self._max_tokens}")

    def judging(self) -> None:
        """The completions are there."""
        self.clock.enter(JUDGING)

    def end(self) -> None:
        """The request is answered, or failed."""
        self._prompts = self._say = None
        self.clock.enter(IDLE)

    def text(self) -> str:
        """ "41 s generating for prompts 812-815, 380 of 512 tokens"."""
        text = f"{self.clock.seconds_in_phase:.0f} s {self.clock.phase}"
        prompts = self._prompts
        if prompts is not None:
            text += f" for prompts {prompts[0]}-{prompts[1]}"
        if self.clock.phase == GENERATING and self._tokens:
            text += f", {self._tokens} of {self._max_tokens} tokens"
        return text

    def close(self) -> None:
        """Ends the reports."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _describe(self) -> dict[str, Any]:
        return {
            "kind": "sampler",
            **self._facts,
            "version": self._version,
            "phase": self.clock.phase,
            "activity": self.text(),
            "seconds_in_phase": self.clock.seconds_in_phase,
            "seconds": self.clock.seconds(),
        }
