"""The order in which a run's environments take turns: position → (environment, its own position).

Positions are dealt in their order, to the environment e with the smallest (n_e + ½)/w_e, w_e being
its weight and n_e the groups it was dealt: Webster's method of apportionment, also known as
Sainte-Laguë's. The counts are integers, so that nothing drifts, and with constant weights the order
is a function of the weights alone. By tokens, n_e are the tokens learnt from, plus those expected
of groups on their way.

News (other weights, tokens of a batch) bear the number of a batch, and hold for groups that are
sampled with the weights of that batch or later ones: when they come decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

MixBy = Literal["groups", "tokens"]


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
    """

    def __init__(self, weights: Sequence[float] = (1.0,), by: MixBy = "groups") -> None:
        self._given, self._by = tuple(weights), by
        self.begin(0)

    def begin(self, position: int) -> None:
        """Starts at a position, as if all before it had been dealt by groups."""
        self.weights = self._given
        self._next = 0  # position that is dealt next
        self._own = [0] * len(self.weights)  # next position of each environment
        self._places: dict[int, Place] = {}  # of open groups
        self._on_their_way: dict[int, int] = {}  # by position, the number of the environment
        self._news: list[News] = []
        self._count_anew()
        by, self._by = self._by, "groups"
        if position:
            self.place(position - 1)
        self._by = by
        self.forget(position)

    def _count_anew(self) -> None:
        """Counts from now on, with these weights."""
        self._dealt = [0] * len(self.weights)  # groups
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
            env = min(range(len(self.weights)), key=self._load)
            self._places[self._next] = Place(env, self._own[env])
            if self._by == "tokens":
                self._on_their_way[self._next] = env
            self._own[env] += 1
            self._dealt[env] += 1
            self._next += 1
        return self._places[position]

    def _load(self, env: int) -> float:
        weight = self.weights[env]
        if not weight:
            return float("inf")
        if self._by == "groups":
            return (self._dealt[env] + 0.5) / weight
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
                self.weights = news.weights
                self._count_anew()

    def forget(self, position: int) -> None:
        """All groups before this position are closed."""
        self._places = {p: place for p, place in self._places.items() if p >= position}

    def state(self) -> dict[str, Any]:
        """Its state for a checkpoint."""
        return {name: value.copy() if isinstance(value, (list, dict)) else value
                for name, value in vars(self).items()}  # fmt: skip

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores `state`; the weights and the way of mixing are these where others were set."""
        given, by = self._given, self._by
        vars(self).update({name: value.copy() if isinstance(value, (list, dict)) else value
                           for name, value in state.items()})  # fmt: skip
        if (self._given, self._by) != (given, by):
            self._given, self._by, self.weights = given, by, given
            self._count_anew()
