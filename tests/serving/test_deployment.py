"""On Ray Serve: one hop, weights of a run, a replica that is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import httpx
import openai
import psutil
import pytest
import ray
from ray.serve.config import AutoscalingConfig
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.serving import deployment
from rllib_llm.serving.deployment import check_port
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.serving.weight_sources import RunSource
from rllib_llm.shared.errors import Problems
from rllib_llm.weights.background import BackgroundPublisher
from rllib_llm.weights.coordinator import CoordinatorClient
from tests import tiny_models
from tests.cli.said import said
from tests.ports import free_port
from tests.serving.tiny_server import (
    DEADLINE_S,
    NAME,
    model,
    plain_logprobs,
    running,
    service,
    tokenizer,
    until,
)

ASKED = {"token_ids": [1, 40, 41], "sampling_params": {"max_tokens": 6, "logprobs": 0, "seed": 1}}


def assert_sampled_by(answer: dict, the_model, prompt=ASKED["token_ids"]) -> None:
    choice = answer["choices"][0]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = plain_logprobs(the_model, list(prompt), choice["token_ids"])
    assert told == pytest.approx(expected, abs=1e-4)


def named(seed: int) -> dict:
    """Weights as a run publishes them."""
    return {f"model.{name}": tensor for name, tensor in model(seed).state_dict().items()}


@pytest.mark.slow  # a run and a server
def test_a_server_follows_a_run_through_its_coordinator(ray_session):
    client = CoordinatorClient("followed_by_a_server")
    publisher = BackgroundPublisher(CoordinatorClient("followed_by_a_server"))
    made = service(weights_wait_s=DEADLINE_S)
    try:
        with running(made) as address:
            source = RunSource(made, client)
            source.start()
            assert httpx.get(f"{address}/readyz").status_code == 503  # it has none of the run's
            for version, seed in ((4, 1), (5, 2), (3, 1)):  # the last after a restore
                publisher.submit(named(seed), version)
                until(lambda version=version: made.weights.newest.version == version)
                until(lambda: made.is_ready)
                answer = httpx.post(f"{address}/inference/v1/generate", json=ASKED).json()
                assert answer["model"].endswith(f".{version}")
                assert_sampled_by(answer, model(seed))
            first, last = made.weights.live[1].epoch, made.weights.newest.epoch
            assert last > first > 0
            source.stop()
    finally:
        publisher.stop()


def test_haproxy_is_for_servers_with_keys(monkeypatch):
    monkeypatch.delenv(deployment.HAPROXY, raising=False)
    assert not deployment.uses_haproxy(ServeSettings(model="m"))
    assert deployment.uses_haproxy(ServeSettings(model="m", api_keys="k"))
    assert not deployment.uses_haproxy(ServeSettings(model="m", api_keys="k", haproxy=False))
    with pytest.raises(Problems, match="haproxy=True must come with API keys"):
        deployment.uses_haproxy(ServeSettings(model="m", haproxy=True))
    # On a cluster that runs, what it was started with holds.
    assert not deployment.uses_haproxy(ServeSettings(model="m", api_keys="k"), starts_ray=False)
    with pytest.raises(Problems, match="haproxy=True must come with RAY_SERVE_ENABLE_HA_PROXY=1"):
        deployment.uses_haproxy(
            ServeSettings(model="m", api_keys="k", haproxy=True), starts_ray=False
        )
    # What Ray was started with holds, and is refused where it opens the model to everybody.
    monkeypatch.setenv(deployment.HAPROXY, "1")
    assert deployment.uses_haproxy(ServeSettings(model="m", api_keys="k"))
    for asked in (None, False):
        with pytest.raises(Problems, match="haproxy=True must come with API keys"):
            deployment.uses_haproxy(ServeSettings(model="m", haproxy=asked))
    monkeypatch.setenv(deployment.HAPROXY, "0")
    assert not deployment.uses_haproxy(ServeSettings(model="m", api_keys="k"))


def answer_to_a_drip(port: int) -> bytes:
    """What a server says to a client that sends its request's head byte by byte, for ever."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(0.1)
        connection.sendall(b"POST / HTTP/1.1\r\n")
        answer, end = b"", time.monotonic() + DEADLINE_S
        while not answer and time.monotonic() < end:
            connection.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(12)
    return answer


