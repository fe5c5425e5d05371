"""Groups sampled row by row: a batch's tokens, whoever goes on with them, versions per token."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.rollouts.groups import Lease, PartialCompletion
from rllib_llm.rollouts.in_flight import SingleRows
from rllib_llm.rollouts.judged_batch import SampleRequest, judged_groups, opened
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import (
    NUM_COMPLETIONS,
    build_sampler,
    finish,
    judged,
    publication,
    stream,
)

N = NUM_COMPLETIONS


@pytest.fixture(scope="module")
def sampler():
    return build_sampler(tiny.grpo(), worker_index=1).sampler


def test_rows_have_the_tokens_and_scores_of_a_batch(sampler):
    """Up to round-off in the log-probs: what is computed together differs."""
    made = stream(sampler)
    made.add(Lease(1, 4, 2, publication()))
    made.step()
    made.add(Lease(2, 9, 1, publication()))
    assert made.leases == {1, 2}
    found = finish(made, sampler)
    for start, count in ((4, 2), (9, 1)):
        expected = judged(sampler, SampleRequest(start, count, N), publication())
        for batch in [opened(group.payload) for group in judged_groups(expected)]:
            group = found[int(batch.columns[columns.GROUP][0])]
            assert group.columns.keys() == batch.columns.keys()
            for name, column in batch.columns.items():
                same = torch.equal
                if column.is_floating_point():
                    same = torch.allclose
                assert same(group.columns[name], column), name
            assert torch.equal(group.rewards, batch.rewards)
            assert group.texts == batch.texts and len(batch.texts["completion"]) == N


def test_another_sampler_goes_on_where_one_stopped(sampler):
    whole = stream(sampler)
    whole.add(Lease(1, 4, 1, publication()))
    expected = finish(whole, sampler)[4].columns
    begun = stream(sampler)
    begun.add(Lease(1, 4, 1, publication()))
    begun.step()
    begun.step()
    ((lease, partial),) = begun.partial().items()
    lengths = [len(tokens.token_ids) for tokens in partial[4]]
    assert lease == 1 and 0 < max(lengths) <= 2
    begun.drop(1)
    assert not begun.leases
    other = stream(sampler)
    lease = Lease(2, 4, 1, publication(), partial=partial)
    other.add(lease)
    assert not other.begun_anew(lease)
    found = finish(other, sampler)[4].columns
    for name in (columns.COMPLETION_IDS, columns.FINISHED, columns.SCORES):
        assert torch.equal(found[name], expected[name]), name


def test_a_row_that_a_shorter_limit_ended_is_not_taken_for_a_whole_one(sampler):
    made = stream(sampler)  # of 5 tokens
    for finish_of_one, anew in (("length", [4]), ("stop", [])):
        ended = PartialCompletion((5, 6, 7), (-1.0,) * 3, (0,) * 3, finish=finish_of_one)
        rest = [PartialCompletion((5,), (-1.0,), (0,))] * (N - 1)
        lease = Lease(1, 4, 1, publication(), partial={4: (ended, *rest)})
        made.add(lease)
        assert made.begun_anew(lease) == anew
        made.drop(1)


@pytest.mark.parametrize("num_completions, changes", [
    (6, {}), (2, {}), (N, {"max_new_tokens": 2}), (N, {"prompts": tiny.EVAL_PROMPTS}),
])  # fmt: skip
def test_partial_output_that_other_settings_made_is_begun_anew(sampler, num_completions, changes):
    """A restored run may have more or fewer completions, shorter ones, or other prompts: it ended
    with `list index out of range`, or put the tokens of one prompt behind another."""
    begun = stream(sampler)
    begun.add(Lease(1, 4, 1, publication()))
    for _ in range(3):
        begun.step()
    ((_, partial),) = begun.partial().items()
    config = tiny.grpo().sampling(max_new_tokens=changes.get("max_new_tokens", 5))
    config.env_config["prompts"] = changes.get("prompts", tiny.PROMPTS)
    other = build_sampler(config, worker_index=1).sampler
    found = []
    for held in (partial, {}):
        made = SingleRows(other, ServingSettings(num_completions, in_flight="keep"))
        made.load(publication(), 0)
        lease = Lease(2, 4, 1, publication(), partial=held)
        assert made.add(lease) == [] and made.begun_anew(lease) == list(held)
        found.append(finish(made, other)[4].columns)
    assert torch.equal(found[0][columns.COMPLETION_IDS], found[1][columns.COMPLETION_IDS])
    assert len(found[0][columns.COMPLETION_IDS]) == num_completions


def test_nothing_is_sampled_behind_the_end_of_a_row_that_an_engine_has_not_looked_at(sampler):
    """As on a GPU, whose engine looks at every eighth step which rows have ended."""
    whole = stream(sampler)
    whole.add(Lease(1, 4, 2, publication()))
    expected = finish(whole, sampler)
    for num_steps in (3, 4):
        begun = stream(sampler)
        begun._engine._decoder.steps_between_looks = 8
        begun.add(Lease(1, 4, 2, publication()))
        begun.add(Lease(2, 9, 1, publication()))
        for _ in range(num_steps):
            assert not begun.step()
        begun.drop(2)  # by a renewal, which then asks for what there is of the others
        partial = begun.partial()[1]
        finishes = {tokens.finish for rows in partial.values() for tokens in rows}
        assert finishes == {"aborted", "stop"}
        other = stream(sampler)
        other.add(Lease(3, 4, 2, publication(), partial=partial))
        found = finish(other, sampler)
        for position, batch in expected.items():
            for name in (columns.COMPLETION_IDS, columns.FINISHED, columns.SCORES):
                assert torch.equal(found[position].columns[name], batch.columns[name]), name


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish"])
def test_each_token_carries_the_version_that_sampled_it(sampler, in_flight):
    """Complaint: the version is stamped when the completion is over, so that its age is counted
    too low (AReaL #1569, rllm #622, slime #2279)."""
    made = stream(sampler, in_flight=in_flight)
    made.add(Lease(1, 4, 1, publication()))
    made.step()
    made.step()
    made.load(publication(3), 3)
    assert not made.is_news(publication(3), 3)
    held = finish(made, sampler)[4].columns
    mask, versions = held[columns.COMPLETION_MASK], held[columns.WEIGHTS_VERSION]
    later = 0 if in_flight == "finish" else 3
    assert set(versions[:, :2][mask[:, :2]].tolist()) == {0}
    assert set(versions[:, 2:][mask[:, 2:]].tolist()) == {later}


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "finish"])
def test_new_weights_abort_nothing_in_flight(sampler, in_flight):
    """Complaint: a new version threw all that was in flight away, 1.1 M tokens in 221 steps (miles
    #2296, #2372). Every row ends by itself, with the tokens that it has where nothing is loaded."""
    undisturbed = stream(sampler)
    undisturbed.add(Lease(1, 4, 2, publication()))
    expected = finish(undisturbed, sampler)
    made = stream(sampler, in_flight=in_flight)
    made.add(Lease(1, 4, 2, publication()))
    for version in (1, 2, 3):
        made.step()
        made.load(publication(version), version)
    found = finish(made, sampler)
    for position, batch in expected.items():  # the weights are alike but for their version
        for name in (columns.COMPLETION_IDS, columns.COMPLETION_MASK, columns.FINISHED):
            assert torch.equal(found[position].columns[name], batch.columns[name]), name


