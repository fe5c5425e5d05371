"""The first Ctrl-C, SIGTERM or SIGUSR1 saves what runs, the second does not wait."""

from __future__ import annotations

import pickle
import signal
import threading
from types import SimpleNamespace

import pytest

from rllib_llm.runs.trial_checkpoints import SaveOnStop


class Trial:
    """As much of Tune's `Trial` as the callback reads."""

    def __init__(self, done: int | None, saved: int | None, status: str = "RUNNING"):
        self.status = status
        self.has_reported_at_least_once = done is not None
        self.last_result = {"training_iteration": done}
        self.latest_checkpoint_result = (
            None if saved is None else SimpleNamespace(metrics={"training_iteration": saved})
        )


@pytest.fixture
def stopped():
    """(a callback that Tune has set up, how often Tune was told to end the run)"""
    told = []
    before = signal.signal(signal.SIGINT, lambda *_: told.append("end"))
    try:
        with SaveOnStop() as callback:
            callback.setup()
            yield callback, told
        assert signal.getsignal(signal.SIGINT) not in (callback._note, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) != callback._note


# With SIGUSR1 Tune ended the run, and its trials were said to have reached their end.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_every_running_trial_saves_before_the_run_ends(stopped, number):
    callback, told = stopped
    trials = [Trial(3, 2), Trial(5, None), Trial(None, None), Trial(4, None, "PENDING")]
    result: dict = {}
    callback.on_trial_result(trials[0], result)
    callback.on_step_end(0, trials)
    assert result == {} and told == []

    signal.raise_signal(number)
    assert callback.interrupted
    for one, done in ((trials[0], 4), (trials[1], 6)):
        callback.on_step_end(1, trials)
        assert told == []
        result = {}
        callback.on_trial_result(one, result)
        assert result == {"should_checkpoint": True}
        one.last_result = {"training_iteration": done}
        one.latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": done})
    callback.on_step_end(2, trials)
    callback.on_step_end(3, trials)
    assert told == ["end"]


def test_the_second_does_not_wait(stopped):
    callback, told = stopped
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert told == []


def test_a_run_in_another_thread_ends_with_the_result_after_the_saved_one():
    """`rllib stop` reaches it, though Tune handles no signals there."""
    callback, trials = SaveOnStop(), [Trial(3, 2)]
    thread = threading.Thread(target=callback.setup)
    thread.start()
    thread.join()
    trials[0].stopping_criterion = {"training_iteration": 100}
    result = {"stop_run": True}
    callback.on_trial_result(trials[0], result)
    assert result["should_checkpoint"]
    callback.on_step_end(0, trials)
    assert trials[0].stopping_criterion == {"training_iteration": 100}  # it is not saved yet
    trials[0].latest_checkpoint_result = SimpleNamespace(metrics={"training_iteration": 3})
    callback.on_step_end(1, trials)
    assert trials[0].stopping_criterion == {"training_iteration": 1}


def test_tune_can_pickle_it(stopped):
    assert not pickle.loads(pickle.dumps(stopped[0])).interrupted
