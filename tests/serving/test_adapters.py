"""A run that trains adapters is served as whole weights."""

from __future__ import annotations

import copy

import httpx
import pytest
import torch

from rllib_llm.modules.lora import add_adapters, is_adapter
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.quantization import quantize
from rllib_llm.serving.http_server import open_service
from rllib_llm.serving.settings import ServeSettings, read_settings
from rllib_llm.serving.weight_sources import AdapterMerger, follow
from rllib_llm.shared.errors import Problems
from tests import tiny_models
from tests.algorithms import tiny_runs
from tests.serving.test_deployment import assert_sampled_by
from tests.serving.tiny_server import DEADLINE_S, running, until

LORA = {"r": 4, "alpha": 12}
IDS = torch.randint(3, 13, (2, 7), generator=torch.Generator().manual_seed(0))


def settings(**changes) -> ServeSettings:
    return ServeSettings(
        **{"model": tiny_runs.MODEL, "weights_name": "adapters", "lora": LORA, **changes}
    )


def adapted(quantization: str):
    """(a policy under adapters that do something, the adapters by their names in its state)"""
    model = load_causal_lm(tiny_runs.MODEL)
    if quantization != "none":
        model = quantize(model, quantization, device="cpu")
    add_adapters(model, LORA)
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
            found[f"model.{name}"] = parameter.data
    return model, found


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_merged_weights_compute_what_the_policy_under_adapters_does(quantization):
    policy, adapters = adapted(quantization)
    merger = AdapterMerger(tiny_runs.MODEL, settings(quantization=quantization))
    served = load_causal_lm(tiny_runs.MODEL)
    for _ in range(2):  # each version lies on the trunk, and not on the one before
        served.load_state_dict(merger.merged(copy.deepcopy(adapters)))
        with torch.no_grad():
            torch.testing.assert_close(served(IDS).logits, policy(IDS).logits, atol=1e-5, rtol=1e-5)


def test_adapters_of_one_side_of_shared_embeddings_are_refused(tmp_path):
    folder = tiny_models.save(
        tmp_path / "tied", tiny_models.llama(tie_word_embeddings=True), tiny_models.byte_tokenizer()
    )
    lora = {"r": 2, "target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(ValueError, match="must leave out the embeddings where input and output"):
        AdapterMerger(folder, settings(lora=lora))


def test_adapters_of_another_run_are_refused():
    _, adapters = adapted("none")
    merger = AdapterMerger(tiny_runs.MODEL, settings(lora={"r": 2}))
    with pytest.raises(ValueError, match="lora must be the run's own: it publishes model"):
        merger.merged(adapters)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"lora": {}}, "lora must come with weights_name"),
        ({"weights_name": "r", "quantization": "int8"}, "quantization must come with lora"),
    ],
)
def test_settings_that_merge_nothing_are_refused(given, problem):
    with pytest.raises(Problems, match=problem):
        read_settings({"model": "m", **given}, environment={})


@pytest.mark.slow  # a run and a server
def test_a_server_follows_a_run_that_trains_adapters(ray_session):
    config = tiny_runs.grpo(lr=0.01).language_model(lora=LORA).weights(name="adapters_served")
    asked = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 6, "logprobs": 0, "seed": 1}}
    with tiny_runs.built(config) as algorithm:
        service = open_service(
            settings(
                weights_name="adapters_served",
                weights_wait_s=DEADLINE_S,
                name="run",
                engine_process=False,
            )
        )
        with running(service) as address:
            source = follow(service)
            try:
                for version in (1, 2):
                    algorithm.train()
                    until(lambda version=version: service.weights.newest.version == version)
                    answer = httpx.post(f"{address}/inference/v1/generate", json=asked).json()
                    assert answer["model"] == f"run@{service.weights.newest.label}"
                    policy = algorithm.get_module().unwrapped().model
                    assert_sampled_by(answer, policy, asked["token_ids"])
            finally:
                source.stop()
