"""A transport of one's own, CONTRIBUTING's, takes a learner's weights to a sampler."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray

from rllib_llm.rollouts.errors import SampleFailure
from rllib_llm.rollouts.judged_batch import SampleRequest
from rllib_llm.weights.published import PublishedWeights
from rllib_llm.weights.publisher import export_module
from tests.algorithms import tiny_runs as tiny
from tests.docs.code_blocks import blocks_of
from tests.learners import tiny_learners
from tests.rollouts.tiny_samplers import build_sampler, dealt, judged

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
PATH = "file_transport:make"


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Of a run whose weights lie in files of `tmp_path`."""
    (block,) = [block for block in blocks_of(PAGE) if block.title == "file_transport.py"]
    (tmp_path / "file_transport.py").write_text(block.code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield tiny.grpo().env_runners(num_env_runners=1).weights(transport=PATH)
    sys.modules.pop("file_transport", None)


def test_a_sampler_has_the_learners_weights(ray_session, config, tmp_path):
    learner = tiny_learners.build(config)
    expected = tiny_learners.module_of(learner).get_state(inference_only=True)
    for tensor in expected.values():
        tensor.mul_(2.0)  # not those that a sampler starts from
    ticket = export_module(learner, transport=config.weights_transport, checksum=True)
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert (ticket.transport, ticket.num_bytes) == (PATH, num_bytes)
    sampler = build_sampler(config, worker_index=1, has_weights=False)
    published = PublishedWeights(3, ref=(ray.put(ticket),))
    batch = judged(sampler, SampleRequest(0, 2, 3), published)
    assert set(batch.versions.tolist()) == {3}
    tiny.assert_same_weights(sampler.module.get_state(inference_only=True), expected)


def test_weights_that_are_gone_are_asked_for_again(ray_session, config, tmp_path):
    learner = tiny_learners.build(config)
    ticket = export_module(learner, transport=config.weights_transport)
    (file,) = tmp_path.glob("*.weights")
    file.unlink()
    sampler = build_sampler(config, worker_index=1, has_weights=False)
    answer = dealt(sampler, SampleRequest(0, 2, 3), PublishedWeights(1, ref=(ray.put(ticket),)))
    assert isinstance(answer, SampleFailure) and answer.weights_lost
    assert str(file) in answer.error
