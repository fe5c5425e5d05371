"""The end of a wait, from outside, without a task of its own for what waits."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Any


class Cutoff:
    """Ends what the current task does in a block.

    with Cutoff() as cutoff:
        events.call_later(seconds, cutoff.cut)
        return await something          # or the block ends here, when it was cut
    raise TooLateError

    `asyncio.wait_for` would start a task (before Python 3.12), which costs a request two turns of
    the event loop.
    """

    def __init__(self) -> None:
        self.was_cut = self._is_over = False
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> Cutoff:
        self._task = asyncio.current_task()
        return self

    def cut(self, *_: Any) -> None:
        """Ends the block, unless it is over. For the event loop: as a timer or callback."""
        if self._task is not None and not self._is_over:
            self.was_cut = True
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._is_over = True
        if not self.was_cut or kind is not asyncio.CancelledError:
            return False
        if sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()
        return True
