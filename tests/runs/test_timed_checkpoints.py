"""A checkpoint by the clock, not more often than 2 % of the time allows."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from rllib_llm.runs import trial_checkpoints as module
from rllib_llm.runs.trial_checkpoints import TimedCheckpoints


class Run:
    """One trial that reports at given seconds; saving takes `save_s`."""

    def __init__(self, monkeypatch, callback, save_s=1.0, checkpoint_freq=0):
        self.now, self.save_s, self.callback = 0.0, save_s, callback
        self.trial = SimpleNamespace(trial_id="a", checkpoint_freq=checkpoint_freq)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        callback.on_trial_start(self.trial)

    def saved_at(self, *seconds):
        """The seconds, of these, with whose results a checkpoint was asked for."""
        saved = []
        for second in seconds:
            self.now, result = second, {}
            self.callback.on_trial_result(self.trial, result)
            if result.get("should_checkpoint"):
                saved.append(second)
                self.now += self.save_s
                self.callback.on_trial_save(self.trial)
        return saved


def test_every_five_minutes_whatever_an_iteration_takes(monkeypatch):
    run = Run(monkeypatch, TimedCheckpoints())
    # The clock begins anew when a checkpoint is saved, after 301 and 651 seconds.
    assert run.saved_at(*range(0, 1000, 50)) == [300, 650]
    run = Run(monkeypatch, TimedCheckpoints())
    assert run.saved_at(1000, 2000) == [1000, 2000]


def test_rarer_where_saving_is_slow_and_said(monkeypatch, caplog):
    run = Run(monkeypatch, TimedCheckpoints(), save_s=12.0)
    with caplog.at_level(logging.WARNING):
        # 12 s are 2 % of 600 s, which count from the end of the save, at 312.
        assert run.saved_at(300, 612, 900, 911, 912) == [300, 912]
    (said,) = caplog.messages
    assert "takes 12 s" in said and "every 10 min" in said and "checkpoint_interval_s" in said


def test_who_names_an_interval_gets_it(monkeypatch):
    run = Run(monkeypatch, TimedCheckpoints(10.0), save_s=5.0, checkpoint_freq=3)
    assert run.saved_at(5, 10, 20, 25) == [10, 25]


def test_who_saves_by_iterations_is_left_alone(monkeypatch):
    run = Run(monkeypatch, TimedCheckpoints(), checkpoint_freq=3)
    assert run.saved_at(1000, 2000) == []
