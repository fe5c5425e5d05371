"""A hundred signals at samplers, the ledger and the trial: every prompt and token is accounted for.

The processes are emulated, so that all interleavings are cheap; `python -m benchmarks.runs.chaos`
sends signals to real ones.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from pathlib import Path

import pytest

from rllib_llm.rollouts.ledger_actor import CALLS, JournaledLedger
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.weights.published import PublishedWeights
from tests.rollouts.simulated import Clock, Run, ledger, serve

NUM_SIGNALS, NUM_BATCHES = 100, 60
TIMEOUT_S = 10.0
SIGNALS = ("sampler killed", "sampler stopped", "ledger killed", "trial killed")


class JournaledCalls:
    """A ledger that is called through its journal."""

    def __init__(self, rules: StreamRules, folder: Path, clock: Clock) -> None:
        self._journaled = JournaledLedger(rules, folder, clock=clock)

    def __getattr__(self, name):
        if name in CALLS:
            return functools.partial(self._journaled.call, name)
        return getattr(self._journaled.ledger, name)


class DisturbedRun(Run):
    """A run whose processes are killed and stopped; it goes on as a real one does: samplers ask
    again under their names, the ledger finds its journal, the trial its last checkpoint."""

    def __init__(self, rules: StreamRules, seed: int, folder: Path, **settings) -> None:
        self.rules, self.clock, self.folder = rules, Clock(), folder
        self.num_trials = 0
        made = self._new_ledger()
        made.publish(PublishedWeights(0))
        super().__init__(made, seed, **settings)
        self.seen = Counter()  # signals
        self.late = []  # leases that stopped samplers answer after all
        self.checkpoint = None
        self._save()

    def _new_ledger(self):
        return JournaledCalls(self.rules, self.folder / str(self.num_trials), self.clock)

    def _turn(self) -> None:
        super()._turn()
        self.clock.now += 0.1
        if self.late and self.random.random() < 0.2:
            serve(self.made, self.late.pop(), self.reason)
        if sum(self.seen.values()) < NUM_SIGNALS and self.random.random() < 0.1:
            self._signal(self.random.choice(SIGNALS))
        if len(self.batches) >= len(self.checkpoint["batches"]) + 5:
            self._save()

    def _learn(self):
        for version in self.made.take(self.version).missing:
            self.made.offer(PublishedWeights(version))
        return super()._learn()

    def _save(self) -> None:
        if self.made.look()["num_old"]:  # a checkpoint waits for what older weights have to sample
            return
        self.checkpoint = copy.deepcopy(
            {"ledger": self.made.state(), "version": self.version, "batches": self.batches,
             "trained": self.trained}
        )  # fmt: skip

    def _signal(self, kind: str) -> None:
        self.seen[kind] += 1
        name = str(self.random.randrange(self.num_samplers))
        if kind == "sampler killed":
            self.held[name] = []
        elif kind == "sampler stopped":
            self.late += self.held[name]
            self.held[name] = []
            self.clock.now += 100 * TIMEOUT_S
            self.made.take(self.version)  # a call of the journal, as all that changes the table
        elif kind == "ledger killed":
            self.made = self._new_ledger()
        else:
            self._begin_again()

    def _begin_again(self) -> None:
        self.num_trials += 1
        self.made = self._new_ledger()
        saved = copy.deepcopy(self.checkpoint)
        self.made.set_state(saved["ledger"])
        self.version, self.batches = saved["version"], saved["batches"]
        self.trained = saved["trained"]
        self.made.publish(PublishedWeights(self.version))
        self.late = []
        self.held = {name: [] for name in self.held}


def reason(position: int) -> str:
    return "dull" if position % 7 == 3 else ""


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("schedule", ["lockstep", "free"])
def test_a_hundred_signals_lose_nothing_and_train_nothing_twice(tmp_path, schedule, seed):
    """Generated = trained + rejected + carried at every turn (`Run` checks it), no prompt is lost
    or learnt from twice, and the run does not hang. Lockstep: the same batches, sampled with the
    same weights, as in a run that nobody disturbs."""
    rules = {"num_groups": 4, "max_staleness": 2, "schedule": schedule, "timeout_s": TIMEOUT_S}
    run = DisturbedRun(StreamRules(**rules), seed, tmp_path, reason=reason).until(NUM_BATCHES)
    assert sum(run.seen.values()) == NUM_SIGNALS and set(run.seen) == set(SIGNALS)
    assert set(run.trained.values()) == {1}
    trained = sorted(run.trained)
    assert trained == [p for p in range(trained[-1] + 1) if not reason(p)]
    assert run.largest_age <= 2
    if schedule == "lockstep":
        undisturbed = Run(ledger(**rules), 99, reason=reason).until(NUM_BATCHES)
        assert run.batches == undisturbed.batches
