"""Weights pushed to vLLM's own server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from rllib_llm.engines.servers import TokenCompletions
from rllib_llm.modules.lora import add_adapters, is_adapter, write_adapters
from rllib_llm.shared.openai_client import RequestRefusedError
from rllib_llm.weights.push import WeightsPush, open_servers
from tests import tiny_models
from tests.ports import free_port
from tests.serving.test_deployment import answers
from tests.serving.tiny_server import plain_logprobs, until

# Of an environment of its own, which `make test-vllm` makes, or another one.
PYTHON = os.environ.get("VLLM_PYTHON") or (
    sys.executable if importlib.util.find_spec("vllm") else None
)
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),  # on a busy machine a server starts for minutes, see START_SECONDS
    pytest.mark.skipif(
        PYTHON is None,
        reason="vLLM has an environment of its own: `make test-vllm`, or VLLM_PYTHON names one",
    ),
]

START_SECONDS = 900
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}  # fmt: skip
LORA = {"r": 4, "alpha": 3, "alpha_pattern": {"down_proj": 6}}
PROMPT = [1, *(5 + 7 * i % 250 for i in range(300))]  # longer than a block of the KV cache


def model(seed: int):
    """A Llama whose heads are as wide as vLLM's kernels want."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            initializer_range=0.3, tie_word_embeddings=False, pad_token_id=3, eos_token_id=2,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()


@contextlib.contextmanager
def vllm_server(tmp_path_factory, *options: str):
    """The address of vLLM's server with the model of seed 0."""
    folder = tiny_models.save(
        tmp_path_factory.mktemp("model") / "tiny", model(0), tiny_models.byte_tokenizer()
    )
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
         "--served-model-name", "m", "--port", str(port), "--dtype", "float32",
         "--max-model-len", "512", "--enforce-eager", "--disable-log-stats", *options],
        env=environment | ENVIRONMENT,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or answers(f"{address}/health"), START_SECONDS)
        assert process.poll() is None, "vLLM's server has ended"
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # told to end while it starts, vLLM 0.32 stays
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with vllm_server(tmp_path_factory) as address:
        yield address


def adapted(seed: int):
    """The server's model with adapters that change what it says."""
    trunk = model(0)
    add_adapters(trunk, LORA)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in trunk.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return trunk


def assert_answers_by(address: str, the_model) -> None:
    """What it samples has the log-probs of this model."""
    body = {
        "model": "m", "prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "temperature": 1.0,
        "seed": 3, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    (choice,) = answer.raise_for_status().json()["choices"]
    told = choice["logprobs"]["token_logprobs"]
    assert len(told) == 12
    expected = plain_logprobs(the_model, PROMPT, choice["token_ids"])
    assert told == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pause_mode", ["wait", "keep", "abort"])
def test_a_real_vllm_answers_by_what_was_pushed_last(server, tmp_path, pause_mode):
    entry = {"server": "vllm", "base_url": f"{server}/v1", "pause_mode": pause_mode}
    trained = model(0)
    push = WeightsPush(
        open_servers([entry]), tmp_path / "pushed", lambda folder: trained.save_pretrained(folder)
    )
    try:
        for version, seed in ((1, 1), (2, 2), (3, 0)):
            trained = model(seed)
            push.push(5, version)
            assert_answers_by(server, model(seed))
            assert httpx.get(f"{server}/weight_info").json()["weight_version"] == f"5.{version}"
            assert httpx.get(f"{server}/is_paused").json() == {"is_paused": False}
    finally:
        push.close()


def test_a_real_vllm_answers_by_the_adapters_of_each_version(tmp_path_factory, tmp_path):
    options = ("--enable-scale-out", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
    params = SamplingParams(3, (2,), max_new_tokens=12)
    with vllm_server(tmp_path_factory, *options) as address:
        entry = {"server": "vllm", "base_url": address, "method": "adapters", "name": "p"}

        def write(folder):
            adapters = {n: p for n, p in trained.named_parameters() if is_adapter(n)}
            write_adapters(adapters, LORA, folder)

        push = WeightsPush(open_servers([entry]), tmp_path / "new", write, write)
        engine = TokenCompletions(
            base_url=address, follows_run=True, exact_noise=False, adapters="p", max_attempts=1
        )

        def answer(version):
            row = Row(version, PROMPT, params, noise=Noise(7, version), published=(5, version))
            return engine.submit(row).result(60)

        try:
            for version in (1, 2, 3):
                trained = adapted(version)
                push.push(5, version)
                for asked in {max(1, version - 1), version}:
                    ended = answer(asked)
                    assert ended.versions == [asked] * len(ended.token_ids)
                    expected = plain_logprobs(adapted(asked), PROMPT, ended.token_ids)
                    assert ended.logprobs == pytest.approx(expected, abs=1e-4)
            with pytest.raises(RequestRefusedError, match="p@5.1"):
                answer(1)
            # A version that comes again is another one: nothing of the first is used.
            trained = adapted(9)
            push.push(5, 3)
            ended = answer(3)
            expected = plain_logprobs(trained, PROMPT, ended.token_ids)
            assert ended.logprobs == pytest.approx(expected, abs=1e-4)
        finally:
            engine.close()
            push.close()
