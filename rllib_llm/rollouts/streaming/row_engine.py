"""The engine under a stream of rows, and how it comes to new weights between two steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import Future
from typing import cast

import torch

from rllib_llm.engines.lanes import LaneEngine
from rllib_llm.engines.protocol import Ended, Engine, InFlight
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.rollouts.policy import LoadWeights, ModulePolicy, SamplingPolicy
from rllib_llm.rollouts.sampler import Sampler
from rllib_llm.weights.published import PublishedWeights


class RowEngine:
    """An engine whose rows are continued with new weights, their cache kept or computed again.

    Args:
        sampler: its policy and weights.
        in_flight: what becomes of the rows in it, see `Engine.load`.
    """

    def __init__(self, sampler: Sampler, in_flight: InFlight) -> None:
        self._sampler, self._in_flight = sampler, in_flight
        self._newest: PublishedWeights | None = None
        self.rows = self._open()

    def _open(self) -> Engine:
        return self._sampler.policy.open_engine(None, load_weights=self._put)

    def is_news(self, weights: PublishedWeights) -> bool:
        """Whether these are newer than what it was given last. Calls to the ledger overtake one
        another."""
        newest = self._newest
        return newest is None or (
            weights.key != newest.key and weights.published_at >= newest.published_at
        )

    def give(self, weights: PublishedWeights) -> None:
        """Samples with these from now on, if they are news."""
        if self.is_news(weights):
            self._newest = weights
            self._load(weights.version)

    def _load(self, version: int) -> None:
        self.rows.load({}, version, self._in_flight)

    def _put(self, _: Mapping[str, torch.Tensor]) -> None:
        """Puts the newest weights into the sampler's policy."""
        assert self._newest is not None, "weights are given before they are loaded"
        self._sampler.weights.ensure(self._newest, self._sampler.policy.load)

    def step(self) -> list[Ended]:
        """A token for every row; those that have ended."""
        return self.rows.step()

    def close(self) -> None:
        """Frees the engine."""
        self.rows.close()


class LanedRowEngine(RowEngine):
    """An engine whose rows finish on the weights they began with, while others begin on new ones.

    There are two modules. The sampler's policy is the one that has the newest weights, the other is
    its twin; when new weights come and the twin has no rows left, it gets them and they change
    places. Weights that come before are passed over for newer ones.
    """

    rows: LaneEngine

    def _open(self) -> LaneEngine:
        sampler = self._sampler
        if sampler.twin is None:
            assert isinstance(sampler.policy, ModulePolicy), "rows are sampled by a module"
            sampler.twin = sampler.policy.twin()
        self._emptied: Future[TorchEngine] | None = None
        newest, older = [
            cast(TorchEngine, policy.open_engine(None, load_weights=self._loading(policy)))
            for policy in (sampler.policy, sampler.twin)
        ]
        return LaneEngine(newest, older)

    def _loading(self, policy: SamplingPolicy) -> LoadWeights:
        return functools.partial(self._put_into, policy)

    def _load(self, version: int) -> None:
        if self.rows.version is None:
            self.rows.load_first(version)
            return
        if self._emptied is None:
            self._emptied = self.rows.empty_lane()
        self._switch()

    def _put_into(self, policy: SamplingPolicy, _: Mapping[str, torch.Tensor]) -> None:
        assert self._newest is not None, "weights are given before they are loaded"
        self._sampler.weights.ensure(self._newest, policy.load)

    def _switch(self) -> None:
        """New rows begin on the newest weights, if the lane for them is empty."""
        if self._emptied is None or not self._emptied.done():
            return
        lane, self._emptied = self._emptied.result(), None
        assert self._newest is not None, "a lane is emptied for weights"
        lane.load({}, self._newest.version)
        self.rows.switch()
        sampler = self._sampler
        assert sampler.twin is not None, "it has a lane"
        sampler.policy, sampler.twin = sampler.twin, sampler.policy

    def step(self) -> list[Ended]:
        ended = super().step()
        self._switch()
        return ended


def open_row_engine(sampler: Sampler, in_flight: InFlight) -> RowEngine:
    """The engine that does with rows what `in_flight` says."""
    kind = LanedRowEngine if in_flight == "finish" else RowEngine
    return kind(sampler, in_flight)
