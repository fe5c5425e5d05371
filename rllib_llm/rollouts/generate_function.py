"""Completions by a user's function (`generate_function`).

The function is asked for the completions of one prompt:

    async def best_words(asked):
        ended = await asyncio.gather(*[asked.complete(i) for i in range(asked.num_completions)])
        return [Generated(e.token_ids, e.logprobs) for e in ended]

It may ask the policy as often as it wants, call tools, or join other texts; what it gives back
is checked before it is judged and learnt from. Log-probs must be those of the policy that is
trained: ratios are taken to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Engine, Finish, pad_completions
from rllib_llm.modules.images import refuse_images
from rllib_llm.shared import columns
from rllib_llm.shared.columns import pad_right
from rllib_llm.shared.errors import require
from rllib_llm.shared.remote import EventLoop, call


@dataclass(frozen=True)
class Generated:
    """One completion.

    token_ids: its tokens, the stop token among them, at least one and at most `max_new_tokens`.
    logprobs: of each under the policy, at its temperature; 0 for tokens that it did not sample.
    finished: whether a stop token ended it; None: whether the last token is one.
    sampled: whether the policy sampled each token; None: all. Others are not learnt from.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finished: bool | None = None
    sampled: Sequence[bool] | None = None

    @property
    def finish(self) -> Finish:
        """As an engine's rows have it."""
        return "stop" if self.finished else "length"


class Asked:
    """The request to a generation function: completions of one prompt.

    prompt_ids: the prompt's tokens. num_completions: how many. params: how to sample. row_ids:
    names of the completions, of which their randomness is a function.
    """

    def __init__(
        self, loop: EngineLoop, prompt_ids: list[int], params: SamplingParams, seed: int,
        row_ids: list[int],
    ) -> None:  # fmt: skip
        self.prompt_ids, self.params, self.row_ids = prompt_ids, params, row_ids
        self._loop, self._seed = loop, seed

    @property
    def num_completions(self) -> int:
        """How many completions are wanted."""
        return len(self.row_ids)

    def begin(
        self, i: int, token_ids: Sequence[int] = (), *, params: SamplingParams | None = None,
        turn: int = 0,
    ) -> Future[Ended]:  # fmt: skip
        """Begins the policy's own completion number `i`, after the prompt and `token_ids`.

        Args:
            turn: names the randomness where one completion is asked for several times.
        """
        return self._loop.submit(
            [*self.prompt_ids, *token_ids], params or self.params, seed=self._seed,
            row=self.row_ids[i], turn=turn,
        )  # fmt: skip

    async def complete(self, *args: Any, **kwargs: Any) -> Ended:
        """Waits for the completion started by `begin`."""
        return await asyncio.wrap_future(self.begin(*args, **kwargs))

    def complete_now(self, *args: Any, **kwargs: Any) -> Ended:
        """As `complete`, for a function that is not async."""
        return self.begin(*args, **kwargs).result()


GenerateFunction: TypeAlias = Callable[
    [Asked], Sequence[Generated] | Awaitable[Sequence[Generated]]
]


class FunctionGenerator:
    """Completions by a user's function, which may ask a policy for its own.

    Args:
        function: is called for each prompt, for many at once.
    """

    def __init__(self, function: GenerateFunction) -> None:
        self._function = function
        self._events = EventLoop("generation")

    def __call__(
        self, engine: Engine, vocab_size: int, prompts: Mapping[str, torch.Tensor], asked: Any
    ) -> dict[str, torch.Tensor]:
        """The columns of the completions that a policy was asked for (`policy.Generation`).

        Args:
            engine: of the policy; it is closed.
        """
        n = asked.num_completions
        refuse_images(prompts)
        ids, mask = prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK]
        with contextlib.closing(EngineLoop(engine)) as loop:
            wanted = [
                Asked(loop, ids[g][mask[g]].tolist(), asked.params, asked.seed,
                      asked.row_ids[g * n : (g + 1) * n].tolist())
                for g in range(len(ids))
            ]  # fmt: skip
            made = self._events.run(self._all(wanted))
        rows = []
        for group in made:
            given = len(group) if isinstance(group, Sequence) else type(group).__name__
            require(given == n, "completions of generate_function", given, f"be {n}",
                    "so many were asked for (asked.num_completions)",
                    "Return a list of as many Generated")  # fmt: skip
            rows += [_checked(row, asked.params, vocab_size) for row in group]
        found = pad_completions(rows, asked.params.pad_token_id).columns()
        if not all(all(row.sampled or ()) for row in rows):
            sampled = [row.sampled or () for row in rows]
            found[columns.LOSS_MASK], _ = pad_right(sampled, False, torch.bool)
        return {name: column.to(ids.device) for name, column in found.items()}

    async def _all(self, wanted: list[Asked]) -> list[Any]:
        """Calls the function for each prompt; the engine samples for all calls together."""
        return await asyncio.gather(*[call(self._function, each) for each in wanted])

    def close(self) -> None:
        """Ends its event loop."""
        self._events.close()


def _checked(row: Any, params: SamplingParams, vocab_size: int) -> Generated:
    """The completion, if it can be learnt from."""
    remedy = "Correct what generate_function returns"
    require(isinstance(row, Generated), "a completion", row, "be a Generated", "", remedy)
    ids, logprobs, most = [*map(int, row.token_ids)], [*row.logprobs], params.max_new_tokens
    sampled = [True] * len(ids) if row.sampled is None else [*row.sampled]
    one_each = f"be {len(ids)}, one for each token"
    for name, value, holds, rule in (
        ("len(token_ids)", len(ids), 1 <= len(ids) <= most, f"be in 1..max_new_tokens={most}"),
        ("token_ids", ids, all(0 <= i < vocab_size for i in ids), f"be below {vocab_size}"),
        ("len(logprobs)", len(logprobs), len(logprobs) == len(ids), one_each),
        ("len(sampled)", len(sampled), len(sampled) == len(ids), one_each),
        ("logprobs", logprobs, all(math.isfinite(p) and p <= 1e-4 for p in logprobs),
         "be finite and at most 0"),
    ):  # fmt: skip
        require(holds, name, value, rule, "", remedy)
    finished = ids[-1] in params.stop_token_ids if row.finished is None else row.finished
    return Generated(ids, logprobs, finished, sampled)

