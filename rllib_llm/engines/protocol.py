"""The interface of an engine: rows are added at any step, sample one token per step, and leave when
finished.

A row is one completion to be sampled: its prompt, what was sampled of it before, and settings and
randomness of its own. Everything that samples stands on this: a batch is "add all, step until
empty", a conversation adds a row per turn, a server adds rows as requests come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from rllib_llm.engines.completions import Finish, Likeliest, Tokens
from rllib_llm.engines.noise import row_seeds
from rllib_llm.engines.params import SamplingParams

InFlight = Literal["finish", "recompute", "keep"]
"""What becomes of the rows in an engine when it is given weights, see `Engine.load`."""


class GuideError(ValueError):
    """A guide that could not follow a completion to its end, which is no answer then."""


class Guide(Protocol):
    """The tokens allowed next in a row that follows a grammar or schema. Advanced token by token,
    in the engine's thread only."""

    @property
    def problem(self) -> str:
        """Why it cannot follow the row any further; "" while it can."""

    def allowed(self) -> torch.Tensor:
        """[n <= vocab] bool on the CPU: what may come next. Tokens behind the last may not."""

    def take(self, token_id: int) -> None:
        """The token that was sampled."""


@dataclass(frozen=True)
class Noise:
    """Names a row's randomness: token i of the row is a function of this and of i alone."""

    seed: int = 0
    """0 .. 2**64 - 1, of the run."""
    row: int = 0
    """>= 0, which completion of the run."""
    turn: int = 0
    """>= 0, which turn of a conversation."""

    @property
    def one_seed(self) -> int:
        """All of it in one number, 0 .. 2**63 - 1, for engines that draw their own numbers."""
        return row_seeds(self.seed, [self.row], self.turn)[0]


OnTokens = Callable[[Tokens], None]


@dataclass(frozen=True)
class Row:
    """One completion to be sampled or continued."""

    id: Hashable
    """Names the row in the engine; free again when the row has ended. `EngineLoop` gives each row
    an id of its own."""
    token_ids: Sequence[int]
    """The prompt, and behind it what was sampled of this completion before, without padding."""
    params: SamplingParams
    """max_new_tokens and min_new_tokens count what was sampled before, too."""
    num_sampled: int = 0
    """How many tokens at the end of `token_ids` were sampled before."""
    noise: Noise = field(default_factory=Noise)
    group: Hashable | None = None
    """Rows that are added together with the same group and token ids share their prompt's KV
    cache."""
    version: int | None = None
    """Of the weights that sample it, one of those that the engine has; None: the newest."""
    guide: Guide | None = None
    """Says what its tokens may be."""
    conversation: Hashable | None = None
    """Names what the row is a turn of: where the engine can, the KV cache of its last turn is kept
    for the next, which is prefilled from where it differs."""
    on_tokens: OnTokens | None = None
    """Called with the tokens that are new, in the thread of `EngineLoop`: it must be quick. What it
    raises ends the completion."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_sampled < len(self.token_ids):
            raise ValueError(
                f"num_sampled={self.num_sampled!r} must be within 0 and {len(self.token_ids) - 1}: "
                f"row {self.id!r} has {len(self.token_ids)} tokens, and its prompt at least one. "
                "Pass the prompt and behind it what was sampled."
            )
        if self.num_sampled >= self.params.max_new_tokens:
            raise ValueError(
                f"num_sampled={self.num_sampled!r} must be below max_new_tokens="
                f"{self.params.max_new_tokens!r}: row {self.id!r} has ended. Do not add it again."
            )


@dataclass(frozen=True)
class Ended:
    """The tokens of a finished row since it was added, without those it was added with."""

    id: Hashable
    token_ids: list[int]
    """The stop token is among them."""
    logprobs: list[float]
    """log_softmax(logits / temperature) of each token before truncation; NaN where unknown."""
    versions: list[int]
    """int32, of the weights that sampled each token; -1 where the model is not ours."""
    finish: Finish
    likeliest: list[Likeliest] = field(default_factory=list)
    """The likeliest tokens at the place of each, where `params.top_logprobs` asks for them."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the row was added."""
        return len(self.token_ids)

    @property
    def tokens(self) -> Tokens:
        """The same as `Engine.sampled` tells it."""
        return Tokens(
            self.token_ids, self.logprobs, self.versions, self.likeliest, self.finish
        )  # fmt: skip


def continued(row: Row, ended: Ended) -> Row:
    """The row to add, here or in another engine, to go on where `ended`, an aborted one, ended."""
    return Row(
        id=row.id,
        token_ids=[*row.token_ids, *ended.token_ids],
        params=row.params,
        num_sampled=row.num_sampled + ended.num_tokens,
        noise=row.noise,
        group=row.group,
        version=row.version,
        guide=row.guide,
        conversation=row.conversation,
    )


def check_version(row: Row, version: int | None) -> None:
    """Raises ValueError where a row wants other weights than the engine has."""
    if row.version not in (None, version):
        raise ValueError(
            f"row.version={row.version!r} must be {version!r}: the engine has no other weights. "
            "Leave it out."
        )


class Engine(Protocol):
    """Samples from one model. Not thread-safe: one thread owns it (`engine_loop.EngineLoop`)."""

    @property
    def num_running(self) -> int:
        """Rows in it, those that wait for a place among them."""

    @property
    def version(self) -> int | None:
        """The version of the weights on which new rows start; None before any were loaded."""

    def add(self, rows: Sequence[Row]) -> None:
        """Adds rows; they sample their first token in one of the next steps.

        Raises:
            ValueError: an id that is in the engine, more positions than the model has, a version
                that it does not have, or what it cannot do (guides, the likeliest tokens).
            RuntimeError: the engine was given no weights yet.
        """

    def step(self) -> list[Ended]:
        """Samples one token for every row that has a place, and hands back rows that have ended:
        at once or, on a device that is better not asked at each step, a few steps later."""

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        """The tokens of unfinished rows since they were added, of each from the index in `starts`
        on. A row that has finished but was not returned yet has a `finish`."""

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        """Removes rows and returns their partial output; finished ones keep their `finish`. Unknown
        ids are ignored."""

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        """Puts weights in the place of those in use, between two steps.

        Args:
            weights: the policy's, under the names of its state.
            version: is stamped on each token that they sample.
            in_flight: rows in the engine `finish` on the weights that they began with (rows that
                wait, wait on, and `weights` must stay as they are until the new ones are in use),
                have their KV cache `recompute`d, or `keep` the one they have.
        """

    def close(self) -> None:
        """Frees all memory; its rows are lost."""
