"""An engine of one's own, CONTRIBUTING's, by its dotted path."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.weights.published import PublishedWeights
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import build_sampler, judged

ECHO = "tests.engines.contributed.EchoEngine"


def config(**streaming):
    own = tiny.grpo().sampling(engine=ECHO).env_runners(num_env_runners=1)
    return own.streaming(**streaming) if streaming else own


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_staleness": 1, "schedule": "free", "in_flight": "keep"}],
    ids=["batches", "rows"],
)
def test_a_run_trains_on_what_it_samples(ray_session, settings):
    made = config(**settings)
    if settings:
        made.training(off_policy="decoupled")
    with tiny.built(made) as algorithm:
        before = {name: tensor.clone() for name, tensor in tiny.weights(algorithm).items()}
        results = [algorithm.train() for _ in range(2)]
        after = tiny.weights(algorithm)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(result["episode"] for result in results)


def test_it_repeats_the_prompt_for_a_sampler():
    sampler = build_sampler(config(), worker_index=1, has_weights=False)
    request = SampleRequest(0, 2, 3, return_texts=True)
    batch = judged(sampler, request, PublishedWeights(4))
    sampler.stop()
    for prompt, completion in zip(batch.texts["prompt"], batch.texts["completion"], strict=True):
        assert completion in prompt * 5 and len(completion) == 5
    assert set(batch.versions.tolist()) == {4} and sampler.module is None
