"""Batches in step with the learner: consecutive prompts, with weights as they were published."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.rollouts.errors import BrokenSamplerError, PublishedWeightsLostError
from rllib_llm.rollouts.on_policy import OnPolicy
from rllib_llm.rollouts.request import JudgedBatch
from rllib_llm.rollouts.samples import texts_are_due
from rllib_llm.shared import columns
from tests.rollouts.tiny_samplers import publication


class ScriptedCollector:
    """Notes what is asked for; a batch says where it begins and which weights sampled it."""

    def __init__(self):
        self.requests = []
        self.fails = []  # exceptions, the next first

    def collect(self, request, published):
        self.requests.append((request.position, published.version, request.return_texts))
        if self.fails:
            raise self.fails.pop(0)
        group = torch.tensor([request.position])
        versions = torch.full((1, 1), published.version, dtype=torch.int32)
        held = {columns.GROUP: group, columns.WEIGHTS_VERSION: versions}
        return JudgedBatch(held, rewards=torch.zeros(1))


def source(collector, *, texts_every=0, publish_again=None):
    made = OnPolicy(
        collector, num_prompts=4, num_completions=2, texts_every=texts_every,
        publish_again=publish_again,
    )  # fmt: skip
    made.publish(publication(0))
    return made


def learn(made, num_updates):
    """(position, version) of each batch; a version is published after each."""
    seen = []
    for _ in range(num_updates):
        batch = made.next()
        version = int(batch.columns[columns.WEIGHTS_VERSION])
        seen.append((int(batch.columns[columns.GROUP]), version))
        made.publish(publication(made._weights.version + 1))
    return seen


def test_each_batch_has_the_newest_weights():
    made = source(ScriptedCollector())
    assert learn(made, 3) == [(0, 0), (4, 1), (8, 2)]
    assert made.position == 12


def test_texts_come_with_every_second_batch_and_the_second():
    collector = ScriptedCollector()
    learn(source(collector, texts_every=2), 4)
    wanted = {position: texts for position, _, texts in collector.requests}
    assert [wanted[position] for position in (0, 4, 8, 12)] == [True, True, True, False]


def test_a_restored_source_goes_on_behind_what_was_learnt_from():
    made = source(ScriptedCollector())
    learn(made, 2)
    other = source(ScriptedCollector())
    other.set_state({**made.state(), "weights_version": 2})
    other.publish(publication(2))
    assert learn(other, 2) == learn(made, 2) == [(8, 2), (12, 3)]


def test_lost_weights_are_published_again_and_the_same_prompts_sampled():
    collector = ScriptedCollector()
    lost = []

    def publish_again(error):
        lost.append(str(error))
        return publication(0, key="again")

    made = source(collector, publish_again=publish_again)
    collector.fails.append(PublishedWeightsLostError("gone with its owner"))
    assert learn(made, 1) == [(0, 0)]
    assert lost == ["gone with its owner"] and len(collector.requests) == 2


def test_a_failure_is_raised_and_the_same_prompts_are_sampled_next():
    collector = ScriptedCollector()
    made = source(collector)
    collector.fails.append(BrokenSamplerError("no judge"))
    with pytest.raises(BrokenSamplerError, match="no judge"):
        made.next()
    assert learn(made, 1) == [(0, 0)]


def test_texts_of_short_runs_are_logged_more_than_once():
    assert [version for version in range(31) if texts_are_due(version, 10)] == [
        0, 1, 2, 4, 8, 10, 20, 30
    ]  # fmt: skip
    assert not any(texts_are_due(version, 0) for version in range(31))
