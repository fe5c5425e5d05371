from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError

from rllib_llm.runs.callbacks import NoRoomError, fit

# As Ray 2.60 writes it.
MESSAGE = """1 worker(s) were killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 7f) was 22.86GB used / 24.00GB limit (0.952500)
Object store memory usage: [0.1GB]
To see more information about memory usage on this node, use `ray logs raylet.out -ip 10.0.0.1`
Top 10 memory users:
PID\tMEM(GB)\tCOMMAND
4242\t11.05\tpython other_job.py --large
7\t4.20\tray::PPOPtx.train
9\t1.10\tray::RLHFEnvRunner.sample
10\t0.20\tbash
"""


class Tuner:
    """Is killed for memory, or raises something else, so often; then it gives its result."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors, self.num_restored = errors, 0

    def fit(self) -> str:
        if self.errors:
            raise self.errors.pop(0)
        return "grid"

    def restored(self) -> Tuner:
        self.num_restored += 1
        return self


def killed() -> Exception:
    """As Tune's actor manager raises it."""
    error = RuntimeError("Caught unexpected exception: Task was killed")
    error.__cause__ = OutOfMemoryError(MESSAGE)
    return error


@pytest.mark.parametrize(("max_failures", "num"), [(3, 3), (-1, 7), (1, 1), (0, 0)])
def test_a_trial_killed_for_memory_goes_on_as_often_as_any_other_death(max_failures, num):
    tuner, told = Tuner([killed() for _ in range(num)]), []
    assert fit(tuner, tuner.restored, max_failures, told.append) == "grid"
    assert tuner.num_restored == len(told) == num


@pytest.mark.parametrize("max_failures", [0, 2])
def test_once_too_often_says_who_used_the_memory_and_what_to_lower(max_failures):
    tuner = Tuner([killed() for _ in range(max_failures + 1)])
    with pytest.raises(NoRoomError, match=r"(?s)python other_job.py.*Lower num_env_runners"):
        fit(tuner, tuner.restored, max_failures, lambda text: None)
    assert tuner.num_restored == max_failures


def test_other_errors_are_not_taken_for_it():
    tuner = Tuner([RuntimeError("something else")])
    with pytest.raises(RuntimeError, match="something else"):
        fit(tuner, tuner.restored, 3, lambda text: None)
    assert tuner.num_restored == 0


def test_kills_count_until_a_new_checkpoint_is_there():
    tuner, number = Tuner([killed() for _ in range(5)]), iter(range(10))
    assert fit(tuner, tuner.restored, 1, lambda text: None, saved=lambda: next(number)) == "grid"
    assert tuner.num_restored == 5
