"""Which groups are kept, drawn and dropped, by hand and by frequency."""

from __future__ import annotations

import collections

import pytest
import torch

from rllib_llm.rollouts import replay
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.rollouts.replay import ReplayBuffer
from rllib_llm.shared import columns


def batch(*groups: int, length: int = 2) -> JudgedBatch:
    """Two completions of each group; a token is its group's number."""
    ids = torch.tensor([[group] * length for group in groups for _ in range(2)])
    return JudgedBatch(
        columns={
            columns.COMPLETION_IDS: ids,
            columns.COMPLETION_MASK: torch.ones_like(ids).bool(),
            columns.GROUP: ids[:, 0],
            columns.VALID: torch.ones(len(ids)).bool(),
        },
        rewards=ids[:, 0].float(),
        components={"right": ids[:, 0].float()},
        timings={"generate_seconds": 1.0},
    )


def buffer_of(capacity: int, **settings) -> ReplayBuffer:
    return ReplayBuffer(num_groups=2, capacity=capacity, **settings)


def add(buffer: ReplayBuffer, rows: JudgedBatch, iteration: int) -> None:
    buffer.iteration = iteration
    buffer.add(rows)


def metrics(buffer: ReplayBuffer, iteration: int) -> dict[str, float]:
    buffer.iteration = iteration
    return buffer.metrics()


def drawn(buffer: ReplayBuffer, count: int, iteration: int) -> list[int]:
    """The groups of a draw, each once."""
    buffer.num_groups, buffer.iteration = count, iteration
    found = buffer.draw()
    groups = [] if found is None else found.columns[columns.GROUP].tolist()
    assert groups[::2] == groups[1::2]  # whole
    return groups[::2]


def test_the_oldest_goes_where_there_is_no_room():
    buffer = buffer_of(3)
    assert drawn(buffer, 2, 1) == []
    add(buffer, batch(0, 1), 1)
    add(buffer, batch(2, 3, length=5), 2)
    assert drawn(buffer, 9, 3) == [1, 2, 3]
    assert metrics(buffer, 4) == {
        "groups": 3, "occupancy": 1.0, "mean_uses": 2.0, "mean_age": pytest.approx(7 / 3),
        "reuse": 0.75, "added": 4, "drawn": 3, "evicted": 1, "used_up": 0,
    }  # fmt: skip


def test_a_group_goes_after_its_last_use():
    buffer = buffer_of(4, max_uses=3)
    add(buffer, batch(5), 1)  # used once, when it was fresh
    assert [drawn(buffer, 1, i) for i in (2, 3, 4)] == [[5], [5], []]
    assert metrics(buffer, 4)["used_up"] == 1


def test_recency_weighs_the_newer():
    """α = 1 over four groups: 1/10, 2/10, 3/10, 4/10."""
    buffer = buffer_of(4, max_uses=10**9, recency=1.0, seed=3)
    add(buffer, batch(0, 1, 2, 3), 1)
    counts = collections.Counter(drawn(buffer, 1, i)[0] for i in range(4000))
    for group, share in enumerate((0.1, 0.2, 0.3, 0.4)):
        # Four standard deviations of a binomial share of 4000 draws, at most 0.031.
        assert counts[group] / 4000 == pytest.approx(share, abs=0.031)


def test_draws_are_a_function_of_seed_and_iteration_and_survive_a_checkpoint():
    def filled(seed):
        buffer = buffer_of(8, max_uses=3, recency=0.5, seed=seed)
        add(buffer, batch(*range(8)), 1)
        return buffer

    whole, again, other = filled(0), filled(0), filled(1)
    first = [drawn(whole, 3, i) for i in range(3)]
    assert [drawn(again, 3, i) for i in range(3)] == first
    assert [drawn(other, 3, i) for i in range(3)] != first
    resumed = buffer_of(8, max_uses=3, recency=0.5, seed=0)
    resumed.set_state(whole.state())
    assert metrics(resumed, 4) == metrics(whole, 4)
    assert [drawn(resumed, 2, i) for i in (3, 4)] == [drawn(whole, 2, i) for i in (3, 4)]
    smaller = buffer_of(1)
    smaller.set_state(whole.state())
    assert len(smaller) <= 1


def groups_of(found: JudgedBatch) -> list[int]:
    return found.columns[columns.GROUP].tolist()[::2]


