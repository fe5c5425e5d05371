"""More completions than are decoded at once: as rows end, the next prompts take their places.

All rows end at the same position of the cache. A prompt that comes later is a row with more padding
before it, so nothing about the rows beside it changes, and its tokens are the same as in a batch of
its own (up to round-off).
"""

from __future__ import annotations

import torch
from torch import nn

from rllib_llm.engines.completions import CompletionBuffers
from rllib_llm.engines.decode_step import DecodeStep, OpenStep, last_logits, open_decode_step
from rllib_llm.engines.decoder import fill_gaps
from rllib_llm.engines.kv_cache import SharedPromptCache, make_cache
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.token_sampling import choose_tokens

# Prompts are let in when this share of the places is free: a prefill of a few is poorly used.
_FREE_SHARE = 0.25


def capacity(prompt_len: int, params: SamplingParams, steps_between_looks: int) -> int:
    """Positions of the cache: room for the longest row, and for the padding before rows that come
    while it is decoded, so that the cache is moved to the front seldom."""
    return prompt_len + 2 * params.max_new_tokens + steps_between_looks


class ContinuousDecoder:
    """State of one generation of which at most `max_groups` prompts are decoded at once.

    Args: as `engine.generate`; all tensors on the model's device. Row-wise tensors hold only the
    rows in the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        num_completions: int,
        noise: torch.Tensor | None,
        max_groups: int,
        open_step: OpenStep = open_decode_step,
        value_head: nn.Module | None = None,
    ) -> None:
        steps, device = params.max_new_tokens, prompt_ids.device
        self.model, self.params, self.open_step = model, params, open_step
        self.value_head = value_head
        self.num_completions, self.max_groups = num_completions, max_groups
        padding = int((~prompt_mask.any(dim=0)).sum())  # columns without any token
        self.prompt_ids, self.prompt_mask = prompt_ids[:, padding:], prompt_mask[:, padding:]
        self.prompt_len = self.prompt_ids.shape[1]
        self.lengths = self.prompt_mask.sum(dim=1)
        self.next_group = 0
        batch = len(prompt_ids) * num_completions
        self.buffers = CompletionBuffers(
            steps, batch, params.pad_token_id, device, with_values=value_head is not None
        )
        self.stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self.noise = None if noise is None else noise[:, :steps].float()
        # Of the rows in the batch: place in the output, tokens sampled, not ended yet, position of
        # the next token, and where in the cache they start.
        none = torch.empty(0, dtype=torch.int64, device=device)
        self.rows, self.sampled, self.positions, self.starts = none, none, none, none
        self.alive = none.bool()
        self.mask: torch.Tensor | None = None  # [rows, capacity], None while none has padding
        self.first = 0

    def run(self, steps_between_looks: int) -> None:
        """Decodes until every prompt was let in and every row has ended."""
        steps = self.params.max_new_tokens
        self.capacity = capacity(self.prompt_len, self.params, steps_between_looks)
        num_layers = len(self._prefill_cache(1).layers)
        self.cache = SharedPromptCache(num_layers, self.num_completions, self.capacity)
        self.cache.reserve(self.max_groups, self.prompt_len)
        with self.open_step(self.model, self.cache, steps, self.value_head) as decode_step:
            tokens, step = self._admit(self.rows), 0
            while len(tokens):
                tokens = self._take(self._forward(decode_step, tokens), 0)
                step += 1
                if step % steps_between_looks == 0:
                    tokens = self._admit(self._drop_ended(tokens))

    def _prefill_cache(self, prompt_len: int) -> SharedPromptCache:
        return make_cache(self.model.config, 1, prompt_len)

    # --- one step ----------------------------------------------------------------------------

    def _forward(self, decode_step: DecodeStep, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] behind the tokens [rows]."""
        if self.cache.length == self.capacity:
            self._make_room()
        seen = None if self.mask is None else self.mask[:, self.first : self.cache.length + 1]
        logits = decode_step(tokens, self.positions, self.cache, seen)
        # A row that has ended stays where it is until it is dropped.
        self.positions = self.positions + self.alive
        return logits

    def _take(self, logits: torch.Tensor, start: int) -> torch.Tensor:
        """Chooses and records a token for the rows from `start` on; [rows - start] int64."""
        rows, sampled, alive = self.rows[start:], self.sampled[start:], self.alive[start:]
        steps = self.params.max_new_tokens
        noise = None
        if self.noise is not None:
            noise = self.noise[rows, sampled.clamp(max=steps - 1)]
        logits, values = self.buffers.split(logits)
        young = None
        if self.params.min_new_tokens:
            young = sampled < self.params.min_new_tokens
        tokens, logprobs = choose_tokens(
            logits, noise, self.params, None if young is None else self.stops, young
        )
        tokens = tokens.where(alive, self.params.pad_token_id)
        self.buffers.write_at(sampled.where(alive, steps), rows, tokens, logprobs, alive, values)
        sampled += 1
        ended = (tokens.unsqueeze(1) == self.stops).any(dim=1) | (sampled >= steps)
        alive &= ~ended
        return tokens

    # --- who is in the batch -----------------------------------------------------------------

    def _drop_ended(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fills the places of ended rows with rows from the back; returns the tokens that stay."""
        moves = fill_gaps(self.alive)
        if moves is None:
            return tokens
        self.cache.move_rows(moves.sources, moves.targets, moves.num_rows)
        self.rows, self.sampled, self.positions, self.starts, tokens = (
            moves.apply(values)
            for values in (self.rows, self.sampled, self.positions, self.starts, tokens)
        )
        self.alive = self.alive.new_ones(moves.num_rows)
        self._look_from()
        return tokens

    def _admit(self, tokens: torch.Tensor) -> torch.Tensor:
        """Lets waiting prompts in where there is room; the tokens to go on with, [rows]."""
        free = self.max_groups - -(-len(self.rows) // self.num_completions)
        groups = min(free, len(self.prompt_ids) - self.next_group)
        if groups and (not len(tokens) or groups >= _FREE_SHARE * self.max_groups
                       or self.next_group + groups == len(self.prompt_ids)):  # fmt: skip
            tokens = torch.cat([tokens, self._let_in(groups)])
            self._look_from()
        return tokens

    def _let_in(self, groups: int) -> torch.Tensor:
        """Prefills the next prompts; the first tokens [groups * num_completions] of their rows."""
        part = slice(self.next_group, self.next_group + groups)
        self.next_group += groups
        lengths, before = self.lengths[part], len(self.rows)
        longest = int(lengths.max())
        mask = self.prompt_mask[part, -longest:]
        prompts = self._prefill_cache(longest)
        logits = last_logits(
            self.model,
            self.value_head,
            input_ids=self.prompt_ids[part, -longest:],
            attention_mask=mask,
            position_ids=(mask.long().cumsum(dim=1) - 1).clamp_(min=0),
            past_key_values=prompts,
        )
        self.cache.admit(prompts)
        lengths = lengths.repeat_interleave(self.num_completions)
        new = torch.arange(len(lengths), device=lengths.device)
        self.rows = torch.cat([self.rows, new + part.start * self.num_completions])
        self.sampled = torch.cat([self.sampled, torch.zeros_like(new)])
        self.positions = torch.cat([self.positions, lengths])
        self.starts = torch.cat([self.starts, self.cache.length - lengths])
        self.alive = torch.cat([self.alive, torch.ones_like(new, dtype=torch.bool)])
        return self._take(logits.repeat_interleave(self.num_completions, dim=0), before)

    # --- the cache's columns -----------------------------------------------------------------

    def _look_from(self) -> None:
        """Leaves out the columns that are padding in every row, and says where padding is."""
        if not len(self.starts):
            return
        first, last = self.starts.aminmax()
        self.first = int(first)
        self.cache.look_from(self.first)
        self.mask = None
        if self.first != int(last):
            columns = torch.arange(self.capacity, device=self.starts.device)
            self.mask = columns >= self.starts.unsqueeze(1)

    def _make_room(self) -> None:
        """Moves the cache to the front, over columns that are padding in every row."""
        positions = min(self.first, self.cache.length - self.prompt_len)
        self.cache.shift(positions)
        self.starts = self.starts - positions
        self._look_from()
