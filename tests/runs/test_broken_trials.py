"""A bug is tried once more, whatever `max_failures` is; a process that died as often as it says."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_llm.envs.judges.reward_functions import RewardError
from rllib_llm.learners.learner_group import LearnerError
from rllib_llm.rollouts.errors import BrokenSamplerError, NoSamplersError
from rllib_llm.runs.callbacks import EndBrokenTrials

BUG = BrokenSamplerError("KeyError: 'no such judge'")
LOCAL_BUG = RewardError("reward function 'judge' must judge at least one")


class Trial:
    """As Tune's, whose rule for another start is `num_failures <= max_failures or < 0`."""

    trial_id = "a"

    def __init__(self, max_failures, callback, folder):
        self.pickled_error_file = str(folder / "error.pkl")
        self.max_failures = max_failures
        self.run_metadata = SimpleNamespace(num_failures=0)
        self.last_result = {}
        self.callback = callback

    def fails(self, error):
        """Whether it is started again."""
        Path(self.pickled_error_file).write_bytes(pickle.dumps(error))
        self.run_metadata.num_failures += 1
        again = self.run_metadata.num_failures <= self.max_failures or self.max_failures < 0
        if again:
            self.callback.on_trial_recover(self)
        return again

    def reports(self, iteration):
        self.last_result = {"training_iteration": iteration}
        self.callback.on_trial_result(self, self.last_result)


@pytest.fixture(params=[-1, 10])
def trial(request, tmp_path):
    return Trial(request.param, EndBrokenTrials(), tmp_path)


@pytest.mark.parametrize("bug", [BUG, LOCAL_BUG])
def test_the_second_failure_at_the_same_iteration_is_the_last(trial, bug):
    trial.reports(3)
    assert trial.fails(bug)
    trial.reports(3)  # from the checkpoint before
    assert not trial.fails(bug)


def test_a_trial_that_got_further_has_all_its_chances_again(trial):
    limit = trial.max_failures
    for iteration in (1, 2, 3):
        assert trial.fails(BUG)
        trial.reports(iteration)
        assert trial.max_failures == limit


@pytest.mark.parametrize("error", [LearnerError("died"), NoSamplersError("none came back")])
def test_processes_that_died_are_left_to_tune(trial, error):
    assert all(trial.fails(error) for _ in range(10))
