"""The interface of an engine: rows are added at any step, sample one token per step, and leave when
finished.

A row is one completion to be sampled: its prompt, what was sampled of it before, and settings and
its own randomness. Everything that samples stands on this: a batch is "add all, step until
empty", a conversation adds a row per turn, a server adds rows as requests come.

    engine: torch | vllm | openai | a dotted path     (the setting)
       │ engine_class
       ▼
    class of `Engine`:  takes_weights, takes_rows, knows_versions, has_logprobs;  rules(config)
       │ of(config), in the sampler
       ▼
    add(rows), step() -> ended, load(weights, version) ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_right
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problem, Problems, require

Finish = Literal["stop", "length", "aborted", "error"]
"""A stop token was sampled; max_new_tokens were; the row was taken out; its logits were not finite.
"""
NOT_FINITE = (
    "logits must be finite: the model gave NaN or infinity while sampling. Check its weights, "
    "dtype and learning rate."
)
Likeliest = list[tuple[int, float]]
"""Tokens and their log-probs, the likeliest first."""


class Tokens(NamedTuple):
    """Tokens of one completion, with their log-probs and the weights' versions, if kept."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    likeliest: list[Likeliest] = []  # noqa: RUF012  (never written to)
    """The likeliest tokens at the place of each, where the row's settings ask for them."""
    finish: Finish | None = None
    """Why there will be no more of them; None where there may be."""

    def since(self, start: int) -> Tokens:
        """The tokens from `start` on."""
        return Tokens(
            self.token_ids[start:], self.logprobs[start:], self.versions[start:],
            self.likeliest[start:], self.finish,
        )  # fmt: skip


# --- Rows in, rows out

InFlight = Literal["finish", "recompute", "keep"]
"""What becomes of the rows in an engine when it is given weights, see `Engine.load`."""


class EngineEndedError(RuntimeError):
    """The engine is closed, or has ended with an error."""


class GuideError(ValueError):
    """A guide that could not follow a completion to its end, which is no answer then."""


class Guide(Protocol):
    """The tokens allowed next in a row that follows a grammar or schema. Advanced token by token,
    in the engine's thread only."""

    @property
    def problem(self) -> str:
        """Why it cannot follow the row any further; "" while it can."""

    def allowed(self) -> torch.Tensor:
        """[n <= vocab] bool on the CPU: what may come next. Tokens after the last may not."""

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
        return int(_words(self.seed, np.array([self.row]), 1, self.turn)[0, 0]) >> 1


OnTokens = Callable[[Tokens], None]


@dataclass(frozen=True)
class Row:
    """One completion to be sampled or continued."""

    id: Hashable
    """Names the row in the engine; free again when the row has ended. `EngineLoop` gives each row
    its own id."""
    token_ids: Sequence[int]
    """The prompt, then what was sampled of this completion before, without padding."""
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
    published: tuple[int, int] | None = None
    """(epoch, version) that the run has published last, for a server that follows it."""
    images: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    """What the prompt shows, as the model takes it; the same of all rows of a group."""
    num_shown: int = 0
    """Tokens at the beginning among which those of images stand for them; 0: the whole prompt."""
    is_read_whole: bool = False
    """Whether nobody asks for its tokens before it has ended."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_sampled < len(self.token_ids), "a prompt has a token"
        assert self.num_sampled < self.params.max_new_tokens, "the row has ended"


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
    experts: torch.Tensor | None = None
    """[positions, layers * k] int16, of the prompt and all tokens but the last, where kept."""

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the row was added."""
        return len(self.token_ids)

    @property
    def tokens(self) -> Tokens:
        """The same as `Engine.sampled` returns it."""
        return Tokens(self.token_ids, self.logprobs, self.versions, self.likeliest, self.finish)


def check_rows(rows: Sequence[Row], held: Iterable[Hashable], version: int | None) -> None:
    """Raises ValueError where a row has an id among `held` or of another, or wants other weights
    than the engine has; RuntimeError where that has none."""
    if version is None:
        raise RuntimeError("weights must be loaded before an engine samples")
    seen = set(held)
    for row in rows:
        require(row.id not in seen, "row.id", row.id, "be one that is not in the engine")
        seen.add(row.id)
        if row.version not in (None, version):
            rule = f"be {version!r} or left out"
            raise Problems("row.version", rule, "the engine has no other weights", "", row.version)


