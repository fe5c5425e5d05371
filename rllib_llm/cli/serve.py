"""`rllib serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from typer import Argument, Option

from rllib_llm.cli.options import with_values
from rllib_llm.cli.session import (
    check_address,
    extra_serve,
    prepare,
    show_progress,
    user_errors,
)


def serve(
    model: Annotated[str | None, Argument(
        help="Checkpoint, trial, run, Hugging Face folder or hub id.")] = None,
    config: Annotated[Path | None, Option(
        "--config", "-c", help="YAML file with settings by name.")] = None,
    host: Annotated[str | None, Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, Option(help="Port to listen on.")] = None,
    name: Annotated[str | None, Option(help="The model's name in answers.")] = None,
    engine: Annotated[str | None, Option(help="torch or vllm.")] = None,
    weights_name: Annotated[str | None, Option(
        help="Follow the weights that a run publishes by this name.")] = None,
    ray_address: Annotated[str | None, Option(
        help="Ray cluster to serve on, 'auto' for a local one. Default: RAY_ADDRESS, else Ray is "
        "started here, or with --weights-name a local one that runs is joined.")] = None,
    local: Annotated[bool, Option("--local", help="In this process, without Ray Serve.")] = False,
    set_: Annotated[list[str] | None, Option(
        "--set", help="Any setting: NAME=VALUE. May be repeated.", callback=with_values)] = None,
    show_config: Annotated[bool, Option(
        "--show-config", help="Show all settings with their values, and exit.")] = False,
) -> None:  # fmt: skip
    """Serve a model with OpenAI's HTTP interface, on Ray Serve.

    Settings come from --config, from the environment (RLLIB_SERVE_<NAME>) and from flags; flags
    override the environment, and both override the file. Keys come from a file or the environment.
    """
    prepare()
    with user_errors(), extra_serve("rllib serve"):
        from rllib_llm.serving.settings import read_settings

        given: dict[str, Any] = {
            "model": model, "host": host, "port": port, "name": name, "weights_name": weights_name,
            "engine": engine,
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        settings = read_settings({**_named(set_ or ()), **given}, config)
        if show_config:
            shown = settings.model_dump(mode="json")
            print(yaml.safe_dump(shown, sort_keys=False), end="")
        elif local:
            _serve_here(settings, ray_address)
        else:
            _serve_on_ray(settings, ray_address)


def _named(pairs: Any) -> dict[str, Any]:
    from rllib_llm.runs.yaml_loader import parse
    from rllib_llm.serving.settings import check_without_keys

    found = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        check_without_keys({name: value}, "--set=", "any user can read command lines")
        found[name] = parse(value, f"--set {name}")
    return found


def _serve_here(settings: Any, ray_address: str | None) -> None:
    from rllib_llm.serving.deployment import check_model, check_port
    from rllib_llm.serving.security import read_clients

    clients = read_clients(settings)
    settings.check_exposure(bool(clients.clients))
    check_port(settings)
    check_model(settings)
    # After what may be refused: these import torch and transformers for seconds.
    from rllib_llm.serving.http_server import HttpServer, open_service, show_log
    from rllib_llm.serving.weight_sources import follow
    from rllib_llm.shared.process import forget_startup

    if settings.weights_name is not None:
        import ray

        check_address(ray_address or os.environ.get("RAY_ADDRESS"))
        ray.init(address=ray_address or "auto", log_to_driver=False)
    show_log()
    show_progress(f"Loading {settings.model} ...")
    service = open_service(settings)
    server = HttpServer(service, clients, ends_with_engine=True)

    def started() -> None:
        follow(service)
        _print_address(settings, server.port)

    server.on_start = started
    forget_startup()
    server.serve_here()
    if server.engine_has_ended:
        raise typer.Exit(1)


def _serve_on_ray(settings: Any, ray_address: str | None) -> None:
    # The run that is followed is in a Ray that runs already.
    usual = "local" if settings.weights_name is None else "auto"
    address = ray_address or os.environ.get("RAY_ADDRESS") or usual
    check_address(address)
    from rllib_llm.serving import deployment
    from rllib_llm.shared.ray_compat import stop_listening

    deployment.prepare(settings, starts_ray=address == "local")
    import ray.serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # after the import, which sets it
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    show_progress(f"Loading {settings.model} on Ray Serve ...")
    server = deployment.start(settings)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # before the address is printed
        signal.signal(number, lambda *_: ended.set())
    _print_address(settings, settings.port)
    ended.wait()
    stop_listening()  # calls that Ray Serve makes for its own end are no errors of the user
    server.close()
    if address == "local":
        ray.shutdown()


def _print_address(settings: Any, port: int) -> None:
    from rllib_llm.serving.settings import url_of

    url = url_of(settings.host, port)
    text = f"{settings.served_name} answers at {url}/v1 (a page to chat at {url}/)"
    Console(stderr=True).print(text, highlight=False, soft_wrap=True)
