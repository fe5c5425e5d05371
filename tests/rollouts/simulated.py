"""Samplers and a learner that only keep a ledger busy, in an order that a seed decides."""

from __future__ import annotations

import random
from collections import Counter

from rllib_llm.rollouts.groups import JudgedGroup, PartialCompletion
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.schedule import StreamRules
from rllib_llm.weights.published import PublishedWeights


class Clock:
    """Seconds that a test turns."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def ledger(clock=None, *, keeps_rejected=False, **rules) -> Ledger:
    made = Ledger(StreamRules(**{"num_groups": 4, **rules}), keeps_rejected=keeps_rejected,
                  clock=clock or Clock())  # fmt: skip
    made.publish(PublishedWeights(0))
    return made


def judged(
    position, version, *, num_tokens=None, reason="", num_lost=0, continues=False
) -> JudgedGroup:
    tokens = 10 + position % 7 if num_tokens is None else num_tokens
    return JudgedGroup(position, b"%d" % position, tokens, num_lost, version, reason, continues,
                       merit=position * 7 % 5)  # fmt: skip


def partial(*lengths) -> tuple[PartialCompletion, ...]:
    """What there is of a group's completions, so many tokens each."""
    return tuple(PartialCompletion(tuple(range(n)), (0.0,) * n, (0,) * n) for n in lengths)


def serve(made, lease, reason=lambda position: ""):
    """Hands in all groups of a lease."""
    groups = [
        judged(p, lease.weights.version, reason=reason(p))
        for p in range(lease.position, lease.position + lease.num_groups)
    ]
    return made.push(lease.id, groups)


class Run:
    """A run whose events come in the order of `seed`: `num_samplers` that lease and hand in, each
    lease after some turns of its own, and a learner that takes and publishes."""

    def __init__(
        self, made, seed, num_samplers=3, *, reason=lambda position: "", straggler=-1, learn=0.3
    ):
        self.made, self.random = made, random.Random(seed)
        self.num_samplers, self.reason = num_samplers, reason
        self.straggler, self.learn = straggler, learn
        self.held = {str(i): [] for i in range(num_samplers)}
        self.version = made.step
        self.batches = []  # (positions, versions)
        self.trained = Counter()
        self.sampled_with = {}
        self.largest_age = 0

    def until(self, num_batches):
        for _ in range(100_000):
            if len(self.batches) >= num_batches:
                return self
            self._turn()
        raise AssertionError(f"it hangs: {self.made.look()['waits_for']}")

    def _turn(self):
        made = self.made
        name = str(self.random.randrange(self.num_samplers))
        if self.held[name] and self.random.random() < 0.6:
            lease = self.random.choice(self.held[name])
            span = range(lease.position, lease.position + lease.num_groups)
            if self.straggler in span and self._may_wait():
                return
            self.held[name].remove(lease)
            for position in span:
                self.sampled_with[position] = lease.weights.version
            serve(made, lease, self.reason)
        elif len(self.held[name]) < 3:
            ids = [lease.id for lease in self.held[name]]
            self.held[name] += made.lease(name, 2, ids)
        if self.random.random() < self.learn:
            self._learn()
        made.account.check(made.table.num_tokens)

    def _may_wait(self):
        """The straggler comes when nothing else moves."""
        others = any(
            self.straggler not in range(lease.position, lease.position + lease.num_groups)
            for held in self.held.values()
            for lease in held
        )
        return others or self.made.has_work() or self._learn()

    def _learn(self):
        answer = self.made.take(self.version)
        if answer.groups is None:
            return False
        versions = [group.oldest_version for group in answer.groups]
        self.largest_age = max(self.largest_age, self.version - min(versions))
        self.batches.append(([group.position for group in answer.groups], versions))
        self.trained.update(self.batches[-1][0])
        self.version += 1
        published = self.version - self.version % self.made.rules.publish_every
        self.made.publish(PublishedWeights(published), None, self.version)
        return True
