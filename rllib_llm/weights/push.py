"""Weights for servers that do not follow the run: pushed to each, as a folder that it can read.

    model ── export ──▶ FOLDER/EPOCH.VERSION ── its path ──▶ each server, all at once
    adapters alone ───▶ FOLDER/EPOCH.VERSION/adapters-* ───▶ servers that have the trunk

The calls are those of each server's documentation: vLLM's for RL, which it has with
`VLLM_SERVER_DEV_MODE=1`, and SGLang's `update_weights_from_disk`.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from rllib_llm.shared.errors import Problems, problems_of, require
from rllib_llm.shared.openai_client import OpenAIClient, RequestRefusedError, server_root

SERVERS = ("vllm", "sglang", "rllib_llm")
_KEPT = 2  # versions; a server may read the one before the newest while that is written


class PushedServer(ABC):
    """A server that is notified where new weights are.

    Args:
        base_url: of the server, with or without "/v1" at its end.
        client: further arguments of `OpenAIClient`; `api_key_env` names the key's variable.
    """

    def __init__(self, base_url: str, **client: Any) -> None:
        self._client = OpenAIClient(server_root(base_url), **client)

    takes_adapters: bool = False
    """Whether it is given a folder of adapters, for the trunk that it has."""

    @abstractmethod
    def update(self, folder: Path, epoch: int, version: int) -> None:
        """Makes the server use the weights in `folder`.

        Raises:
            RequestRefusedError, ServerError: it does not take them.
        """

    def _tell(self, path: str, body: dict[str, Any], **how: Any) -> None:
        self._client.post(path, body, lambda answer: None, **how)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


class VLLMServer(PushedServer):
    """vLLM's: paused, given the weights, and resumed. After an error it stays paused: it may
    have parts of two versions.

    Args:
        base_url: of the server, with or without "/v1" at its end.
        method: "reload": its workers read the folder by `reload_weights`; "transfer": by its weight
            transfer (start, update, finish) with the backend `disk`, which was a draft in November
            2026 (vllm-project/vllm#52152); "adapters": by `load_lora_adapter`, without a pause,
            each version under the name NAME@EPOCH.VERSION until two newer ones are there.
        name: NAME of adapters.
        pause_mode: what becomes of requests under way: "wait" for them, "keep" or "abort" them.
        client: further arguments of `OpenAIClient`.

    Raises:
        ValueError: an unknown method or pause mode.
    """

    def __init__(
        self, base_url: str, *, method: str = "reload", name: str = "policy",
        pause_mode: str = "wait", **client: Any,
    ) -> None:  # fmt: skip
        ways, modes = ("reload", "transfer", "adapters"), ("wait", "keep", "abort")
        require(method in ways, "method", method, f"be one of {ways}", "", "")
        require(pause_mode in modes, "pause_mode", pause_mode, f"be one of {modes}", "", "")
        self._pause = f"pause?mode={pause_mode}&clear_cache=true"
        super().__init__(base_url, **client)
        self._transfers, self._is_open = method == "transfer", False
        self.takes_adapters, self._name = method == "adapters", name
        self._loaded: list[str] = []  # adapters

    def update(self, folder: Path, epoch: int, version: int) -> None:
        label, path = f"{epoch}.{version}", str(folder)
        if self.takes_adapters:
            self._load_adapters(path, f"{self._name}@{label}")
            return
        self._tell(self._pause, {})
        if self._transfers:
            if not self._is_open:
                self._tell("init_weight_transfer_engine", {"init_info": {}})
                self._is_open = True
            self._tell("start_weight_update", {})
            self._tell("update_weights", {"update_info": {"path": path}})
            self._tell("finish_weight_update", {"weight_version": label})
        else:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            self._tell("collective_rpc", reload)
            self._tell("update_weight_version", {"new_version": label})
        self._tell("resume", {})

    def _load_adapters(self, path: str, name: str) -> None:
        """Adds a version beside those of running requests."""
        self._loaded = [each for each in self._loaded if each != name]
        while len(self._loaded) >= _KEPT:
            with suppress(RequestRefusedError):  # a server that was started again has none
                oldest = {"lora_name": self._loaded.pop(0)}
                self._tell("v1/unload_lora_adapter", oldest, is_json=False)
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        self._tell("v1/load_lora_adapter", body, is_json=False)
        self._loaded.append(name)


class SGLangServer(PushedServer):
    """SGLang's server, which itself waits for requests in progress."""

    def update(self, folder: Path, epoch: int, version: int) -> None:
        body = {
            "model_path": str(folder), "weight_version": f"{epoch}.{version}",
            "abort_all_requests": False, "flush_cache": True,
        }  # fmt: skip
        self._client.post("update_weights_from_disk", body, _check_success)


class RllibServer(PushedServer):
    """`rllib serve` of another cluster, with the key of its administration."""

    def update(self, folder: Path, epoch: int, version: int) -> None:
        self._tell("update_weights", {"path": str(folder), "epoch": epoch, "version": version})


def _check_success(answer: Any) -> None:
    if not answer["success"]:
        raise ValueError(answer.get("message", "no reason given"))


def open_servers(entries: Sequence[Mapping[str, Any]]) -> list[PushedServer]:
    """The servers that `weights_push` names.

    Raises:
        Problems: an entry that names none.
    """
    kinds: tuple[Callable[..., PushedServer], ...] = (VLLMServer, SGLangServer, RllibServer)
    servers = []
    for i, entry in enumerate(entries):
        given = {str(k): v for k, v in entry.items()} if isinstance(entry, Mapping) else {}
        server = given.pop("server", None)
        require(server in SERVERS and isinstance(given.get("base_url"), str), f"weights_push[{i}]",
                entry, f"be a mapping with `server`, one of {SERVERS}, and `base_url`", "",
                "Write {server: vllm, base_url: 'http://host:8000'}")  # fmt: skip
        kind = kinds[SERVERS.index(server)]
        try:
            servers.append(kind(**given))
        except ValueError as error:
            raise Problems(problems_of(error)).within(f"weights_push[{i}]") from error
    return servers


class WeightsPush:
    """Writes weights to a folder and tells servers of it.

    Args:
        folder: that this process and the servers see under the same path.
        export: writes the model as it is now to a folder.
        export_adapters: writes its adapters alone to one.
    """

    def __init__(
        self, servers: Sequence[PushedServer], folder: Path, export: Callable[[Path], Any],
        export_adapters: Callable[[Path], Any] | None = None,
    ) -> None:  # fmt: skip
        self._servers = list(servers)
        self._folder, self._export = folder.absolute(), export
        self._export_adapters = export_adapters
        self._threads = ThreadPoolExecutor(len(self._servers), thread_name_prefix="push-weights")
        self.seconds = 0.0
        """What the last push took."""

    def push(self, epoch: int, version: int) -> None:
        """Makes all servers use the model as it is now.

        Raises:
            RequestRefusedError, ServerError: one of them does not take them.
        """
        start = time.perf_counter()
        target = self._folder / f"{epoch}.{version}"
        begun = self._folder / f".{target.name}"
        shutil.rmtree(begun, ignore_errors=True)
        # A path of its own: a vLLM that was given this version before would use its KV cache.
        adapters = f"adapters-{time.time_ns()}"
        if not all(each.takes_adapters for each in self._servers):
            self._export(begun)
        if any(each.takes_adapters for each in self._servers):
            assert self._export_adapters is not None, "there are adapters"
            self._export_adapters(begun / adapters)
        shutil.rmtree(target, ignore_errors=True)
        begun.rename(target)
        folders = [target / adapters if s.takes_adapters else target for s in self._servers]
        submit = self._threads.submit
        for call in [
            submit(each.update, folder, epoch, version)
            for each, folder in zip(self._servers, folders, strict=True)
        ]:
            call.result()
        self._remove_old(target)
        self.seconds = time.perf_counter() - start

    def _remove_old(self, newest: Path) -> None:
        others = [each for each in self._folder.iterdir() if each != newest]
        others.sort(key=lambda each: each.stat().st_mtime)
        for each in others[: len(others) - (_KEPT - 1)]:
            shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        """Closes the connections to the servers; the last folders stay."""
        self._threads.shutdown()
        for server in self._servers:
            server.close()
