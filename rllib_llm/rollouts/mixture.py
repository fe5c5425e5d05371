"""The order in which a run's environments take turns: position → (environment, its own position).

Positions are dealt in batches, of as many groups as the learner takes at once. Of a batch an
environment has its share of the weights, rounded down, or up for as many as the batch has room for:
those that will soonest be owed a whole group. So it is never off by a whole group, and over all
batches by one at most (Balinski and Young's quota method). What is owed is carried on, over other
weights as well, so that the smallest weight has its groups in time. Within a batch the next group
is of the environment with the smallest (n + ½)/q, of n of its q groups: Webster's method. With
constant weights the order is a function of the weights alone.

By tokens each group is of the environment with the smallest ratio of tokens to weight: those learnt
from, plus those expected of groups on their way.

News (other weights, tokens of a batch) bear the number of a batch, and hold for groups that are
sampled with the weights of that batch or later ones: when they come decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

MixBy = Literal["groups", "tokens"]
_ROUND_OFF = 1e-9  # of a share of a batch, in groups


class Place(NamedTuple):
    """Where a group's prompt stands: the number of its environment, and the position there."""

    env: int
    position: int


class News(NamedTuple):
    """The order from batch `turn` on.

    weights: of the environments, where they are others. tokens: learnt from, by position.
    settled: groups up to this position are learnt from, or never will be.
    """

    turn: int
    weights: tuple[float, ...] | None = None
    tokens: Mapping[int, int] = {}
    settled: int = -1


class Mixture:
    """See the module.

    Args:
        weights: of the environments; those of weight 0 are not sampled.
        batch_size: groups of a batch.
    """

    def __init__(
        self, weights: Sequence[float] = (1.0,), by: MixBy = "groups", batch_size: int = 1
    ) -> None:
        self._given, self._by, self._batch_size = tuple(weights), by, batch_size
        self.begin(0)

    def begin(self, position: int) -> None:
        """Starts at a position, as if all before it had been dealt by groups."""
        self.weights, num_envs = self._given, len(self._given)
        self._next = 0  # position that is dealt next
        self._own = [0] * num_envs  # next position of each environment
        self._places: dict[int, Place] = {}  # of open groups
        self._on_their_way: dict[int, int] = {}  # by position, the number of the environment
        self._news: list[News] = []
        self._owed = [0.0] * num_envs  # groups, before the batch that is dealt
        self._quotas = [0] * num_envs  # groups of that batch
        self._dealt = [0] * num_envs  # of those, so far
        self._count_tokens_anew()
        by, self._by = self._by, "groups"
        if position:
            self.place(position - 1)
        self._by = by
        self.forget(position)

    def _count_tokens_anew(self) -> None:
        self._tokens = [0] * len(self.weights)  # learnt from
        self._groups = [0] * len(self.weights)  # whose tokens they are

    def place(self, position: int, turn: int | None = None) -> Place:
        """The place of a group's prompt.

        Args:
            turn: the batch whose weights sample it; None: whatever is the newest.
        """
        if len(self.weights) == 1:
            return Place(0, position)
        while self._next <= position:
            self._hear(turn)
            if self._by == "tokens":
                env = min(range(len(self.weights)), key=self._load)
                self._on_their_way[self._next] = env
            else:
                env = self._next_of_batch()
            self._places[self._next] = Place(env, self._own[env])
            self._own[env] += 1
            self._next += 1
        return self._places[position]

    def _next_of_batch(self) -> int:
        if self._dealt == self._quotas:
            self._end_batch()
            shares = self._shares(self._batch_size)
            self._quotas = [math.floor(share + _ROUND_OFF) for share in shares]
            due = []
            for env, (share, quota) in enumerate(zip(shares, self._quotas, strict=True)):
                if (part := share - quota) > _ROUND_OFF:
                    owed = self._owed[env] + part
                    due.append((owed < _ROUND_OFF, round((1 - owed) / part, 9), env))
            for _, _, env in sorted(due)[: self._batch_size - sum(self._quotas)]:
                self._quotas[env] += 1
        open_envs = [env for env, quota in enumerate(self._quotas) if self._dealt[env] < quota]
        found = min(open_envs, key=lambda env: (self._dealt[env] + 0.5) / self._quotas[env])
        self._dealt[found] += 1
        return found

    def _shares(self, num_groups: int) -> list[float]:
        return [num_groups * weight / sum(self.weights) for weight in self.weights]

    def _end_batch(self) -> None:
        """Notes what is owed after the groups dealt of a batch, all or some of them."""
        shares = self._shares(sum(self._dealt))
        of_envs = zip(self._owed, shares, self._dealt, strict=True)
        self._owed = [round(owed + share - dealt, 9) for owed, share, dealt in of_envs]
        self._quotas, self._dealt = [0] * len(shares), [0] * len(shares)

    def _load(self, env: int) -> float:
        weight = self.weights[env]
        if not weight:
            return float("inf")
        tokens, groups = self._tokens[env], self._groups[env]
        if not groups:  # as many as a group of the others
            tokens, groups = sum(self._tokens), sum(self._groups)
        expected = tokens / groups if groups else 1.0
        num_expected = sum(other == env for other in self._on_their_way.values()) + 0.5
        return (self._tokens[env] + num_expected * expected) / weight

    def learn(self, news: News) -> None:
        """Notes news, in the order of their batches."""
        if len(self.weights) > 1:
            self._news.append(news)

    def _hear(self, turn: int | None) -> None:
        """Takes in the news that hold for a group."""
        while self._news and (turn is None or self._news[0].turn <= turn):
            news = self._news.pop(0)
            for position, tokens in news.tokens.items():
                if (env := self._on_their_way.get(position)) is not None:
                    self._tokens[env] += tokens
                    self._groups[env] += 1
            done = {p for p in self._on_their_way if p <= news.settled} | news.tokens.keys()
            self._on_their_way = {p: e for p, e in self._on_their_way.items() if p not in done}
            if news.weights is not None and news.weights != self.weights:
                self._end_batch()
                self.weights = news.weights
                self._count_tokens_anew()

    def forget(self, position: int) -> None:
        """All groups before this position are closed."""
        self._places = {p: place for p, place in self._places.items() if p >= position}

    def state(self) -> dict[str, Any]:
        """Its state for a checkpoint."""
        return {name: value.copy() if isinstance(value, (list, dict)) else value
                for name, value in vars(self).items()}  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; the weights and the way of mixing are these where others were set."""
        if "_quotas" not in state:  # of a version that did not deal by batches
            state = {**state, "_dealt": [0] * len(self._dealt)}
        given, by, batch_size = self._given, self._by, self._batch_size
        vars(self).update({name: value.copy() if isinstance(value, (list, dict)) else value
                           for name, value in state.items()})  # fmt: skip
        if (self._given, self._by, self._batch_size) != (given, by, batch_size):
            self._end_batch()
            self._by, self._batch_size = by, batch_size
            if self._given != given:
                self._given = self.weights = given
            self._count_tokens_anew()
