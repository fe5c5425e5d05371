"""Which environment a position is of: shares, states, and news that come at any time."""

from __future__ import annotations

import pickle

import pytest

from rllib_llm.rollouts.mixture import Mixture, News, Place


def dealt(mixture, positions, turn=None):
    return [mixture.place(position, turn) for position in positions]


def test_the_order_of_two_to_one_is_websters():
    """Of (n + ½)/q: 1/4, 3/4 for two groups of a batch of three, and 1/2 for one."""
    envs = [place.env for place in dealt(Mixture((2, 1), batch_size=3), range(9))]
    assert envs == [0, 1, 0, 0, 1, 0, 0, 1, 0]


WEIGHTS = [(1, 1), (2, 1), (3, 2, 1), (0.7, 0.1, 0.2), (5, 0, 1, 1, 1), (0.31, 0.3, 0.29, 0.1)]


@pytest.mark.parametrize("size", [1, 4, 7, 16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_batch_is_within_one_group_of_the_weights(weights, size):
    """An environment has its share rounded down or up, so less than one group more or less, and so
    over all batches: nothing where they are whole numbers."""
    mixture, num_batches = Mixture(weights, "groups", size), 60
    envs = [place.env for place in dealt(mixture, range(num_batches * size))]
    for env, weight in enumerate(weights):
        share, so_far = size * weight / sum(weights), 0
        for batch in range(num_batches):
            count = envs[batch * size : (batch + 1) * size].count(env)
            assert abs(count - share) < 1
            so_far += count
            assert abs(so_far - (batch + 1) * share) < 1


def test_other_weights_keep_what_is_owed():
    """Of 1 group in a batch of 4 a share of 0.4 is never the largest, whatever the others' are."""
    mixture, counts = Mixture((1, 1, 1), batch_size=2), [0, 0, 0]
    for turn in range(40):
        mixture.learn(News(turn, weights=((0.7, 0.7 + turn % 2, 0.2))))
        for place in dealt(mixture, range(2 * turn, 2 * turn + 2), turn):
            counts[place.env] += 1
    share = sum(2 * 0.2 / (1.6 + turn % 2) for turn in range(40))  # about 8
    assert counts[2] == pytest.approx(share, abs=1)


def test_positions_of_an_environment_follow_one_another():
    mixture = Mixture((3, 2, 1))
    for env in range(3):
        own = [place.position for place in dealt(mixture, range(60)) if place.env == env]
        assert own == list(range(len(own)))


@pytest.mark.parametrize("by", ["position", "state"])
def test_it_continues_at_any_position(by):
    whole = dealt(Mixture((3, 2, 1), batch_size=4), range(40))
    mixture = Mixture((3, 2, 1), batch_size=4)
    if by == "position":
        mixture.begin(17)
    else:
        before = Mixture((3, 2, 1), batch_size=4)
        dealt(before, range(17))
        mixture.set_state(pickle.loads(pickle.dumps(before.state())))
    assert dealt(mixture, range(17, 40)) == whole[17:]


def test_a_state_of_before_batches_were_dealt_is_taken():
    mixture = Mixture((1, 1), batch_size=2)
    older = {name: value for name, value in mixture.state().items() if name != "_quotas"}
    mixture.set_state({**older, "_dealt": [7, 3]})
    assert sorted(place.env for place in dealt(mixture, range(2))) == [0, 1]


def test_one_environment_has_the_positions_of_all():
    assert dealt(Mixture(), range(3, 6)) == [Place(0, 3), Place(0, 4), Place(0, 5)]


def test_news_hold_from_their_batch_on_whenever_they_come():
    early, late = Mixture((1, 1)), Mixture((1, 1))
    for mixture in (early, late):
        dealt(mixture, range(4), 0)
    early.learn(News(2, weights=(1.0, 0.0)))
    found = [dealt(early, range(4, 8), 1)]
    found.append(dealt(late, range(4, 8), 1))
    late.learn(News(2, weights=(1.0, 0.0)))
    assert found[0] == found[1]
    assert {place.env for place in dealt(early, range(8, 12), 2)} == {0}
    assert dealt(early, range(8, 12), 2) == dealt(late, range(8, 12), 2)


def test_by_tokens_the_shorter_completions_are_sampled_more_often():
    """Groups of 30 and of 10 tokens, alike in weight: three of the shorter for one of the other."""
    mixture, tokens, position = Mixture((1, 1), "tokens"), [0, 0], 0
    for turn in range(1, 30):
        batch = range(position, position + 8)
        position += 8
        of = {p: (30, 10)[mixture.place(p, turn - 1).env] for p in batch}
        for p, count in of.items():
            tokens[mixture.place(p).env] += count
        mixture.learn(News(turn, tokens=of, settled=position - 1))
        mixture.forget(position)
    assert tokens[0] / sum(tokens) == pytest.approx(0.5, abs=0.02)
