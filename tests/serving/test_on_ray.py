"""Whole servers on Ray Serve under load: replicas that are killed, replaced and added."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest
import ray
import yaml
from ray import serve

import rllib_llm
from rllib_llm.serving import deployment
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.errors import Problems
from tests import tiny_models
from tests.algorithms import tiny_runs
from tests.ports import free_port
from tests.serving.test_deployment import answers, assert_sampled_by
from tests.serving.tiny_server import DEADLINE_S, NAME, model, tokenizer, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
KNOBS = {"model": NAME, "prompt": "Once", "max_tokens": 20, "seed": 1}
TINY = {"api_keys": "k", "haproxy": False, "num_cpus": 0.5}


@pytest.fixture
def folder(tmp_path) -> str:
    return tiny_models.save(tmp_path / "tiny", model(), tokenizer())


@contextlib.contextmanager
def serving(folder: str, **settings):
    server = rllib_llm.serve(folder, port=free_port(), **TINY, **settings)
    try:
        yield server
    finally:
        server.close()


class Load:
    """Clients that ask one request after the other, in threads."""

    def __init__(self, url: str, *, clients: int = 4, max_retries: int = 8) -> None:
        self.texts: list[str] = []
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._made = (url, max_retries)
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]

    def _ask(self) -> None:
        url, max_retries = self._made
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=max_retries) as client:
            while not self._stop.is_set():
                try:
                    self.texts.append(client.completions.create(**KNOBS).choices[0].text)
                except openai.APIError as error:
                    self.errors.append(error)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def goes_on(self, count: int = 40) -> None:
        """Waits until there are so many more answers."""
        least = len(self.texts) + count
        until(lambda: len(self.texts) >= least)


def replicas() -> list[str]:
    """The names of the replicas' actors."""
    names = [str(each["name"]) for each in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if "server#" in name]


def num_running() -> int:
    status = serve.status().applications[deployment.APPLICATION].deployments["server"]
    return status.replica_states.get("RUNNING", 0)


def test_a_killed_replica_and_a_rolling_restart_cost_who_tries_again_nothing(folder):
    with serving(folder, replicas=2) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as client:
            assert client.models.list().data[0].id == NAME
            expected = client.completions.create(**KNOBS).choices[0].text
        refused = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "mine"})
        assert refused.status_code == 401
        assert refused.headers.get_list("x-request-id") == ["mine"], "Ray Serve's own"
        with Load(server.url) as patient, Load(server.url, clients=2, max_retries=0) as other:
            patient.goes_on()
            ray.kill(ray.get_actor(replicas()[0], namespace="serve"), no_restart=False)
            patient.goes_on()
            until(lambda: num_running() == 2)
            # Those that were with the killed one, and those sent to it before that was known.
            failed = len(other.errors)
            before = set(replicas())
            settings = server.settings.model_copy(update={"default_max_tokens": 99})
            serve.run(deployment.build(settings), name=deployment.APPLICATION, route_prefix="/")
            until(lambda: not before & set(replicas()) and num_running() == 2)
            patient.goes_on()
        assert set(patient.texts) | set(other.texts) == {expected}
        assert not patient.errors
        assert all(isinstance(e, openai.APIConnectionError | openai.InternalServerError)
                   for e in other.errors)  # fmt: skip
        print(f"killed: {failed} failed, replaced: {len(other.errors) - failed} failed, "
              f"of {len(other.texts)}")  # fmt: skip
        assert len(other.errors) == failed, "replaced replicas end what they have begun"


def test_a_model_that_no_replica_starts_with_is_named(tmp_path):
    with pytest.raises(Problems, match="CheckpointError: checkpoint=.* must hold a model"):
        rllib_llm.serve(str(tmp_path), port=free_port(), **TINY)
    assert deployment.APPLICATION not in serve.status().applications


def test_replicas_are_added_for_completions_that_wait_and_taken_away(folder):
    quick = {"upscale_delay_s": 0.2, "downscale_delay_s": 1.0, "look_back_period_s": 2.0,
             "metrics_interval_s": 0.2}  # fmt: skip
    with serving(folder, max_rows=2, max_replicas=2, autoscaling=quick) as server:
        assert num_running() == 1
        stop = threading.Event()

        def ask() -> None:  # one request of eight completions: two replicas' worth four times
            asked = {**KNOBS, "n": 8, "max_tokens": 1000, "ignore_eos": True}
            with httpx.Client(headers={"Authorization": "Bearer k"}, timeout=DEADLINE_S) as http:
                while not stop.is_set():
                    http.post(f"{server.url}/v1/completions", json=asked)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            until(lambda: num_running() == 2)
        finally:
            stop.set()
            thread.join(DEADLINE_S)
        until(lambda: num_running() == 1)


