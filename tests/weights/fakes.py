"""What stands for Ray's side: an object store, and a coordinator in this process."""

from __future__ import annotations

import threading
import time
from collections import Counter

from ray.exceptions import GetTimeoutError, ObjectLostError

from rllib_llm.weights.coordinator import VersionLog


class Store:
    """Objects by number. `lost` ones cannot be had."""

    def __init__(self):
        self.objects = {}
        self.lost = set()
        self.allow_put = threading.Event()
        self.allow_put.set()
        self.putting = threading.Event()  # a put has begun

    def put(self, value):
        self.putting.set()
        assert self.allow_put.wait(20)
        ref = len(self.objects)
        self.objects[ref] = bytes(value.data), value
        return ref

    def get(self, ref, timeout):
        if ref in self.lost:
            raise ObjectLostError("ff" * 28, None, "here")
        return self.objects[ref][1]


class Coordinator:
    """The calls of a `CoordinatorClient`. What is in `errors` is raised first, one per call."""

    name = "a_run"

    def __init__(self, keep=2):
        self.keep = keep
        self.log = VersionLog(keep)
        self.errors = []
        self.knows_no_epoch = False  # asked for one, it gives no answer
        self.failures: Counter[str] = Counter()
        self.announced = []
        self.is_ended = False

    def restart(self):
        """As Ray does: empty."""
        self.log = VersionLog(self.keep)

    def begin_epoch(self):
        if self.knows_no_epoch:
            raise GetTimeoutError("away")
        return self.log.begin_epoch()

    def end_epoch(self, epoch):
        self.is_ended = self.log.is_last_epoch(epoch)

    def announce(self, published):
        if self.errors:
            raise self.errors.pop(0)
        self.announced.append(published)
        return self.log.announce(published)

    def wait_for(self, min_version=0, timeout=60.0, *, after=None):
        deadline = time.monotonic() + timeout
        while (found := self.log.newer(min_version, after)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)
        return found

    def report_lost(self, key):
        self.log.report_lost(key)

    def latest(self):
        return self.log.latest()
