"""Wall and CPU seconds of named spans of a run, taken by subclasses with timed methods."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Own time of each span, [wall seconds, CPU seconds of all threads], since the last `take`.

    A span inside another takes its time from the outer one: all spans add up to the outermost.
    """

    def __init__(self) -> None:
        self._totals: dict[str, list[float]] = {}
        self._inner: list[list[float]] = []  # of each open span, the time of spans inside it

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._inner.append([0.0, 0.0])
        started = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = time.perf_counter() - started[0], time.process_time() - started[1]
            inner = self._inner.pop()
            total = self._totals.setdefault(name, [0.0, 0.0])
            for k in (0, 1):
                total[k] += spent[k] - inner[k]
                if self._inner:
                    self._inner[-1][k] += spent[k]

    def take(self) -> dict[str, list[float]]:
        """All totals, which start at zero again."""
        totals, self._totals = self._totals, {}
        return totals

    def timed(self, function: Callable, name: str) -> Callable:
        """`function` as the span `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return call

    def timed_class(self, cls: type, spans: dict[str, str]) -> type:
        """A subclass of `cls` with timed methods: method name -> span."""

        def override(method: str, name: str) -> Callable:
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                with self.span(name):
                    return getattr(cls, method)(instance, *args, **kwargs)

            return call

        return type(cls.__name__, (cls,), {m: override(m, name) for m, name in spans.items()})

    def timed_runner(self, cls: type, **spans: str) -> type:
        """A sampler class with the spans "generate" and "judge", and those of other methods."""
        watch = self
        timed = self.timed_class(cls, spans)

        class TimedRunner(timed):  # type: ignore[misc, valid-type]
            def make_env(self) -> None:
                super().make_env()
                self.env.step = watch.timed(self.env.step, "judge")

            def _make_policy(self) -> Any:
                policy = super()._make_policy()
                policy.generate = watch.timed(policy.generate, "generate")
                return policy

        return TimedRunner


def add(*spans: list[float]) -> list[float]:
    """The sum of [wall, CPU] pairs."""
    return [sum(span[k] for span in spans) for k in (0, 1)]