class Engine(ABC):
    """Samples from one model. Not thread-safe: one thread owns it (`engine_loop.EngineLoop`).

    The class says what it can. `ENGINES` has the names under which the setting `engine` knows
    engines; a dotted path names any other.
    """

    takes_weights: ClassVar[bool] = True
    """Whether published weights are loaded into it; False: it has its own, or follows the run."""
    takes_rows: ClassVar[bool] = True
    """Whether rows may be added to those that it samples; False: it is asked for whole batches."""
    takes_images: ClassVar[bool] = False
    """Whether it reads `Row.images`."""
    knows_versions: ClassVar[bool] = False
    """Whether it knows better than its caller which weights sampled a token of a batch."""
    has_logprobs: ClassVar[bool] = True
    """Whether its tokens and log-probs are exact, so that they can be learnt from."""

    @classmethod
    def rules(cls, config: Any) -> Iterator[Problem]:
        """The problems of an algorithm's config that has chosen this engine."""
        if config.in_evaluation:
            return
        if not cls.has_logprobs:
            yield Problem("engine", "be another in training", "its tokens cannot be learnt from",
                          "Set it in evaluation_config alone", config.engine)  # fmt: skip
        if (config.streams or config.oversample > 1) and not cls.takes_rows:
            yield Problem("engine", "be another with max_staleness, oversample or schedule='free'",
                          "it is asked for whole batches by the newest weights",
                          "Use engine='torch'", config.engine)  # fmt: skip

    @classmethod
    def of(cls, config: Any) -> Engine:
        """The engine of a sampler with this config."""
        return cls(**(config.engine_settings or {}))

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Rows in it, those that wait for a place among them."""

    @property
    @abstractmethod
    def version(self) -> int | None:
        """The version of the weights on which new rows start; None before any were loaded."""

    @abstractmethod
    def add(self, rows: Sequence[Row]) -> None:
        """Adds rows; they sample their first token in one of the next steps.

        Raises:
            ValueError: an id that is in the engine, more positions than the model has, a version
                that it does not have, or what it cannot do (guides, the likeliest tokens).
            RuntimeError: the engine was given no weights yet.
        """

    @abstractmethod
    def step(self) -> list[Ended]:
        """Samples one token for every row that has a place, and hands back rows that have ended:
        at once or, on a device that is better not asked at each step, a few steps later."""

    @abstractmethod
    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        """The tokens of unfinished rows since they were added, of each from the index in `starts`
        on. A row that has finished but was not returned yet has a `finish`."""

    @abstractmethod
    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        """Removes rows and returns their partial output; finished ones keep their `finish`. Unknown
        ids are ignored."""

    @abstractmethod
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

    @abstractmethod
    def close(self) -> None:
        """Frees all memory; its rows are lost."""


# --- The completions of a batch


@dataclass
class Completions:
    """Completions of a batch, rows of a group adjacent. T = the longest completion of the batch."""

    completion_ids: torch.Tensor
    """[batch, T] int64, right-padded with the pad token."""
    completion_mask: torch.Tensor
    """[batch, T] bool, True for sampled tokens, the stop token among them."""
    logprobs: torch.Tensor
    """[batch, T] float32, log_softmax(logits / temperature) of each token, 0 after the end."""
    finished: torch.Tensor
    """[batch] bool, True where a stop token ended the completion."""
    values: torch.Tensor | None = None
    """[batch, T] float32, of the state before each token, 0 after the end; with a critic."""
    versions: torch.Tensor | None = None
    """[batch, T] int32, of the weights that sampled each token, -1 where that is unknown or there
    is none; where the caller says so."""
    experts: dict[str, torch.Tensor] = field(default_factory=dict)
    """`columns.expert_columns`, where experts are kept."""

    def columns(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """The columns of a training batch, on `device`, or where they are."""
        held = {
            columns.COMPLETION_IDS: self.completion_ids,
            columns.COMPLETION_MASK: self.completion_mask,
            columns.SAMPLER_LOGPROBS: self.logprobs,
            columns.FINISHED: self.finished,
        }
        if self.values is not None:
            held[columns.SAMPLER_VALUES] = self.values
        if self.versions is not None:
            held[columns.WEIGHTS_VERSION] = self.versions
        held |= self.experts
        return {name: column.to(device) for name, column in held.items()}


def pad_completions(
    rows: Sequence[Any], pad_token_id: int, *, with_versions: bool = False, prompt_len: int = 0
) -> Completions:
    """Ragged rows as `Completions`, each with `token_ids`, at least one, as many `logprobs` and
    `versions`, and its `finish`; with the columns of their prompts, the `experts` of each."""
    ids, mask = pad_right([row.token_ids for row in rows], pad_token_id)
    logprobs, _ = pad_right([row.logprobs for row in rows], 0.0, torch.float32)
    finished = torch.tensor([row.finish == "stop" for row in rows])
    versions = None
    if with_versions:
        versions, _ = pad_right([row.versions for row in rows], columns.NO_VERSION, torch.int32)
    experts = {}
    if prompt_len:
        known = [row.experts for row in rows]
        lengths = [
            0 if each is None else len(each) - len(row.token_ids) + 1
            for each, row in zip(known, rows, strict=True)
        ]
        experts = columns.expert_columns(known, lengths, (prompt_len, ids.shape[1]))
    return Completions(ids, mask, logprobs, finished, versions=versions, experts=experts)


# --- Noise: a pure function of (seed, row), without a generator state to carry or to restore


def uniform_noise(
    seed: int, row_ids: torch.Tensor | np.ndarray | Sequence[int], length: int, turn: int = 0
) -> torch.Tensor:
    """Uniforms in [0, 1), one counter-based stream per row id and turn.

    A row's numbers depend on the seed and its id alone: not on the rows beside it, and not on
    `length` (a longer draw starts with the shorter one). Only the raw words of Philox4x64-10 are
    used (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; key = (seed, row id),
    the counter's highest word = turn), whose stream NumPy keeps stable between versions; each
    32-bit half gives the 24 bits that float32 holds exactly, so 1.0 is never drawn.

    Args:
        seed: 0 .. 2**64 - 1.
        row_ids: [batch] integers, >= 0.
        length: numbers per row, >= 0.
        turn: 0 .. 2**64 - 1, of a conversation.

    Returns:
        [batch, length] float32.

    Raises:
        ValueError: a seed out of range.
    """
    rows = np.asarray(row_ids, dtype=np.int64)
    halves = _words(seed, rows, (length + 1) // 2, turn).view("<u4")[:, :length] >> np.uint32(8)
    return torch.from_numpy(halves.astype(np.float32) * np.float32(2.0**-24))


def _words(seed: int, rows: np.ndarray, count: int, turn: int) -> np.ndarray:
    """The first `count` raw words of each row's stream, [rows, count] uint64."""
    require(0 <= seed < 2**64, "seed", seed, "be within 0 and 2**64 - 1")
    assert rows.ndim == 1 and rows.min(initial=0) >= 0 and 0 <= turn < 2**64 and count >= 0
    words = np.empty((len(rows), count), dtype="<u8")
    start = np.array([0, 0, 0, turn], dtype=np.uint64)
    bits = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=start)
    state = bits.state  # a copy at the start; assigning it back rewinds the stream
    key = state["state"]["key"]
    for i, row in enumerate(rows):
        key[1] = row
        bits.state = state
        words[i] = bits.random_raw(count)
    return words


_HERE = "rllib_llm.engines"
ENGINES = {
    "torch": f"{_HERE}.torch_engine.TorchEngine",  # of the sampler's module
    "vllm": f"{_HERE}.vllm_engine.VLLMEngine",
    "openai": f"{_HERE}.servers.ServerEngine",
}


def engine_class(name: str) -> type[Engine]:
    """The class of an engine, by its name or its own dotted path; importing it may take seconds.

    Raises:
        Problems: there is no such class.
    """
    found: Any = import_dotted(ENGINES.get(name, name), name="engine")
    is_engine = isinstance(found, type) and issubclass(found, Engine)
    require(is_engine, "engine", name, "be a class derived from rllib_llm.engines.protocol.Engine")
    return found
