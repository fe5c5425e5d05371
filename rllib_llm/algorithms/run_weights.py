"""The receivers of a run's weights: its samplers, followers, and external servers.

learners ── `WeightsPublisher` ──▶ samplers
                  └── coordinator ──▶ followers, by the run's name
         ── `WeightsPush` ──▶ servers, by the path of a folder
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_llm.algorithms.rlhf_config import RLHFConfig
from rllib_llm.weights.coordinator import CoordinatorClient, PublishedWeights
from rllib_llm.weights.publisher import BackgroundPublisher, WeightsPublisher
from rllib_llm.weights.push import WeightsPush, open_servers

logger = logging.getLogger(__name__)


class RunWeights:
    """Gives out the weights of a run. `folder`: of the trial; `export` writes the model as it is
    now to a folder."""

    def __init__(
        self,
        learner_group: Any,
        config: RLHFConfig,
        folder: Path,
        export: Callable[[str | Path], Path],
    ) -> None:
        self._learner_group, self._config, self._export = learner_group, config, export
        background = None  # for receivers that the run does not ask, if it has a name for them
        if (name := config.weights_name) is not None:
            client = CoordinatorClient(name, keep=config.weights_keep, restarts_hung=True)
            background = BackgroundPublisher(client, checksum=config.weights_checksum)
        self._publisher = WeightsPublisher(
            learner_group,
            shared_module=learner_group.is_local and config.num_env_runners == 0,
            checksum=config.weights_checksum,
            background=background,
            transport=config.weights_transport,
        )
        self._push: WeightsPush | None = None  # for servers that follow nobody
        if config.weights_push:
            own = config.weights_push_folder
            servers = open_servers(config.weights_push)
            self._push = WeightsPush(servers, folder / "pushed" if own is None else Path(own))
        self.published: PublishedWeights  # the newest

    def publish(self, version: int) -> PublishedWeights:
        """Gives the learners' weights out under a version."""
        published = self._publisher.publish(version)
        if self._config.asks_a_server:  # for these weights, by their epoch, too
            published = self._publisher.announced(published)
        if self._push is not None and version % self._config.weights_push_every == 0:
            self._push.push(self._export, published.epoch, version)
        self.published = published
        return published

    def publish_again(self, error: Exception) -> PublishedWeights:
        """Once: where they are lost again, something is wrong that this does not mend."""
        version = self.published.version
        logger.warning("Weights %d are published again: %s", version, error)
        self.published = self._publisher.publish_again(version)
        return self.published

    def in_store(self) -> PublishedWeights:
        """The newest weights in the object store, sent with each request to remote evaluation
        samplers when training samples with the learner's own module."""
        if self.published.ref:
            return self.published
        publisher = WeightsPublisher(
            self._learner_group, shared_module=False, checksum=self._config.weights_checksum
        )
        return publisher.publish(self.published.version)

    def metrics(self) -> dict[str, float]:
        """As of the publisher, and `push_seconds` where servers are pushed to."""
        pushed = {} if self._push is None else {"push_seconds": self._push.seconds}
        return self._publisher.metrics() | pushed

    def stop(self) -> None:
        """Tells nobody any more."""
        self._publisher.stop()
        if self._push is not None:
            self._push.close()
