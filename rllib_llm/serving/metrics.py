"""The server's Prometheus metrics, under the names that vLLM's dashboards use."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rllib_llm.serving.engine_host import Counts
from rllib_llm.serving.weights import LiveWeights, ServedWeights

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "rllib_llm", "registry": self.registry}
        histogram: Any = partial(Histogram, buckets=_SECONDS, **shared)
        counter: Any = partial(Counter, **shared)
        gauge: Any = partial(Gauge, **shared)
        self.first_token = histogram("time_to_first_token_seconds", "From request to first token.")
        self.per_token = histogram("time_per_output_token_seconds", "Between two tokens of a row.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From request to last token.")
        self.framework = histogram(
            "framework_seconds", "From an answer's last token until it was handed to the network."
        )
        self.swap = histogram("weights_load_seconds", "Of a swap of weights; rows go on meanwhile.")
        self.transfer = histogram("weights_transfer_seconds", "Of weights, from a run to here.")
        self.transferred = counter("weights_transferred_bytes", "Of weights, from a run to here.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter("generation_tokens", "Tokens that were sampled.")
        self.success = counter("request_success", "Completions that ended.", ["finished_reason"])
        self.refusals = counter("requests_refused", "Requests that were not taken.", ["reason"])
        self.swaps = counter("weights_swaps", "Versions that were loaded.")
        self.running = gauge("num_requests_running", "Completions in the engine's batch.")
        self.waiting = gauge("num_requests_waiting", "Completions that wait for a place in it.")
        self.version = gauge("weights_version", "Of the newest weights.")
        self.epoch = gauge("weights_epoch", "Of the newest weights.")
        self.age = gauge("weights_age_seconds", "Since the newest weights came into use.")
        by_version = "Completions by the version that samples."
        self.lane_rows = gauge("lane_rows", by_version, ["version"])
        self.lag = gauge("event_loop_lag_seconds", "By how much the last timer was late.")

    def swapped(self, weights: ServedWeights) -> None:
        """Counts a swap."""
        self.swap.observe(weights.load_seconds)
        self.swaps.inc()
        if weights.num_bytes:
            self.transfer.observe(weights.transfer_seconds)
            self.transferred.inc(weights.num_bytes)
        self.version.set(weights.version)
        self.epoch.set(weights.epoch)

    def text(self, weights: LiveWeights, counts: Counts | None) -> bytes:
        """All of it, in Prometheus' format. counts: None where the engine does not tell them."""
        self.age.set(time.time() - weights.newest.loaded_at)
        if counts is not None:
            self.running.set(counts.sampling)
            self.waiting.set(counts.waiting)
            self.lane_rows.clear()
            for serial, rows in counts.by_version.items():
                self.lane_rows.labels(weights.of(serial).label).set(rows)
            self.version.set(weights.newest.version)
            self.epoch.set(weights.newest.epoch)
        return generate_latest(self.registry)
