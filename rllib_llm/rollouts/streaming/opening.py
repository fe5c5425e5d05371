"""A stream opened: the ledger where it belongs, and samplers that lease from it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_llm.rollouts.collect import Collector
from rllib_llm.rollouts.errors import PublishedWeightsLostError
from rllib_llm.rollouts.recorder import RolloutRecorder
from rllib_llm.rollouts.streaming.client import CALL_SECONDS, LocalLedger, RemoteLedger
from rllib_llm.rollouts.streaming.rules import StreamRules
from rllib_llm.rollouts.streaming.serving import ServingSettings
from rllib_llm.rollouts.streaming.source import Streaming
from rllib_llm.rollouts.streaming.workers import LocalWorker, RemoteWorkers
from rllib_llm.time_limit import LEAST_SECONDS
from rllib_llm.weights.published import PublishedWeights


def open_stream(
    collector: Collector,
    rules: StreamRules,
    settings: ServingSettings,
    *,
    folder: Path,
    recorder: RolloutRecorder,
    keeps_rejected: bool,
    publish_again: Callable[[PublishedWeightsLostError], PublishedWeights],
    tell: Callable[[int], None],
) -> Streaming:
    """A source of groups that stream from the collector's samplers.

    Args:
        rules, settings: of the ledger, and of every sampler.
        folder: for the ledger's journal, which goes with the run.
        keeps_rejected: whether the recorder is told of groups that were rejected.
        recorder, publish_again, tell: see `Streaming`.
    """
    pool = collector.pool
    told: dict[str, Any] = {"recorder": recorder, "publish_again": publish_again, "tell": tell}
    if not pool.num_samplers:
        assert collector.local is not None, "a group without remote samplers has a local one"
        local = LocalLedger(rules, keeps_rejected=keeps_rejected)
        worker = LocalWorker(
            collector.local, local, settings, is_eager=rules.schedule == "lockstep"
        )
        return Streaming(local, worker, rules, **told)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed here
    name = f"ledger-{uuid.uuid4().hex}"
    limit = rules.timeout_s if isinstance(rules.timeout_s, (int, float)) else LEAST_SECONDS
    ledger = RemoteLedger(
        name, rules, folder, keeps_rejected=keeps_rejected, answer_seconds=min(limit, CALL_SECONDS)
    )
    workers = RemoteWorkers(pool, ledger, settings, answer_seconds=limit)
    return Streaming(ledger, workers, rules, **told)
