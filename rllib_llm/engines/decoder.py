"""One batch of prompts decoded together, rows leaving it as they end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rllib_llm.engines.completions import CompletionBuffers
from rllib_llm.engines.decode_step import DecodeStep, OpenStep, last_logits, open_decode_step
from rllib_llm.engines.kv_cache import SharedPromptCache, make_cache
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.token_sampling import choose_tokens


class Decoder:
    """State of one generation. Row-wise tensors hold only the rows still in the batch."""

    def __init__(
        self,
        model: nn.Module,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        num_completions: int,
        noise: torch.Tensor | None,
        open_step: OpenStep = open_decode_step,
        value_head: nn.Module | None = None,
    ) -> None:
        device = prompt_mask.device
        steps = params.max_new_tokens
        batch = len(prompt_mask) * num_completions
        self.model = model
        self.params = params
        self.num_completions = num_completions
        self.open_step = open_step
        self.value_head = value_head
        # Columns that are padding in every row are left out.
        self.prompt_mask = prompt_mask[:, int((~prompt_mask.any(dim=0)).sum()) :]
        self.prompt_len = self.prompt_mask.shape[1]
        self.cache = make_cache(model.config, num_completions, self.prompt_len + steps)
        self.buffers = CompletionBuffers(
            steps, batch, params.pad_token_id, device, with_values=value_head is not None
        )
        self.stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self.noise = None
        if noise is not None:
            self.noise = noise[:, :steps].float().t().contiguous()
        # Of the rows still in the batch: place in the output, not ended yet, position of the next
        # token, and which positions count [rows, prompt_len + steps] if not all do.
        self.rows = torch.arange(batch, device=device)
        self.alive = torch.ones(batch, dtype=torch.bool, device=device)
        self.positions = self.prompt_mask.sum(dim=1).repeat_interleave(num_completions)
        self.padding_mask = None
        if not bool(self.prompt_mask.all()):
            generated = self.prompt_mask.new_ones(len(prompt_mask), steps)
            padding_mask = torch.cat([self.prompt_mask, generated], dim=1)
            self.padding_mask = padding_mask.repeat_interleave(num_completions, dim=0)

    def run(self, prompt_ids: torch.Tensor, steps_between_looks: int) -> None:
        """Prefill, then one token per step until every row has ended."""
        steps = self.params.max_new_tokens
        with self.open_step(self.model, self.cache, steps, self.value_head) as decode_step:
            logits = self._prefill(prompt_ids[:, -self.prompt_len :])
            for step in range(steps):
                tokens = self._choose(step, logits)
                if step + 1 == steps:
                    break
                if len(self.stops) and (step + 1) % steps_between_looks == 0:
                    tokens = self._drop_ended(tokens)
                    if not len(tokens):
                        break
                logits = self._forward(decode_step, step, tokens)

    def _prefill(self, prompt_ids: torch.Tensor) -> torch.Tensor:
        """Logits [batch, vocab] that predict the first token of every completion."""
        mask = self.prompt_mask
        shares = isinstance(self.cache, SharedPromptCache)
        if not shares:
            prompt_ids = prompt_ids.repeat_interleave(self.num_completions, dim=0)
            mask = mask.repeat_interleave(self.num_completions, dim=0)
        logits = last_logits(
            self.model,
            self.value_head,
            input_ids=prompt_ids,
            attention_mask=None if self.padding_mask is None else mask,
            position_ids=(mask.long().cumsum(dim=1) - 1).clamp_(min=0),
            past_key_values=self.cache,
        )
        return logits.repeat_interleave(self.num_completions, dim=0) if shares else logits

    def _forward(self, decode_step: DecodeStep, step: int, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] behind the tokens [rows] chosen at this step."""
        mask = self.padding_mask
        seen = None if mask is None else mask[:, : self.prompt_len + step + 1]
        logits = decode_step(tokens, self.positions, self.cache, seen)
        self.positions = self.positions + 1
        return logits

    def _choose(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Chooses and records one token per row; [rows] int64, pad where the row has ended."""
        noise = None if self.noise is None else self.noise[step].index_select(0, self.rows)
        logits, values = self.buffers.split(logits)
        forbid = step < self.params.min_new_tokens and len(self.stops) > 0
        tokens, logprobs = choose_tokens(logits, noise, self.params, self.stops if forbid else None)
        tokens = tokens.where(self.alive, self.params.pad_token_id)
        self.buffers.write(step, self.rows, tokens, logprobs, self.alive, values)
        if len(self.stops):
            self.alive = self.alive & (tokens.unsqueeze(1) != self.stops).all(dim=1)
        return tokens

    def _drop_ended(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fills the places of ended rows with rows from the back; returns the tokens that stay."""
        moves = fill_gaps(self.alive)
        if moves is None:
            return tokens
        if moves.num_rows:
            self.cache.move_rows(moves.sources, moves.targets, moves.num_rows)
            if self.padding_mask is not None:
                self.padding_mask = moves.apply(self.padding_mask)
        self.rows, self.positions = moves.apply(self.rows), moves.apply(self.positions)
        self.alive = self.alive.new_ones(moves.num_rows)
        return moves.apply(tokens)


@dataclass(frozen=True)
class Moves:
    """Rows `sources` [moved] int64 go to the places `targets`; the first `num_rows` stay."""

    sources: torch.Tensor
    targets: torch.Tensor
    num_rows: int

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """The rows that stay, [num_rows, ...]; `values` is written to."""
        values[self.targets] = values[self.sources]
        return values[: self.num_rows]


def fill_gaps(alive: torch.Tensor) -> Moves | None:
    """Moves that put the rows that are alive [rows] first, few of them; None where all are.

    Waits for the device.
    """
    on_host = alive.cpu()
    num_alive = int(on_host.sum())
    if num_alive == len(on_host):
        return None
    targets = (~on_host[:num_alive]).nonzero().squeeze(1)
    sources = on_host[num_alive:].nonzero().squeeze(1) + num_alive
    return Moves(sources.to(alive.device), targets.to(alive.device), num_alive)
