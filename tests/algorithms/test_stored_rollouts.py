"""What a run keeps of its rollouts, over a restore as well; and groups learnt from twice."""

from __future__ import annotations

import collections

import pytest
import torch

from rllib_llm.data.rollouts import NoRolloutsError, open_rollouts, query, rollout_folders
from rllib_llm.numerics.advantages import group_normalized
from tests.algorithms import tiny_runs as tiny


def kept(algorithm, where: str | None = None) -> list[dict]:
    algorithm.recorder.state()  # all that was recorded is written
    found = open_rollouts(rollout_folders(algorithm.logdir))
    return query(found, where=where).to_pylist()


def test_every_completion_is_a_row_with_its_advantage():
    config = tiny.grpo().evaluation(evaluation_interval=2, evaluation_duration=4)
    with tiny.built(config) as algorithm:
        for _ in range(2):
            algorithm.train()
        rows = kept(algorithm, "status = 'trained'")
        held_out = kept(algorithm, "status = 'evaluated'")
        assert algorithm.recorder.metrics()["rows"] == len(rows) + len(held_out)
    num_rows = config.total_train_batch_size
    assert [row["iteration"] for row in rows] == [1] * num_rows + [2] * num_rows
    assert [row["position"] * 3 + row["sample"] for row in rows] == list(range(2 * num_rows))
    scores = torch.tensor([row["score"] for row in rows])
    groups = torch.tensor([row["group"] for row in rows])
    expected = group_normalized(scores, groups, valid=torch.ones_like(groups).bool())
    # GRPO takes no KL off the score here: the advantage of a row is all its tokens'.
    found = torch.tensor([row["advantages"][0] for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    for row in rows:
        assert len(row["logprobs"]) == len(row["completion_ids"]) == len(row["advantages"])
        version = row["iteration"] - 1
        assert row["version_spans"] == [{"version": version, "start": 0, "end": row["tokens"]}]
        assert row["prompt"] in {prompt["prompt"] for prompt in tiny.PROMPTS}
    counts = collections.Counter(row["iteration"] for row in held_out)
    assert counts == {0: 4, 2: 4}  # before training, and after the second iteration


def test_they_lie_where_the_setting_says(tmp_path):
    config = tiny.grpo().rollouts(rollouts_path=str(tmp_path))
    with tiny.built(config) as algorithm:
        algorithm.train()
        algorithm.recorder.state()
        (folder,) = rollout_folders(tmp_path)
        assert folder == tmp_path / algorithm.trial_folder.name
        with pytest.raises(NoRolloutsError):
            rollout_folders(algorithm.logdir)
    rows = query(open_rollouts([folder])).to_pylist()
    assert len(rows) == config.total_train_batch_size


def test_a_restored_run_has_each_row_once(tmp_path):
    with tiny.built(tiny.grpo()) as algorithm:
        algorithm.train()
        algorithm.save_to_path(tmp_path / "checkpoint")
        first = [algorithm.train() for _ in range(2)]
        before = kept(algorithm)
        algorithm.restore_from_path(tmp_path / "checkpoint")
        again = [algorithm.train() for _ in range(2)]
        after = kept(algorithm)
    assert [r["objective"] for r in first] == [r["objective"] for r in again]

    def identity(rows):
        return [(row["iteration"], row["position"], row["sample"], row["completion"])
                for row in rows]  # fmt: skip

    assert identity(after) == identity(before)


def test_nothing_is_kept_where_it_is_switched_off():
    with tiny.built(tiny.grpo().rollouts(store=False)) as algorithm:
        result = algorithm.train()
        assert algorithm.recorder.state() == {}
        with pytest.raises(NoRolloutsError):
            rollout_folders(algorithm.logdir)
    assert "rows" not in result.get("rollout_store", {})


def replaying():
    config = tiny.grpo(off_policy="decoupled", num_epochs=1)
    return config.replay(groups=2, capacity=4, max_uses=3)


def test_replayed_groups_are_learnt_from_but_kept_and_counted_once(tmp_path):
    with tiny.built(replaying()) as algorithm:
        algorithm.train()
        algorithm.save_to_path(tmp_path / "checkpoint")
        second = algorithm.train()
        rows = kept(algorithm)
        third = tiny.learnt(algorithm.train())
        algorithm.restore_from_path(tmp_path / "checkpoint")
        algorithm.train()
        assert tiny.learnt(algorithm.train()) == third  # the buffer is in the checkpoint
    num_fresh = replaying().total_train_batch_size
    assert len(rows) == 2 * num_fresh
    assert second["replay"]["drawn"] == 2 and second["replay"]["groups"] == 4
    assert second["off_policy"]["age_max"] == 1
    assert second["off_policy"]["age_1"] == pytest.approx(6 / (num_fresh + 6), abs=0.2)
    assert second["off_policy"]["k1_lag_1"] != 0.0
    assert 0 < second["off_policy"]["ess_share"] <= 1
    assert second["env"]["distinct"] <= 1


@pytest.mark.parametrize("config, message", [
    (tiny.grpo().replay(groups=2), "off_policy=None must be set with replay_groups=2"),
    (replaying().replay(capacity=1), "replay_capacity=1 must be at least replay_groups=2"),
    (tiny.grpo(off_policy="decoupled", rejection="k3"), "rejection_upper=None must be a number"),
    (tiny.grpo(off_policy="decoupled", off_policy_lower=3.0),
     "off_policy_lower=3.0 must be below off_policy_upper=2.0"),
])  # fmt: skip
def test_settings_that_cannot_be(config, message):
    with pytest.raises(ValueError, match=message):
        config.validate()


@pytest.mark.parametrize("old, new", [
    ("recompute_old_logprobs", "'off_policy'"),
    ("importance_sampling", "'off_policy_weights'"),
    ("importance_sampling_cap", "'off_policy_upper'"),
    ("importance_sampling_level", "'off_policy_level'"),
])  # fmt: skip
def test_old_names_are_answered(old, new):
    with pytest.raises(ValueError, match=f"{old}.*called {new} here"):
        tiny.grpo().training(**{old: 1})
