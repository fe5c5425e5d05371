"""The decode loop: prompts in, completions and their log-probs out, for any HF causal LM.

Each prompt is prefilled once for all its completions. Rows that have ended leave the batch. One
uniform per row and token is given from outside, so a row's tokens are a function of the model, its
prompt and its own noise, whatever batch it is in (up to the round-off of differently shaped matrix
products).
"""

from __future__ import annotations

import torch
from torch import nn

from rllib_llm.sampling.check_inputs import check_at_least_one, check_inputs
from rllib_llm.sampling.completions import CompletionBuffers, Completions, concatenate
from rllib_llm.sampling.decode_step import DecodeStep, open_decode_step
from rllib_llm.sampling.kv_cache import SharedPromptCache, make_cache
from rllib_llm.sampling.params import SamplingParams
from rllib_llm.sampling.row_budget import row_budget
from rllib_llm.sampling.token_sampling import choose_tokens

__all__ = ["Completions", "generate"]

# On a GPU each look at which rows have ended waits for the device.
_STEPS_BETWEEN_LOOKS_ON_GPU = 8


def generate(
    model: nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    params: SamplingParams,
    *,
    num_completions: int = 1,
    noise: torch.Tensor | None = None,
    steps_between_looks: int | None = None,
    max_rows: int | None = None,
) -> Completions:
    """Completions of each prompt; those of prompt g are rows g * num_completions and following.

    Args:
        model: causal LM of transformers in eval mode, on any device, in any dtype.
        prompt_ids: [groups, P] int64, left-padded.
        prompt_mask: [groups, P] bool, True where a prompt token stands.
        params: what to sample.
        num_completions: completions per prompt.
        noise: [groups * num_completions, >= max_new_tokens] float32 in [0, 1), token t of row i is
            decided by noise[i, t]; may be None only when params.greedy.
        steps_between_looks: tokens sampled between two looks at which rows have ended and can leave
            the batch; None is 1 on a CPU and 8 elsewhere. Changes speed only.
        max_rows: completions decoded at once, rounded down to whole groups but at least one; None
            is all on a CPU, and on a GPU what its free memory holds. Changes speed only.

    Raises:
        ValueError: inputs that do not fit each other, a prompt without tokens, or more positions
            than the model has.
        FloatingPointError: the model's logits are not finite.
    """
    check_inputs(model, prompt_ids, prompt_mask, params, num_completions, noise)
    check_at_least_one(steps_between_looks=steps_between_looks, max_rows=max_rows)
    device = next(model.parameters()).device
    if steps_between_looks is None:
        steps_between_looks = 1 if device.type == "cpu" else _STEPS_BETWEEN_LOOKS_ON_GPU
    if max_rows is None:
        max_rows = row_budget(model, prompt_ids.shape[1] + params.max_new_tokens)
    groups = len(prompt_ids)
    groups_at_once = groups if max_rows is None else max(1, max_rows // num_completions)
    parts = []
    for start in range(0, groups, groups_at_once):
        part = slice(start, start + groups_at_once)
        rows = slice(start * num_completions, (start + groups_at_once) * num_completions)
        part_noise = None if noise is None or params.greedy else noise[rows].to(device)
        # Inference mode spares each operation its autograd bookkeeping: up to a tenth of the time.
        with torch.inference_mode():
            mask = prompt_mask[part].to(device)
            decoder = _Decoder(model, mask, params, num_completions, part_noise)
            decoder.run(prompt_ids[part].to(device), steps_between_looks)
        parts.append(decoder.buffers.completions(decoder.stops))
    return concatenate(parts, params.pad_token_id)


class _Decoder:
    """State of one generation. Row-wise tensors hold only the rows still in the batch."""

    def __init__(
        self,
        model: nn.Module,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        num_completions: int,
        noise: torch.Tensor | None,
    ) -> None:
        device = prompt_mask.device
        steps = params.max_new_tokens
        batch = len(prompt_mask) * num_completions
        self.model = model
        self.params = params
        self.num_completions = num_completions
        # Columns that are padding in every row are left out.
        self.prompt_mask = prompt_mask[:, int((~prompt_mask.any(dim=0)).sum()) :]
        self.prompt_len = self.prompt_mask.shape[1]
        self.cache = make_cache(model.config, num_completions, self.prompt_len + steps)
        self.buffers = CompletionBuffers(steps, batch, params.pad_token_id, device)
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
        with open_decode_step(self.model, self.cache, steps) as decode_step:
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
        logits = self.model(
            input_ids=prompt_ids,
            attention_mask=None if self.padding_mask is None else mask,
            position_ids=(mask.long().cumsum(dim=1) - 1).clamp_(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
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
        forbid = step < self.params.min_new_tokens and len(self.stops) > 0
        tokens, logprobs = choose_tokens(logits, noise, self.params, self.stops if forbid else None)
        tokens = tokens.where(self.alive, self.params.pad_token_id)
        self.buffers.write(step, self.rows, tokens, logprobs, self.alive)
        if len(self.stops):
            self.alive = self.alive & (tokens.unsqueeze(1) != self.stops).all(dim=1)
        return tokens

    def _drop_ended(self, tokens: torch.Tensor) -> torch.Tensor:
        """Fills the places of ended rows with rows from the back; returns the tokens that stay."""
        alive = self.alive.cpu()
        num_alive = int(alive.sum())
        if num_alive == len(alive):
            return tokens
        if num_alive:
            targets = (~alive[:num_alive]).nonzero().squeeze(1).to(tokens.device)
            sources = (alive[num_alive:].nonzero().squeeze(1) + num_alive).to(tokens.device)
            for values in (tokens, self.rows, self.positions, self.padding_mask):
                if values is not None:
                    values[targets] = values[sources]
            self.rows = self.rows[:num_alive]
            self.positions = self.positions[:num_alive]
            self.padding_mask = None if self.padding_mask is None else self.padding_mask[:num_alive]
            self.cache.move_rows(sources, targets, num_alive)
        self.alive = self.alive.new_ones(num_alive)
        return tokens[:num_alive]
