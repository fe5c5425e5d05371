"""The server on Ray Serve: engine and HTTP in one replica, one hop from the proxy."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_llm.serving.clients import read_clients
from rllib_llm.serving.settings import LOOPBACK, ServeSettings, read_settings
from rllib_llm.user_errors import UserError

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
APPLICATION = "rllib_llm"

logger = logging.getLogger(__name__)


class Replica:
    """One copy of the server.

    Args:
        settings: of the server, as a mapping; keys among them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from rllib_llm.serving.opening import open_service, show_log

        show_log()
        self._settings = ServeSettings.model_validate(dict(settings))
        self._service = open_service(self._settings)
        self._source: Any = None

    async def __serve_build_asgi_app__(self) -> Any:
        """For Ray Serve: the application, once the replica is made."""
        from rllib_llm.serving.app import make_app

        await self._service.start()
        self._source = follow(self._service)
        return make_app(self._service, read_clients(self._settings))

    def check_health(self) -> None:
        """For Ray Serve, which restarts a replica whose engine has ended.

        Raises:
            RuntimeError: it has.
        """
        self._service.loop.check_open()


def follow(service: Any) -> Any:
    """Follows the run that the service's settings name; None where they name none."""
    name = service.settings.weights_name
    if name is None:
        return None
    from rllib_llm.serving.sources import RunSource
    from rllib_llm.weights.coordinator import CoordinatorClient

    source = RunSource(service, CoordinatorClient(name))
    source.start()
    return source


def uses_haproxy(settings: ServeSettings) -> bool:
    """Whether Ray Serve's HAProxy is in front. It listens on all addresses of the machine, so it is
    for servers with keys.

    Raises:
        UserError: it is asked for without keys.
    """
    has_keys = bool(read_clients(settings).clients)
    if settings.haproxy and not has_keys:
        raise UserError(
            "haproxy=True must come with API keys: Ray Serve's HAProxy listens on all addresses of "
            "the machine, and whoever reaches one could use the model. Set api_keys_file or "
            "RLLIB_SERVE_API_KEYS, or leave haproxy out."
        )
    return has_keys if settings.haproxy is None else settings.haproxy


def build(settings: ServeSettings) -> Any:
    """The application for `serve.run`, which belongs to a cluster that is connected."""
    from ray import serve

    options: dict[str, Any] = {
        "name": "server",
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        "max_ongoing_requests": settings.max_rows + settings.max_waiting + 64,
        "graceful_shutdown_timeout_s": settings.drain_s + 5,
        "health_check_period_s": 5,
    }
    if settings.max_replicas is not None:
        # Requests that Serve counts as ongoing are those that run and those that wait.
        options["autoscaling_config"] = {
            "min_replicas": settings.replicas,
            "max_replicas": max(settings.replicas, settings.max_replicas),
            "target_ongoing_requests": settings.max_rows,
        }
    else:
        options["num_replicas"] = settings.replicas
    deployment = serve.deployment(**options)(serve.ingress(None)(Replica))
    return deployment.bind(settings.for_replica())


def application(arguments: Mapping[str, Any]) -> Any:
    """For Serve's YAML: `import_path: rllib_llm.serving.deployment:application` with the settings
    under `args`."""
    settings = read_settings(arguments)
    uses_haproxy(settings)
    return build(settings)


class Server:
    """A server on Ray Serve that was started by `serve`."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        self.url = f"http://{host}:{settings.port}"

    def close(self) -> None:
        """Ends the server; Ray Serve stays."""
        from ray import serve

        serve.delete(APPLICATION)


def start(settings: ServeSettings) -> Server:
    """Starts the server on the cluster that this process is connected to, or on one of its own.

    Raises:
        UserError: an address that others reach, without keys.
    """
    prepare(settings)
    import ray
    from ray import serve

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    serve.start(http_options={"host": settings.host, "port": settings.port})
    serve.run(build(settings), name=APPLICATION, route_prefix="/")
    return Server(settings)


def prepare(settings: ServeSettings) -> None:
    """Checks the settings and has Ray started with Serve's HAProxy, where it is wanted. Call it
    before Ray is started or imported: Ray Serve reads its environment when it is.

    Raises:
        UserError: see `check_exposure` and `uses_haproxy`.
    """
    has_keys = bool(read_clients(settings).clients)
    settings.check_exposure(has_keys)
    os.environ.setdefault(HAPROXY, "1" if uses_haproxy(settings) else "0")
    if settings.host in LOOPBACK and os.environ[HAPROXY] == "1":
        logger.warning("Ray Serve's HAProxy listens on all addresses, not on %s.", settings.host)


def serve(model: str, *, config: Path | str | None = None, **settings: Any) -> Server:
    """Serves a model with OpenAI's interface, on Ray Serve.

    Args:
        model: checkpoint, trial folder, Hugging Face folder or hub id.
        config: YAML file with settings.
        settings: see `ServeSettings`.

    Returns:
        The server: its `url`, and `close()`.

    Raises:
        UserError: a setting that does not fit.
    """
    file = None if config is None else Path(config)
    return start(read_settings({"model": model, **settings}, file))
