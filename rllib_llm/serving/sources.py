"""Where a server's weights come from while it runs: a training run, or a folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import torch

from rllib_llm.modules.lora import is_adapter
from rllib_llm.serving.adapters import AdapterMerger
from rllib_llm.serving.service import Service
from rllib_llm.serving.versions import Weights
from rllib_llm.weights.coordinator import CoordinatorClient
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.follower import WeightsFollower

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 5.0


def load_folder(service: Service, path: str, epoch: int, version: int) -> Weights:
    """Puts the weights of a checkpoint, trial or Hugging Face folder into a server.

    Raises:
        ValueError: the folder holds no model, or one of another architecture.
    """
    from rllib_llm.checkpoints.model_folder import find_model
    from rllib_llm.modules.pretrained import load_causal_lm

    source = find_model(path)
    model = load_causal_lm(source, dtype=service.settings.dtype)
    return service.load(model.state_dict(), epoch=epoch, version=version, source=source)


class RunSource:
    """Follows the weights that a run publishes, in a thread.

    Args:
        service: is given them.
        client: of the run's coordinator.
        merger: makes whole weights of what the run publishes, where it trains adapters.
    """

    def __init__(
        self, service: Service, client: CoordinatorClient, merger: AdapterMerger | None = None
    ) -> None:
        self._service, self._client, self._merger = service, client, merger
        self._arrived: list[FlatBuffer] = []
        self._follower = WeightsFollower(client, self._arrived.append)
        self._stop = threading.Event()
        self.error: Exception | None = None  # that ended the thread
        self._thread = threading.Thread(target=self._run, name="follow-weights", daemon=True)

    def start(self) -> None:
        """Follows from now on. The server is not ready before the first weights are in use, or
        `weights_wait_s` are over."""
        self._service.is_ready = False
        self._follower.start()
        self._thread.start()

    def _run(self) -> None:
        try:
            seconds = self._service.settings.weights_wait_s
            if not self._take(seconds):
                logger.warning(
                    "Nothing was published as %r in %g s: the model is served as it was loaded.",
                    self._client.name, seconds,
                )  # fmt: skip
            self._service.is_ready = True
            while not self._stop.is_set():
                self._take(_WAIT_SECONDS)
        except Exception as error:  # noqa: BLE001  (the border of the thread; the log has it)
            self.error = error
            logger.exception("Weights of %r are not followed any more", self._client.name)

    def _take(self, seconds: float) -> bool:
        """Loads weights that come in so many seconds; whether there were any."""
        if not self._follower.wait(seconds) or not self._follower.swap():
            return False
        self._load(self._arrived.pop())
        return True

    def _load(self, flat: FlatBuffer) -> None:
        published = self._follower.in_use
        assert published is not None, "it was just swapped in"
        tensors: Mapping[str, torch.Tensor] = unpack(flat)
        if self._merger is not None:
            tensors = self._merger.merged(tensors)
        elif any(map(is_adapter, tensors)):
            raise ValueError(
                f"lora=None must be the `lora` of the run {self._client.name!r}, which publishes "
                "adapters alone. Give the server the same."
            )
        self._service.load(
            tensors, epoch=published.epoch, version=published.version,
            source=f"run {self._client.name}",
        )  # fmt: skip

    def stop(self) -> None:
        """Ends the threads."""
        self._stop.set()
        self._follower.stop()
        self._thread.join()