def test_rows_finish_on_their_weights_while_others_begin_on_newer_ones(sampler):
    """Complaint: weights that come while others are loaded race with them (SkyRL #1605). Rows in
    flight end on their weights; those that come while both engines have rows wait until one is
    empty, and never begin on weights before their lease's, from which their age is counted."""
    made = stream(sampler, in_flight="finish")
    versions = {}

    def turn():
        for _, generated in made.step():
            held = sampler.judge(generated, beside=True).columns
            sampled = held[columns.WEIGHTS_VERSION][held[columns.COMPLETION_MASK]]
            versions[int(held[columns.GROUP][0])] = set(sampled.tolist())

    for version, position in ((0, 4), (1, 5), (2, 6)):
        made.load(publication(version), version)
        made.add(Lease(version + 1, position, 1, publication(version), order=version))
        turn()
    made.load(publication(3), 3)
    while made.leases:
        turn()
    made.add(Lease(9, 7, 1, publication(3), order=3))
    while made.leases:
        turn()
    # Version 2 came while groups 4 and 5 were being sampled, and 3 before either had ended.
    assert versions == {4: {0}, 5: {1}, 6: {3}, 7: {3}}


def no_judge(completions):
    raise KeyError("no judge")


def test_a_group_that_cannot_be_judged_is_handed_in_with_the_cause():
    """Complaint: one prompt that a judge cannot read ends the run (MathVerify, an empty answer). It
    is rejected and counted, with all its tokens."""
    config = tiny.grpo()
    config.env_config["reward_functions"] = f"{__name__}.no_judge"
    sampler = build_sampler(config, worker_index=1).sampler
    made = stream(sampler)
    made.add(Lease(1, 4, 1, publication()))
    batch = finish(made, sampler)[4]
    (group,) = judged_groups(batch, min_valid=2)
    assert group.reason == "unjudged" and "KeyError: 'no judge'" in group.cause
    assert group.num_tokens == int(batch.columns[columns.COMPLETION_MASK].sum()) > 0


