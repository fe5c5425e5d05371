"""Batches in step with the learner: consecutive prompts, with weights as they were published."""

from __future__ import annotations

import pytest
import torch

from rllib_llm import columns
from rllib_llm.rollouts.errors import BrokenSamplerError, PublishedWeightsLostError
from rllib_llm.rollouts.on_policy import OnPolicy
from rllib_llm.rollouts.request import JudgedBatch
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


def source(collector, *, is_ahead=False, texts_every=0, publish_again=None):
    made = OnPolicy(
        collector, num_prompts=4, num_completions=2, is_ahead=is_ahead, texts_every=texts_every,
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


def test_each_batch_has_the_newest_weights_or_those_before():
    assert learn(source(ScriptedCollector()), 3) == [(0, 0), (4, 1), (8, 2)]
    ahead = source(ScriptedCollector(), is_ahead=True)
    assert learn(ahead, 4) == [(0, 0), (4, 0), (8, 1), (12, 2)]
    assert ahead.position == 16


@pytest.mark.parametrize("is_ahead", [False, True])
def test_texts_come_with_every_second_batch(is_ahead):
    collector = ScriptedCollector()
    made = source(collector, is_ahead=is_ahead, texts_every=2)
    learn(made, 4)
    made.stop()
    wanted = {position: texts for position, _, texts in collector.requests}
    assert [wanted[position] for position in (0, 4, 8, 12)] == [True, False, True, False]


def test_a_restored_source_hands_out_the_batch_that_was_waiting():
    made = source(ScriptedCollector(), is_ahead=True)
    learn(made, 2)
    state = made.state()
    assert state["position"] == state["in_flight"]["position"] == 8
    expected = learn(made, 2)
    collector = ScriptedCollector()
    other = source(collector, is_ahead=True)
    other.set_state(state)
    other.publish(publication(2))
    assert learn(other, 2) == expected == [(8, 1), (12, 2)]
    assert collector.requests[0][0] == 12  # nobody was asked for the other again


def test_a_waiting_batch_of_an_older_format_is_sampled_again(caplog):
    made = source(ScriptedCollector(), is_ahead=True)
    learn(made, 1)
    state = made.state()
    del state["in_flight"]["batch"]["columns"][columns.GROUP]
    made.set_state(state)
    assert "of an older format: it is sampled again" in caplog.text
    assert learn(made, 1) == [(4, 1)]


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


def test_a_failure_ahead_is_raised_where_its_batch_is_wanted_and_not_twice():
    collector = ScriptedCollector()
    made = source(collector, is_ahead=True)
    made.next()
    made.stop()
    collector.fails.append(BrokenSamplerError("no judge"))
    assert int(made.next().columns[columns.GROUP]) == 4  # sampled before
    with pytest.raises(BrokenSamplerError, match="no judge"):
        made.next()
    assert int(made.next().columns[columns.GROUP]) == 8
