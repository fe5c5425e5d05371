"""Python's garbage collector in processes that somebody waits for."""

from __future__ import annotations

import gc


def forget_startup() -> None:
    """Takes everything that this process holds now out of the collector's sight, for good.

    To be called once a process has started; Ray Serve does it to its replicas. What torch,
    transformers and Ray make when they are imported are half a million objects; a full collection
    looks at each of them, and for a third of a second nothing else runs.
    """
    gc.collect()
    gc.freeze()
