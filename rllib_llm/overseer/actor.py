"""The overseer of a Tune run as a named actor, made by whichever trial needs it first."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_llm.overseer.http_server import OverseerServer
from rllib_llm.overseer.overseer import Overseer
from rllib_llm.shared.named_actor import NAMESPACE

MAX_CALLS = 64  # at once; each takes microseconds


class OverseerActor:
    """An `Overseer` with its HTTP server."""

    def __init__(self, folder: str) -> None:
        self._overseer = Overseer()
        self._server = OverseerServer(self._overseer, Path(folder))

    def report(self, report: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `Overseer`."""
        return self._overseer.report(report)

    def leave(self, part: str) -> None:
        """See `Overseer`."""
        self._overseer.leave(part)

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


def overseer_name(folder: Path) -> str:
    """Name of the actor that oversees the Tune run in `folder`."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    return f"overseer-{folder.name}-{digest}"


def open_overseer(folder: Path) -> Any:
    """The overseer of the run in `folder`, made where there is none; it reserves nothing, and ends
    with the process that made it."""
    node = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(OverseerActor)
        .options(
            name=overseer_name(folder),
            namespace=NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            max_restarts=-1,
            # Its folder is here; a trial's placement group has no place for it.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )
        .remote(str(folder))
    )