def test_replicas_count_that_ray_serve_is_told_of_elsewhere(folder):
    """As `deployments: [{name: server, num_replicas: 2}]` of Serve's own YAML does."""
    own = serve.deployment(name="server", num_replicas=2, ray_actor_options={"num_cpus": 0.5})(
        serve.ingress(None)(deployment.Replica)
    )
    settings = ServeSettings(model=folder, api_keys="k", admin_key="root")
    try:
        with pytest.raises(RuntimeError):
            serve.run(own.bind(settings.for_replica()), name="twice", route_prefix="/twice")
        told = serve.status().applications["twice"].deployments["server"].message
        assert "Problems: admin_key must come with one replica" in told
    finally:
        serve.shutdown()  # later tests start it themselves


def test_a_server_without_room_says_so(folder):
    with (
        pytest.raises(Problems, match="replicas=9 of num_cpus=0.5 must"),
        serving(folder, replicas=9),
    ):
        pass


def test_a_run_is_served_while_it_learns():
    port = free_port()
    server = {"port": port, "num_cpus": 0.5, "num_threads": 1}
    config = tiny_runs.grpo().weights(name="served_run", serve=server)
    url = f"http://127.0.0.1:{port}"
    asked = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 6, "logprobs": 0, "seed": 1}}
    with tiny_runs.built(config) as algorithm:
        models = httpx.get(f"{url}/v1/models").json()["data"]
        assert models[0]["id"] == "served_run"
        for version in (1, 2):
            algorithm.train()
            header = {"X-Min-Weight-Version": str(version)}
            answer = httpx.post(
                f"{url}/inference/v1/generate", json=asked, headers=header, timeout=DEADLINE_S
            ).json()
            assert answer["model"].endswith(f".{version}")
            module = algorithm.get_module().unwrapped()
            assert_sampled_by(answer, module.model, asked["token_ids"])
    with pytest.raises(httpx.HTTPError):  # it ended with the run
        httpx.get(f"{url}/v1/models").raise_for_status()


RUN = """
served:
  run: GRPO
  env: rllib_llm/Arithmetic-v0
  stop: {{training_iteration: 100000}}
  config:
    model: rllib_llm.examples.arithmetic.build_model
    train_batch_size_per_learner: 32
    num_completions: 4
    max_new_tokens: 5
    weights_name: in_yaml
    serve: {{port: {port}, num_cpus: 0.5, num_threads: 1}}
"""


def command(*arguments: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
        start_new_session=True,
    )  # fmt: skip


@contextlib.contextmanager
def running(process: subprocess.Popen):
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_one_yaml_trains_a_run_and_serves_it(tmp_path):
    port = free_port()
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(port=port))
    url = f"http://127.0.0.1:{port}"
    train = ("rllib_llm.cli.main", "train", "file", str(file), "--storage-path", str(tmp_path))
    with running(command(*train)):
        until(lambda: answers(f"{url}/readyz"))
        seen = set()

        def comes_on() -> bool:
            body = {"model": "in_yaml", "prompt": "1+2=", "max_tokens": 3}
            made = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).json()
            seen.add(made["metadata"]["weight_version"])
            return len(seen) > 3

        until(comes_on)


def test_serve_s_own_yaml_and_haproxy(folder, tmp_path):
    port = free_port()
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {name: ann, key: k}\n")
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "policy", "route_prefix": "/",
                "import_path": "rllib_llm.serving.deployment:application",
                "args": {"model": folder, "api_keys_file": str(keys), "num_cpus": 0.5},
            },
        ],
    }  # fmt: skip
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    url, key = f"http://127.0.0.1:{port}", {"Authorization": "Bearer k"}
    # A Ray of its own: HAProxy is chosen when Ray starts.
    own = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_ADDRESS": "local"}
    run = command("ray.serve.scripts", "run", str(file), **own)
    with running(run):
        until(lambda: answers(f"{url}/v1/models", headers=key))
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            whole = client.completions.create(**KNOBS).choices[0].text
            chunks = client.completions.create(**KNOBS, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == whole
