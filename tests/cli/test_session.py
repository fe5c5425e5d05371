from __future__ import annotations

import logging
import os
import socket
import sys

import pytest
import ray
from ray._private.authentication import authentication_token_setup
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.cli.options import RayOptions
from rllib_llm.cli.session import (
    _init_arguments,
    check_address,
    prepare,
    ray_session,
)
from rllib_llm.shared.dotted import IMPORTS
from rllib_llm.shared.errors import Problems
from tests.ports import free_port


def test_a_local_ray_has_room_for_one_trial_and_no_dashboard():
    arguments = _init_arguments(RayOptions(), needed_cpus=1000.5)
    assert arguments["num_cpus"] == 1001
    assert arguments["include_dashboard"] is False and arguments["log_to_driver"] is False
    assert arguments["object_store_memory"] is None  # Ray decides
    asked = _init_arguments(RayOptions(ray_num_cpus=3, ray_num_gpus=1, verbose=1), needed_cpus=9)
    assert (asked["num_cpus"], asked["num_gpus"], asked["log_to_driver"]) == (3, 1, True)


def test_ray_s_defaults_of_authentication_are_not_told_at_each_start():
    """`ray.init()`, called with its own defaults as by `rllib serve`, lets "ray" speak again."""
    prepare()
    source = logging.getLogger("ray._private.authentication.authentication_token_setup")
    assert source.name == authentication_token_setup.logger.name
    above = logging.getLogger("ray")
    level = above.level
    above.setLevel(logging.INFO)
    try:
        assert not source.isEnabledFor(logging.WARNING)
    finally:
        above.setLevel(level)


def test_a_running_cluster_keeps_its_resources():
    arguments = _init_arguments(RayOptions(ray_address="auto"), needed_cpus=1)
    assert arguments["address"] == "auto" and "num_cpus" not in arguments
    with pytest.raises(Problems, match="--ray-num-cpus=2 must be left out with --ray-address"):
        _init_arguments(RayOptions(ray_address="auto", ray_num_cpus=2), needed_cpus=1)


def test_modules_of_the_folder_can_be_imported_here_and_in_workers(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    prepare()
    assert sys.path[0] == str(tmp_path)
    assert os.environ["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"


def test_the_users_environment_wins(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    prepare()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_a_cluster_that_does_not_answer_is_one_sentence_in_seconds():
    port = free_port()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(Problems, match=f"--ray-address='{address}' must be a running Ray"):
            check_address(address)


def test_a_dead_cluster_of_the_environment_is_named_by_its_variable(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(Problems) as caught:
        check_address(address)
    assert caught.value.problem.name == "RAY_ADDRESS"
    with pytest.raises(Problems) as caught:
        _init_arguments(RayOptions(ray_address=address, ray_num_cpus=2), needed_cpus=1)
    assert "RAY_ADDRESS" in caught.value.problem.rule
    run = CliRunner().invoke(app, ["serve", "any"])  # Ray would try for minutes
    assert run.exit_code == 2 and "RAY_ADDRESS" in run.stderr


@pytest.mark.slow
def test_a_server_that_is_no_ray_is_no_cluster():
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and says nothing
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Problems, match="none answers there"):
            check_address(address, seconds=1.0)


@pytest.mark.slow  # a Ray of its own
def test_a_token_that_is_missing_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray looks for one
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Problems, match="must be given the cluster's token: .* RAY_AUTH_MODE"):
            check_address(address, seconds=120.0)


@pytest.mark.slow
def test_a_running_cluster_answers(ray_session):
    check_address(ray.get_runtime_context().gcs_address, seconds=120.0)


@pytest.mark.slow  # Ray is imported in a process of its own
def test_the_time_ray_takes_to_be_imported_is_not_the_cluster_s(ray_session, tmp_path, monkeypatch):
    # As on a busy machine, where an answer takes seconds, too: a process needs 31 before it asks.
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(31)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_address(ray.get_runtime_context().gcs_address, seconds=30.0)


def raising(error: Exception):
    def init(**_) -> None:
        raise error

    return init


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        ("auto", ConnectionError("none found"), "--ray-address='auto' must be a running Ray"),
        ("auto", RuntimeError("Version mismatch"), "a running Ray cluster: Version mismatch"),
        (None, RuntimeError("Failed to start GCS"), "Ray must start on this machine.*start GCS"),
        (None, Exception("timed out"), "Ray must start on this machine.*timed out"),
    ],
)
def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch, address, error, told):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", raising(error))
    with pytest.raises(Problems, match=told), ray_session(RayOptions(ray_address=address)):
        pass


def test_addresses_that_say_where_to_look_are_left_to_ray():
    for address in (None, "auto", "local"):
        check_address(address)


def test_what_was_named_goes_to_rays_processes(monkeypatch):
    monkeypatch.setenv(IMPORTS, "my_names")
    arguments = _init_arguments(RayOptions(), needed_cpus=1)
    assert arguments["runtime_env"]["env_vars"] == {IMPORTS: "my_names"}
    monkeypatch.delenv(IMPORTS)
    assert "runtime_env" not in _init_arguments(RayOptions(), needed_cpus=1)


def test_a_ray_that_does_not_start_is_told_with_the_last_error_of_its_logs(monkeypatch, tmp_path):
    logs = tmp_path / "ray" / "session_latest" / "logs"

    def init(**_) -> None:
        logs.mkdir(parents=True)
        (logs / "raylet.err").write_text(
            "[2026-01-01 00:00:00,000 C 7 7] main.cc:1:  Check failed: no space left\n*** stack ***"
        )
        raise Exception("The current node timed out")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(Problems) as caught, ray_session(RayOptions()):
        pass
    reason = caught.value.problem.reason
    assert "node timed out" in reason and "no space left" in reason and "stack" not in reason