def test_haproxy_closes_connections_whose_head_comes_byte_by_byte(tmp_path):
    port, file = free_port(), tmp_path / "haproxy.cfg"
    file.write_text(
        "defaults\n    mode http\n    timeout connect 9s\n    timeout client 9s\n"
        f"    timeout server 9s\nfrontend here\n    bind 127.0.0.1:{port}\n"
    )
    script = [str(deployment.HAPROXY_SCRIPT), "-db", "-f", str(file)]
    environment = os.environ | deployment.limited_heads(0.9)
    process = subprocess.Popen(script, env=environment, stderr=subprocess.DEVNULL)
    try:
        until(lambda: is_open(port))
        assert answer_to_a_drip(port) == b"HTTP/1.1 408"
    finally:
        process.terminate()
        process.wait()
    assert file.read_text().count("timeout http-request 1s") == 1


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclasses.dataclass
class Context:
    """What the policy reads of Ray Serve's."""

    aggregated_metrics: dict
    config: AutoscalingConfig


def test_replicas_follow_completions_that_run_and_wait():
    config = AutoscalingConfig(target_ongoing_requests=64)
    counted = {deployment.COMPLETIONS: {"a": 64.0, "b": 96.0}, "other": {"a": 9.0}}
    assert deployment.by_completions(Context(counted, config)) == (2.5, {})
    assert deployment.by_completions(Context({}, config)) == (0.0, {})


def test_autoscaling_s_settings_reach_ray_serve(monkeypatch):
    settings = ServeSettings(
        model="m", max_rows=7, replicas=2, max_replicas=5, autoscaling={"upscale_delay_s": 1.5}
    )
    made = deployment.build(settings)._bound_deployment._deployment_config.autoscaling_config
    assert (made.min_replicas, made.max_replicas, made.target_ongoing_requests) == (2, 5, 7)
    assert made.upscale_delay_s == 1.5 and made.policy.policy_function == deployment.POLICY
    fixed = deployment.build(ServeSettings(model="m", replicas=2))
    assert fixed._bound_deployment._deployment_config.autoscaling_config is None


def test_of_a_replica_s_trace_the_error_is_told():
    trace = (
        "The deployment failed to start 3 times in a row. Error:\n"
        "ray::ServeReplica:rllib_llm:server.initialize_and_get_metadata() (pid=1)\n"
        "RuntimeError: Traceback (most recent call last):\n"
        '  File "deployment.py", line 44, in __init__\n'
        "rllib_llm.shared.errors.Problems: checkpoint='x' must hold a model: there is none."
    )
    told = "Problems: checkpoint='x' must hold a model: there is none."
    assert deployment._last_error(["", trace]) == told
    assert deployment._last_error([trace.rpartition("\n")[0] + "\nAssertionError"]) == (
        "AssertionError"
    )
    assert deployment._last_error(["The replica's node has gone."]) == ""


@pytest.fixture
def folder(tmp_path) -> str:
    return tiny_models.save(tmp_path / "tiny", model(), tokenizer())


def answers(url: str, **options) -> httpx.Response | None:
    """The answer, where there is one and it is well."""
    try:
        answer = httpx.get(url, timeout=5, **options)
    except httpx.TransportError:
        return None
    return answer if answer.status_code == 200 else None


def command(
    *arguments: str, stderr: int | IO[str] = subprocess.PIPE, **environment: str
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "rllib_llm.cli.main", "serve", *arguments],
        stderr=stderr, text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
    )  # fmt: skip


def until_ready(process: subprocess.Popen, url: str) -> None:
    """Waits for a server that imports and loads in two processes, beside whatever else runs."""

    def is_ready() -> bool:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        return answers(f"{url}/readyz") is not None

    until(is_ready)


@pytest.mark.slow  # a server in a process of its own
def test_the_command_serves_and_sigterm_drains(folder):
    port = free_port()
    process = command(folder, "--local", "--port", str(port), RLLIB_SERVE_API_KEYS="k")
    try:
        assert process.stderr is not None
        told = f"{NAME} answers at http://127.0.0.1:{port}/v1"
        assert any(told in line for line in iter(process.stderr.readline, ""))
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
            knobs = {"model": NAME, "prompt": "Once", "max_tokens": 400, "stream": True}
            chunks = client.completions.create(**knobs, extra_body={"ignore_eos": True})
            next(chunks)
            process.send_signal(signal.SIGTERM)
            ready = f"http://127.0.0.1:{port}/readyz"
            until(lambda: httpx.get(ready).status_code == 503)
            finish = [chunk.choices[0].finish_reason for chunk in chunks][-1]
        assert finish == "length"
        assert process.wait(DEADLINE_S) in (0, -signal.SIGTERM)
    finally:
        process.kill()


