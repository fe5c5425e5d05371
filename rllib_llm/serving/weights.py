"""A server's weights: which it has, by the names that clients use, and where new ones come from: a
folder, or a training run, whose adapters are merged into the served model."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio
import torch
from torch import nn

from rllib_llm.engines.torch_engine import TRUNK
from rllib_llm.modules.lora import adapts_tied_weights, add_adapters, is_adapter, merge_into
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.quantization import quantize
from rllib_llm.serving.schemas import ApiError
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.weights.coordinator import CoordinatorClient
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.receiver import WeightsFollower, WeightsReceiver

MODEL_GONE = "model_not_found"
_MAX_REMEMBERED = 10_000
_WAIT_SECONDS = 5.0  # for weights of a run, before its end is looked for

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """Weights that were loaded.

    `serial` counts loads, and is what the engine stamps on tokens; `epoch` and `version` are the
    publisher's: after a restore a lower version of a later epoch is another one.
    """

    serial: int
    epoch: int
    version: int
    fingerprint: str
    source: str
    load_seconds: float = 0.0
    loaded_at: float = field(default_factory=time.time)

    @property
    def label(self) -> str:
        """EPOCH.VERSION"""
        return f"{self.epoch}.{self.version}"


class LiveWeights:
    """The versions that can be asked for, the newest first. Of the event loop alone, but for
    `remember` and `of`.

    Args:
        name: of the model.
        first: that it is served with until others come.
    """

    def __init__(self, name: str, first: Weights) -> None:
        self.name = name
        self._known, self._live = {first.serial: first}, [first]
        self._changed = asyncio.Event()

    @property
    def newest(self) -> Weights:
        """The version used by requests that name none."""
        return self._live[0]

    @property
    def live(self) -> list[Weights]:
        """The newest, and the one before it as long as requests may ask for it."""
        return list(self._live)

    def remember(self, weights: Weights) -> None:
        """Registers weights that may sample from now on. Thread-safe."""
        self._known[weights.serial] = weights
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    def set_live(self, live: list[Weights]) -> None:
        """Sets the versions that the engine holds now."""
        self._live = live
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, serial: int) -> Weights:
        """The weights that have sampled a token."""
        return self._known[serial]

    def id_of(self, weights: Weights) -> str:
        """NAME@EPOCH.VERSION"""
        return f"{self.name}@{weights.label}"

    def named(self, model: str | None) -> Weights | None:
        """The weights that a request's `model` asks for; None: the newest.

        Raises:
            ApiError: 404, naming those that are live.
        """
        if model is None or model == self.name:
            return None
        for weights in self._live:
            if model == self.id_of(weights):
                return weights
        raise self.gone(model)

    def gone(self, model: str) -> ApiError:
        """The answer where a model's weights are not here."""
        live = [self.name, *(self.id_of(weights) for weights in self._live)]
        return ApiError(
            404,
            f"model={model!r} must be one of {live}: this server has no other. `{self.name}` is "
            "always the newest.",
            param="model",
            code=MODEL_GONE,
        )

    async def wait_for(self, wanted: str | None, seconds: float) -> None:
        """Waits until the newest version is at least that of the header X-Min-Weight-Version,
        VERSION or EPOCH.VERSION.

        Raises:
            ApiError: 400 for another value, 409 where it does not come in time.
        """
        if wanted is None:
            return
        least = _read_order(wanted)
        try:
            with anyio.fail_after(seconds):
                while self._order(len(least)) < least:
                    await self._changed.wait()
        except TimeoutError:
            raise ApiError(
                409,
                f"X-Min-Weight-Version={wanted!r} must be at most {self.newest.label}: nothing "
                f"newer came in {seconds:g} s. Is the run alive that publishes them?",
                param="X-Min-Weight-Version",
                code="weight_version_not_available",
            ) from None

    def _order(self, parts: int) -> tuple[int, ...]:
        return (self.newest.epoch, self.newest.version)[2 - parts :]


def _read_order(wanted: str) -> tuple[int, ...]:
    parts = wanted.split(".")
    if len(parts) > 2 or not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise ApiError(
            400,
            f"X-Min-Weight-Version={wanted[:40]!r} must be VERSION or EPOCH.VERSION: whole "
            "numbers. Leave it out for whatever is newest.",
            param="X-Min-Weight-Version",
        )
    return tuple(int(part) for part in parts)


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of the weights' bytes in the order of their names, eight hexadecimal digits."""
    crc = 0
    for name in sorted(weights, key=lambda name: name.removeprefix("model.")):
        tensor = weights[name].detach().cpu().contiguous()
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"


