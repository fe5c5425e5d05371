"""A limit on how long a trial may take to be set up.

Tune counts a trial as running once it is set up, and waits for that for ever; `RestartHungTrials`
can kill only what is running. So a process of its own watches over the set-up: it answers also
while the trial's process is stopped, or hangs in a library that holds the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray

logger = logging.getLogger(__name__)

# Ends quietly when it is told to, or its parent is dead: it is somebody else's child then. A pipe
# would not tell: any process that is forked meanwhile holds its other end as well.
_WATCHER = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
end = time.monotonic() + seconds
while os.getppid() == pid:
    if time.monotonic() >= end:
        print(f"process {pid} is killed: the trial was not set up in {seconds:.0f} s "
              "(setup_timeout_s)", file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)
        break
    time.sleep(min(1.0, max(0.0, end - time.monotonic())))
"""


@contextmanager
def killed_after(seconds: float | None) -> Iterator[None]:
    """Has this process killed unless the block ends within `seconds`; None: no limit."""
    if seconds is None:
        yield
        return
    command = [sys.executable, "-S", "-c", _WATCHER, str(os.getpid()), str(seconds)]
    watcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()


def is_trial() -> bool:
    """Whether this process is an actor, which others can restart: not a script or a notebook."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