def test_a_group_that_lost_a_member_is_learnt_from_by_the_rest(sampler):
    """Complaint: one sample that infrastructure aborted kills its group (miles #2800, AReaL
    #1559)."""
    made = stream(sampler)
    made.add(Lease(1, 4, 1, publication()))
    batch = finish(made, sampler)[4]
    lengths = batch.columns[columns.COMPLETION_MASK].sum(dim=1)
    for num_lost, reason in ((1, ""), (2, "too_few")):
        batch.columns[columns.VALID][:num_lost] = False
        (group,) = judged_groups(batch, min_valid=2)
        assert group.reason == reason
        assert group.num_lost == int(lengths[:num_lost].sum())
        assert group.num_tokens == int(lengths.sum())


def test_only_tokens_of_the_newest_weights_are_learnt_from_where_that_is_asked_for(sampler):
    """Complaint: tokens of versions 2, 4 and 6 in one sample, unmasked (slime #2092), or a mask of
    another length (#1440). Those that are masked are accounted for as lost."""
    made = stream(sampler, masks_stale_prefix=True)
    made.add(Lease(1, 4, 1, publication()))
    made.step()
    made.step()
    made.load(publication(3), 3)
    batch = finish(made, sampler)[4]
    held = batch.columns
    mask, versions = held[columns.COMPLETION_MASK], held[columns.WEIGHTS_VERSION]
    long = mask.sum(dim=1) > 2
    assert long.any()
    assert torch.equal(held[columns.LOSS_MASK][long], (mask & (versions == 3))[long])
    assert torch.equal(held[columns.LOSS_MASK][~long], mask[~long])
    (group,) = judged_groups(batch)
    assert group.num_tokens == int(mask.sum())
    assert group.num_lost == int(mask.sum() - held[columns.LOSS_MASK].sum()) > 0


class TellsWhatWasSampled:
    """An environment that says so of all but the second token of a completion."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)

    def step(self, completions):
        *outcome, infos = self._env.step(completions)
        sampled = completions[columns.COMPLETION_MASK].clone()
        sampled[:, 1] = False
        return (*outcome, infos | {columns.LOSS_MASK: sampled})


@pytest.mark.parametrize("masks", [False, True])
def test_what_an_environment_says_was_not_sampled_is_no_rows_own(masks):
    """It counts for no length and no group's tokens, as in a batch that was sampled at once; and
    what it says does not make stale tokens count again."""
    sampler = build_sampler(tiny.grpo(), worker_index=1).sampler
    sampler.environment.env = TellsWhatWasSampled(sampler.environment.env)
    made = stream(sampler, masks_stale_prefix=masks)
    made.add(Lease(1, 4, 1, publication()))
    for _ in range(3):
        made.step()
    made.load(publication(3), 3)
    held = (batch := finish(made, sampler)[4]).columns
    told = held[columns.COMPLETION_MASK].clone()
    told[:, 1] = False
    assert torch.equal(columns.written_mask(held), told)
    assert (held[columns.WEIGHTS_VERSION][:, 1] == -1).all()
    (group,) = judged_groups(batch)
    assert group.num_tokens == int(told.sum())
    long = told.sum(dim=1) > 2
    assert long.any()
    newest = told & (held[columns.WEIGHTS_VERSION] == 3)
    assert torch.equal(held[columns.LOSS_MASK][long], (newest if masks else told)[long])
