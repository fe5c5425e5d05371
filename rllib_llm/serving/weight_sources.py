"""Where a server's weights come from: a folder, or a training run, whose adapters are merged into
the served model."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping

import torch
from torch import nn

from rllib_llm.checkpoints.folder import find_model
from rllib_llm.engines.torch_engine import TRUNK
from rllib_llm.modules.lora import adapts_tied_weights, add_adapters, is_adapter, merge_into
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.quantization import quantize
from rllib_llm.serving.service import ServedWeights, Service
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.weights.coordinator import CoordinatorClient
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.receiver import WeightsFollower, WeightsReceiver

_WAIT_SECONDS = 5.0  # for weights of a run, before its end is looked for

logger = logging.getLogger(__name__)


class AdapterMerger:
    """Merges a run's adapters into full weights. Holds a copy of the frozen trunk. `source` is its,
    as `load_causal_lm` takes it; `lora` and `quantization` of the settings are the run's."""

    def __init__(self, source: str, settings: ServeSettings) -> None:
        assert settings.lora is not None, "there are no adapters"
        self._trunk = load_causal_lm(source, dtype=settings.dtype)
        self._adapted: nn.Module
        if settings.quantization == "none":
            with torch.device("meta"):  # its shapes are read, and its adapters' scales
                self._adapted = type(self._trunk)(self._trunk.config)
        else:  # what was learnt lies on these weights
            network = load_causal_lm(source, dtype=settings.dtype)
            self._adapted = quantize(network, settings.quantization, device="cpu")
        add_adapters(self._adapted, settings.lora)
        if adapts_tied_weights(self._adapted):
            raise ValueError(
                f"lora={settings.lora!r} must leave out the embeddings where input and output "
                "share them. Serve the folder that `algorithm.export_model` writes."
            )

    def merged(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The trunk's weights with these adapters in them, which are under the names of the
        policy's state, or of the model's."""
        own, named = self._adapted.state_dict(), {}
        for given, tensor in adapters.items():
            short = given.removeprefix(TRUNK)
            name = short if short in own else given
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(
                    f"lora must be the run's own: it publishes {name} of shape "
                    f"{tuple(tensor.shape)}, which these adapters do not have."
                )
            named[name] = tensor
        whole = copy.deepcopy(self._trunk)
        merge_into(whole, self._adapted, named)
        return whole.state_dict()


def load_folder(service: Service, path: str, epoch: int, version: int) -> ServedWeights:
    """Puts the weights of a checkpoint, trial or Hugging Face folder into a server. A ValueError
    where that is not below its `update_weights_folder` (nothing else is loaded, since a dotted path
    would be imported, and a hub id fetched), or holds no model, or another one."""
    allowed = service.settings.update_weights_folder
    root = None if allowed is None else allowed.expanduser().resolve()
    folder = None if root is None else (root / path).resolve()
    if not root or not folder or not folder.is_dir() or not folder.is_relative_to(root):
        told = None if root is None else str(root)
        raise ValueError(f"path={path!r} must be a folder below update_weights_folder={told!r}.")
    source = find_model(str(folder))
    model = load_causal_lm(source, dtype=service.settings.dtype)
    return service.load(model.state_dict(), epoch=epoch, version=version, source=source)


class RunSource:
    """Follows the weights that a run publishes, in a thread. A server that cannot follow is not
    ready until it can again: it would answer by old weights.

    Args:
        service: is given them.
        merger: makes whole weights of what the run publishes, where it trains adapters.
        receiver: see `WeightsFollower`.
        retry_seconds: between attempts after an error.
    """

    def __init__(
        self, service: Service, client: CoordinatorClient, merger: AdapterMerger | None = None, *,
        receiver: WeightsReceiver | None = None, retry_seconds: float = _WAIT_SECONDS,
    ) -> None:  # fmt: skip
        self._service, self._client, self._merger = service, client, merger
        self._retry_seconds = retry_seconds
        self._arrived: list[FlatBuffer] = []
        self._follower = WeightsFollower(client, self._arrived.append, receiver=receiver)
        self._stop = threading.Event()
        self.error: Exception | None = None  # that keeps it from following
        self._thread = threading.Thread(target=self._run, name="follow-weights", daemon=True)

    def start(self) -> None:
        """Follows from now on. The server is not ready before the first weights are in use, or
        `weights_wait_s` are over."""
        self._service.is_ready = False
        self._follower.start()
        self._thread.start()

    def _run(self) -> None:
        seconds, is_first = self._service.settings.weights_wait_s, True
        while not self._stop.is_set():
            try:
                if not self._take(seconds) and is_first:
                    logger.warning(
                        "Nothing was published as %r in %g s: the model is served as it was "
                        "loaded.", self._client.name, seconds,
                    )  # fmt: skip
                seconds, is_first = _WAIT_SECONDS, False
                # Where nothing came of a follower that works, what is in use is the newest.
                self.error, self._service.is_ready = None, True
            except Exception as error:  # noqa: BLE001  (the border of the thread)
                told = f"The weights of {self._client.name!r} cannot be followed"
                if repr(error) != repr(self.error):  # once, however often it is tried
                    logger.error(told, exc_info=error)
                self.error = error
                self._service.why_not_ready = f"{told}: {type(error).__name__}."
                self._service.is_ready = False
                self._stop.wait(self._retry_seconds)
                self._follower.start()

    def _take(self, seconds: float) -> bool:
        """Loads weights that come in so many seconds, or could not be loaded before; whether there
        were any."""
        if not self._arrived:
            self._follower.wait(seconds)
            self._follower.swap()
        if not self._arrived or self._stop.is_set():
            return False
        published = self._follower.in_use
        assert published is not None, "it was just swapped in"
        tensors: Mapping[str, torch.Tensor] = unpack(self._arrived[-1])
        if self._merger is not None:
            tensors = self._merger.merged(tensors)
        elif any(map(is_adapter, tensors)):
            raise ValueError(
                f"lora=None must be that of the run {self._client.name!r}, which trains adapters."
            )
        told = self._follower.metrics()
        self._service.load(
            tensors, epoch=published.epoch, version=published.version,
            source=f"run {self._client.name}", num_bytes=int(told["bytes"]),
            transfer_seconds=told["transfer_seconds"],
        )  # fmt: skip
        self._arrived.clear()
        return True

    def stop(self) -> None:
        """Ends the threads."""
        self._stop.set()
        self._follower.stop()
        self._thread.join()


def follow(service: Service) -> RunSource | None:
    """Follows the run that the service's settings name; None where they name none."""
    settings = service.settings
    if settings.weights_name is None:
        return None
    merges = settings.lora is not None
    merger = AdapterMerger(find_model(settings.model), settings) if merges else None
    source = RunSource(service, CoordinatorClient(settings.weights_name), merger)
    source.start()
    return source