@pytest.mark.slow  # a server in a process of its own
def test_the_command_ends_when_its_engine_does(folder):
    port = free_port()
    process = command(folder, "--local", "--port", str(port), stderr=subprocess.DEVNULL)
    try:
        until_ready(process, f"http://127.0.0.1:{port}")
        (engine,) = psutil.Process(process.pid).children()
        engine.kill()
        assert process.wait(DEADLINE_S) == 1, "whoever started it starts it again"
    finally:
        process.kill()


@pytest.mark.parametrize("local", [(), ("--local",)])
def test_a_folder_without_a_tokenizer_is_refused_before_anything_starts(folder, local, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(folder) / name, tmp_path)
    had_ray = ray.is_initialized()  # that of other tests
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", str(free_port()), *local])
    assert result.exit_code == 2
    assert "the folder has no tokenizer (it holds config.json, model" in said(result.output)
    assert "Loading" not in result.output and ray.is_initialized() is had_ray


def test_the_command_refuses_in_words(folder):
    for arguments, expected in (
        (("--local", "--host", "0.0.0.0"), "host='0.0.0.0' must be one of"),
        (("--set", "max_rows=none"), "max_rows='none' must be a whole number"),
        (("--set", "colour=red"), "colour must be a known key"),
        (("--set", "api_keys=k"), "--set=api_keys=... must be left out"),
        (("--set", "admin-key=k"), "--set=admin_key=... must be left out"),
    ):
        result = CliRunner().invoke(app, ["serve", folder, *arguments])
        assert result.exit_code != 0
        assert expected in said(result.output)


@pytest.mark.parametrize("name", ["api_keys", "admin_key"])
def test_keys_are_no_arguments_of_serve_s_yaml_since_ray_serve_logs_those(folder, name):
    with pytest.raises(Problems, match=f"args.{name}=... must be left out") as caught:
        deployment.application({"model": folder, name: "secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("host", "url"), [
    ("::1", "http://[::1]:8001"), ("0.0.0.0", "http://127.0.0.1:8001"),
    ("localhost", "http://localhost:8001"),
])  # fmt: skip
def test_a_server_s_url_can_be_asked(host, url):
    server = deployment.Server(ServeSettings(model="m", host=host, port=8001))
    assert server.url == url and httpx.URL(url).port == 8001


def test_a_folder_that_is_not_there_is_told_before_ray_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(deployment, "HAPROXY_PORTS", ())
    monkeypatch.setattr("ray.init", None)
    monkeypatch.setattr(deployment, "_check_room", None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for folder in (tmp_path / "nothing", tmp_path):
        result = CliRunner().invoke(app, ["serve", str(folder)])
        assert result.exit_code == 2 and "must" in said(result.output)
        assert str(folder) in said(result.output)
        with pytest.raises(Problems, match=f"'{folder}' must"):
            deployment.serve(str(folder), port=free_port())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_ends_the_server_as_soon_as_it_is_announced_ends_it(number, monkeypatch):
    closed = []

    class Started:
        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(deployment, "prepare", lambda settings, **_: None)
    monkeypatch.setattr(deployment, "start", lambda settings: Started())
    monkeypatch.setattr("rllib_llm.shared.ray_compat.stop_listening", lambda: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.init", lambda **_: None)
    stop = lambda *_: os.kill(os.getpid(), number)  # noqa: E731
    monkeypatch.setattr("rllib_llm.cli.serve._print_address", stop)
    before = {each: signal.signal(each, signal.default_int_handler)
              for each in (signal.SIGINT, signal.SIGTERM)}  # fmt: skip
    try:
        result = CliRunner().invoke(app, ["serve", "m"])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert result.exit_code == 0 and len(closed) == 1, result.output


def test_a_port_in_use_is_told_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            Problems, match=f"port={port} must be free on host='127.0.0.1': another"
        ):
            check_port(ServeSettings(model="m", port=port))
    check_port(ServeSettings(model="m", port=port))
