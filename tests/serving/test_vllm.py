"""vLLM behind the server's routes."""

from __future__ import annotations

import httpx
import pytest

pytest.importorskip(
    "vllm", reason="vLLM has an environment of its own: `make test-vllm` installs and tests it"
)

from rllib_llm.modules.pretrained import load_causal_lm  # noqa: E402
from rllib_llm.serving.http_server import open_service  # noqa: E402
from tests.serving import tiny_server as tiny  # noqa: E402

pytestmark = pytest.mark.vllm

SOURCE = f"{__name__}.build"
ASKED = {"model": tiny.NAME, "prompt": [1, 40, 41], "max_tokens": 8, "logprobs": 0,
         "return_token_ids": True}  # fmt: skip
SETTINGS = {"kv_cache_memory_bytes": 64 * 1024**2, "enforce_eager": True}


def build():
    """A model whose heads are as wide as vLLM's kernels want."""
    return tiny.model(hidden_size=64, num_attention_heads=2), tiny.tokenizer()


@pytest.fixture(scope="module", params=["a function", "a folder"])
def served(request, tmp_path_factory):
    """The model by a dotted path, whose weights are handed over, and from a folder, in a process
    of the engine's own."""
    source = SOURCE
    if request.param == "a folder":
        source = str(tmp_path_factory.mktemp("model"))
        for part in build():
            part.save_pretrained(source)
    made = open_service(
        tiny.settings(
            model=source, engine="vllm", max_model_len=128, engine_process=source != SOURCE,
            engine_settings={"tensor_parallel_size": 1, **SETTINGS},
        )
    )  # fmt: skip
    with tiny.running(made) as url, httpx.Client(base_url=url, timeout=tiny.DEADLINE_S) as client:
        yield client, made
    made.close()


def test_the_routes_answer_as_with_our_engine(served):
    """Tokens and log-probs of greedy completions are those of one pass of transformers."""
    client, _ = served
    (answer,) = client.post("/v1/completions", json={**ASKED, "temperature": 0}).json()["choices"]
    tokens = answer["token_ids"]
    wanted = tiny.plain_logprobs(load_causal_lm(SOURCE), ASKED["prompt"], tokens)
    assert len(tokens) == 8
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-3)
    chat = {"model": tiny.NAME, "messages": [{"role": "user", "content": "hi"}], "seed": 3,
            "temperature": 0.7, "max_tokens": 6}  # fmt: skip
    one = client.post("/v1/chat/completions", json=chat).json()
    assert one["choices"] == client.post("/v1/chat/completions", json=chat).json()["choices"]
    assert one["usage"]["completion_tokens"] <= 6
    with client.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream:
        assert "data: [DONE]" in [*stream.iter_lines()]
    assert client.get("/v1/models").json()["data"][0]["id"] == tiny.NAME


@pytest.mark.parametrize("more", [{"response_format": {"type": "json_object"}}, {"logprobs": 2},
                                  {"prompt_logprobs": 0}])  # fmt: skip
def test_what_vllm_is_not_asked_for_is_refused_and_others_go_on(served, more):
    client, _ = served
    answer = client.post("/v1/completions", json={**ASKED, **more})
    assert answer.status_code == 400 and "engine='vllm'" in answer.json()["error"]["message"]
    assert client.post("/v1/completions", json=ASKED).status_code == 200


def test_new_weights_sample_what_comes_after_them(served):
    client, made = served
    other = tiny.model(1, hidden_size=64, num_attention_heads=2)
    made.load(other.state_dict(), epoch=1, version=2, source="a run")
    (answer,) = client.post("/v1/completions", json={**ASKED, "temperature": 0}).json()["choices"]
    wanted = tiny.plain_logprobs(other, ASKED["prompt"], answer["token_ids"])
    assert answer["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-3)
