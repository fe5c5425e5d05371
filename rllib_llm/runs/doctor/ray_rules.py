"""Whether Ray starts here and answers, and whether a cluster does."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rllib_llm.runs.doctor.finding import Finding

SECONDS_TO_START = 60.0
STORE_BYTES = 80 * 1024**2  # the least that Ray accepts


def ray_rules() -> Iterator[Finding]:
    """Starts a small Ray of its own, unless one runs in this process, and asks it for an answer."""
    import ray

    started = not ray.is_initialized()
    begin = time.monotonic()
    try:
        if started:
            ray.init(
                address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
                object_store_memory=STORE_BYTES, logging_level="ERROR",
            )  # fmt: skip
        answer = ray.get(ray.put("here"), timeout=SECONDS_TO_START)
        seconds = time.monotonic() - begin
        if answer == "here" and started:
            yield Finding(
                "ray.start", "note", f"Ray {ray.__version__} starts in {seconds:.1f} s", "", ""
            )
    except (OSError, RuntimeError, ConnectionError, TimeoutError, ValueError) as error:
        yield Finding(
            "ray.start", "error", f"Ray does not start: {type(error).__name__}: {error}",
            "samplers and trials need it",
            "Look at /tmp/ray/session_latest/logs, free ports and memory, and stop old sessions "
            "(ray stop).",
        )  # fmt: skip
    finally:
        if started:
            ray.shutdown()