class AdapterMerger:
    """Merges a run's adapters into full weights. Holds a copy of the frozen trunk.

    Args:
        source: of the trunk, as `load_causal_lm` takes it.
        settings: of the server; `lora` and `quantization` are the run's.

    Raises:
        ValueError: embeddings that input and output share are adapted on one side.
    """

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
                "share them: merged adapters make them two, and the model that is served has one. "
                "Serve the folder that `algorithm.export_model` writes."
            )

    def merged(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The trunk's weights with these adapters in them.

        Args:
            adapters: under the names of the policy's state, or of the model's.

        Raises:
            ValueError: they are other adapters than the settings say.
        """
        own = self._adapted.state_dict()
        named = {}
        for name, tensor in adapters.items():
            short = name.removeprefix(TRUNK)
            named[short if short in own else name] = tensor
        for name, tensor in named.items():
            if name not in own or own[name].shape != tensor.shape:
                raise ValueError(
                    f"lora must be the run's own: it publishes {name} of shape "
                    f"{tuple(tensor.shape)}, which these adapters do not have. Give the server the "
                    "run's `lora` and `model`."
                )
        whole = copy.deepcopy(self._trunk)
        merge_into(whole, self._adapted, named)
        return whole.state_dict()


# --- from a folder, and from a run ---------------------------------------------------------------


class WeightsTaker(Protocol):
    """A server that new weights are loaded into: `service.Service`."""

    settings: ServeSettings
    is_ready: bool
    why_not_ready: str

    def load(
        self, weights: Mapping[str, torch.Tensor], *, epoch: int, version: int, source: str
    ) -> Weights:
        """Loads weights for new requests."""


def load_folder(service: WeightsTaker, path: str, epoch: int, version: int) -> Weights:
    """Puts the weights of a checkpoint, trial or Hugging Face folder into a server.

    Raises:
        ValueError: the folder is not below the server's `update_weights_folder`, or holds no model,
            or one of another architecture.
    """
    from rllib_llm.checkpoints.folder import find_model
    from rllib_llm.modules.pretrained import load_causal_lm

    folder = _allowed_folder(path, service.settings.update_weights_folder)
    source = find_model(str(folder))
    model = load_causal_lm(source, dtype=service.settings.dtype)
    return service.load(model.state_dict(), epoch=epoch, version=version, source=source)


def _allowed_folder(path: str, root: Path | None) -> Path:
    """The folder of weights: nothing else is loaded, since a dotted path would be imported, and a
    hub id fetched."""
    if root is None:
        raise ValueError(
            f"path={path!r} must be below update_weights_folder, which the server has none of. Set "
            "it to the folder that weights are written to."
        )
    root = root.expanduser().resolve()
    folder = (root / path).resolve()
    if not folder.is_relative_to(root) or not folder.is_dir():
        raise ValueError(
            f"path={path!r} must be a folder below update_weights_folder={str(root)!r}: other "
            "weights are not loaded. Write them there."
        )
    return folder


class RunSource:
    """Follows the weights that a run publishes, in a thread. A server that cannot follow is not
    ready until it can again: it would answer by old weights.

    Args:
        service: is given them.
        client: of the run's coordinator.
        merger: makes whole weights of what the run publishes, where it trains adapters.
        receiver: see `WeightsFollower`.
        retry_seconds: between attempts after an error.
    """

    def __init__(
        self,
        service: WeightsTaker,
        client: CoordinatorClient,
        merger: AdapterMerger | None = None,
        *,
        receiver: WeightsReceiver | None = None,
        retry_seconds: float = _WAIT_SECONDS,
    ) -> None:
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
                self._lose(error)
                self._stop.wait(self._retry_seconds)
                self._follower.start()

    def _lose(self, error: Exception) -> None:
        """Stops the server from answering with weights that are no longer the newest."""
        if repr(error) != repr(self.error):  # once, however often it is tried
            logger.error("Weights of %r cannot be followed", self._client.name, exc_info=error)
        self.error = error
        self._service.why_not_ready = (
            f"The weights of {self._client.name!r} cannot be followed: {type(error).__name__}."
        )
        self._service.is_ready = False

    def _take(self, seconds: float) -> bool:
        """Loads weights that come in so many seconds, or could not be loaded before; whether there
        were any."""
        if not self._arrived:
            self._follower.wait(seconds)
            self._follower.swap()
        if not self._arrived or self._stop.is_set():
            return False
        self._load(self._arrived[-1])
        self._arrived.clear()
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