def test_earlier_groups_stand_behind_the_fresh_ones():
    buffer = buffer_of(2, max_uses=9)
    fresh = {i: batch(i, length=i) for i in range(1, 5)}
    assert groups_of(buffer.extend(fresh[1])) == [1]
    second = buffer.extend(fresh[2])
    assert groups_of(second) == [2, 1] and second.num_replayed == 2 and second.num_rows == 4
    assert groups_of(second.fresh) == [2] and second.fresh.num_replayed == 0
    # Rows of other lengths are padded, and nobody waited for the replayed ones.
    assert second.columns[columns.COMPLETION_MASK].sum(dim=1).tolist() == [2, 2, 1, 1]
    assert second.timings == {"generate_seconds": 1.0}
    assert groups_of(buffer.extend(fresh[3])) == [3, 1, 2]
    assert groups_of(buffer.extend(fresh[4])) == [4, 2, 3]


def test_a_resumed_buffer_goes_on_alike():
    whole, resumed = buffer_of(4, max_uses=3, seed=7), buffer_of(4, max_uses=3, seed=7)
    for i in range(1, 6):
        whole.extend(batch(i))
    resumed.set_state(whole.state())
    for i in range(6, 11):
        assert groups_of(resumed.extend(batch(i))) == groups_of(whole.extend(batch(i)))


def test_groups_without_the_reference_s_log_probs_go_where_the_environment_gives_them():
    """A run that goes on with reference_in='environment'; the other way learners compute them."""
    def scored(group):
        rows = batch(group)
        rows.columns[columns.REF_LOGPROBS] = torch.zeros(2, 2)
        return rows

    buffer = buffer_of(4, max_uses=9)
    buffer.extend(batch(1))
    assert groups_of(buffer.extend(scored(2))) == [2]
    assert buffer.metrics()["evicted"] == 1
    assert groups_of(buffer.extend(scored(3))) == [3, 2]
    mixed = buffer.extend(batch(4))
    assert groups_of(mixed) == [4, 2, 3] and columns.REF_LOGPROBS not in mixed.columns


def test_rates_are_of_the_last_batch(monkeypatch):
    times = iter([100.0, 102.0, 104.0, 109.0])
    monkeypatch.setattr(replay.time, "monotonic", lambda: next(times))
    buffer = buffer_of(4, max_uses=9)
    buffer.extend(batch(1, 2, 3))
    assert buffer.metrics()["added_per_s"] == 3 / 2 and buffer.metrics()["drawn_per_s"] == 0
    buffer.extend(batch(4))
    assert buffer.metrics()["added_per_s"] == 1 / 2 and buffer.metrics()["drawn_per_s"] == 2 / 2
    assert buffer.metrics()["on_policy"] == 1 / 3
    buffer.extend(batch(5))
    assert buffer.metrics()["drawn_per_s"] == 2 / 5


def test_each_environment_has_its_counts_and_rates(monkeypatch):
    times = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(replay.time, "monotonic", lambda: next(times))
    buffer = buffer_of(4, max_uses=9, env_names=("math", "chat"))

    def of(rows: JudgedBatch) -> JudgedBatch:
        env = rows.columns[columns.GROUP] % 2  # even groups are math's
        rows.columns[columns.ENVIRONMENT] = env.int()
        return rows

    buffer.extend(of(batch(1, 2, 4)))
    buffer.extend(of(batch(3)))
    found = buffer.metrics()
    assert (found["math/occupancy"], found["chat/occupancy"]) == (2 / 4, 2 / 4)
    assert (found["math/added"], found["chat/added"]) == (2, 2)
    assert (found["math/added_per_s"], found["chat/added_per_s"]) == (0, 1 / 2)
    assert found["math/drawn_per_s"] + found["chat/drawn_per_s"] == 2 / 2


def test_on_policy_is_the_share_of_fresh_groups_of_each_environment():
    """Only math's group is held when the second batch comes, which has both."""
    buffer = buffer_of(4, max_uses=9, env_names=("math", "chat"))
    found = []
    for groups in ((2,), (4, 1, 3)):
        rows = batch(*groups)
        rows.columns[columns.ENVIRONMENT] = (rows.columns[columns.GROUP] % 2).int()
        buffer.extend(rows)
        found.append({n: value for n, value in buffer.metrics().items() if "on_policy" in n})
    assert found == [
        {"on_policy": 1.0, "math/on_policy": 1.0},
        {"on_policy": 3 / 4, "math/on_policy": 1 / 2, "chat/on_policy": 1.0},
    ]
