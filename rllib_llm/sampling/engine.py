"""The decode loop: prompts in, completions and their log-probs out, for any HF causal LM.

Each prompt is prefilled once for all its completions. Rows that have ended leave the batch. One
uniform per row and token is given from outside, so a row's tokens are a function of the model, its
prompt and its own noise, whatever batch it is in (up to the round-off of differently shaped matrix
products).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from rllib_llm.sampling.decode_weights import decode_layout
from rllib_llm.sampling.kv_cache import SharedPromptCache, make_cache
from rllib_llm.sampling.params import SamplingParams
from rllib_llm.sampling.token_sampling import choose_tokens

# Tokens between two looks at which rows have ended. On a GPU each look waits for the device.
_STEPS_BETWEEN_LOOKS = {"cpu": 1}
_STEPS_BETWEEN_LOOKS_ELSEWHERE = 8


@dataclass
class Completions:
    """Completions of a batch, rows of a group adjacent. T = the longest completion of the batch."""

    completion_ids: torch.Tensor
    """[batch, T] int64, right-padded with the pad token."""
    completion_mask: torch.Tensor
    """[batch, T] bool, True for sampled tokens, the stop token among them."""
    logprobs: torch.Tensor
    """[batch, T] float32, log_softmax(logits / temperature) of each token, 0 behind the end."""
    finished: torch.Tensor
    """[batch] bool, True where a stop token ended the completion."""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    params: SamplingParams,
    *,
    num_completions: int = 1,
    noise: torch.Tensor | None = None,
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

    Raises:
        ValueError: inputs that do not fit each other, a prompt without tokens, or more positions
            than the model has.
        FloatingPointError: the model's logits are not finite.
    """
    _check_inputs(model, prompt_ids, prompt_mask, params, num_completions, noise)
    device = next(model.parameters()).device
    prompt_mask = prompt_mask.to(device)
    prompt_ids = prompt_ids.to(device)
    dead = int((~prompt_mask.any(dim=0)).sum())  # columns that are padding in every row
    decoder = _Decoder(
        model, prompt_ids[:, dead:], prompt_mask[:, dead:], params, num_completions, noise
    )
    # Inference mode spares each operation its autograd bookkeeping: up to a tenth of the time.
    with decode_layout(model, params.max_new_tokens), torch.inference_mode():
        decoder.run()
    return decoder.completions()


class _Decoder:
    """State of one generation. Row-wise tensors hold only the rows still in the batch."""

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        num_completions: int,
        noise: torch.Tensor | None,
    ) -> None:
        groups, prompt_len = prompt_ids.shape
        device = prompt_ids.device
        batch = groups * num_completions
        steps = params.max_new_tokens
        self.model = model
        self.params = params
        self.prompts = prompt_ids, prompt_mask
        self.num_completions = num_completions
        self.cache = make_cache(model.config, num_completions, prompt_len + steps)
        self.stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self.noise = None
        if noise is not None:
            self.noise = noise[:, :steps].to(device, torch.float32).t().contiguous()
        # Step-major, so that one step writes one contiguous line.
        self.tokens = torch.full((steps, batch), params.pad_token_id, device=device)
        self.mask = torch.zeros((steps, batch), dtype=torch.bool, device=device)
        self.logprobs = torch.zeros((steps, batch), dtype=torch.float32, device=device)
        # Rows still in the batch: place in the output, not ended yet, position of the next token.
        self.rows = torch.arange(batch, device=device)
        self.alive = torch.ones(batch, dtype=torch.bool, device=device)
        self.positions = prompt_mask.sum(dim=1).repeat_interleave(num_completions)
        self.padded = not bool(prompt_mask.all())
        self.attention_mask = None
        if self.padded:
            generated = prompt_mask.new_ones(groups, steps)
            self.attention_mask = torch.cat([prompt_mask, generated], dim=1).repeat_interleave(
                num_completions, dim=0
            )
        self.prompt_len = prompt_len

    def run(self) -> None:
        """Prefill, then one token per step until every row has ended."""
        looks = _STEPS_BETWEEN_LOOKS.get(self.tokens.device.type, _STEPS_BETWEEN_LOOKS_ELSEWHERE)
        steps = self.params.max_new_tokens
        logits = self._prefill()
        for step in range(steps):
            tokens = self._choose(step, logits)
            if step + 1 == steps:
                break
            if len(self.stops) and (step + 1) % looks == 0:
                tokens = self._drop_ended(tokens)
                if not len(tokens):
                    break
            logits = self._forward(step, tokens)

    def _prefill(self) -> torch.Tensor:
        """Logits [batch, vocab] that predict the first token of every completion."""
        prompt_ids, prompt_mask = self.prompts
        shares = isinstance(self.cache, SharedPromptCache)
        if not shares:
            prompt_ids = prompt_ids.repeat_interleave(self.num_completions, dim=0)
            prompt_mask = prompt_mask.repeat_interleave(self.num_completions, dim=0)
        position_ids = (prompt_mask.long().cumsum(dim=1) - 1).clamp_(min=0)
        logits = self.model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask if self.padded else None,
            position_ids=position_ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits.repeat_interleave(self.num_completions, dim=0) if shares else logits

    def _forward(self, step: int, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] behind the tokens [rows] chosen at this step."""
        mask = self.attention_mask
        logits = self.model(
            input_ids=tokens.unsqueeze(1),
            attention_mask=None if mask is None else mask[:, : self.prompt_len + step + 1],
            position_ids=self.positions.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.positions = self.positions + 1
        return logits

    def _choose(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Chooses and records one token per row; [rows] int64, pad where the row has ended."""
        noise = None if self.noise is None else self.noise[step].index_select(0, self.rows)
        forbid = step < self.params.min_new_tokens and len(self.stops) > 0
        tokens, logprobs = choose_tokens(logits, noise, self.params, self.stops if forbid else None)
        tokens = tokens.where(self.alive, self.params.pad_token_id)
        self.tokens[step].index_copy_(0, self.rows, tokens)
        self.mask[step].index_copy_(0, self.rows, self.alive)
        self.logprobs[step].index_copy_(0, self.rows, logprobs.where(self.alive, 0.0))
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
            for name in ("rows", "positions", "attention_mask"):
                values = getattr(self, name)
                if values is not None:
                    values[targets] = values[sources]
                    setattr(self, name, values[:num_alive])
            tokens[targets] = tokens[sources]
            self.cache.move_rows(sources, targets, num_alive)
        self.alive = self.alive.new_ones(num_alive)
        return tokens[:num_alive]

    def completions(self) -> Completions:
        """What `run` sampled, as tensors that autograd accepts (not those of inference mode)."""
        longest = int(self.mask.any(dim=1).sum())
        mask, tokens, logprobs = (
            steps[:longest].t().clone(memory_format=torch.contiguous_format)
            for steps in (self.mask, self.tokens, self.logprobs)
        )
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError(
                "logits must be finite: the model gave NaN or infinity while sampling. "
                "Check the weights it was given, its dtype and the learning rate."
            )
        last = tokens.gather(1, mask.sum(dim=1, keepdim=True) - 1)
        finished = (last == self.stops).any(dim=1)
        return Completions(tokens, mask, logprobs, finished)


def _check_inputs(
    model: nn.Module,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    params: SamplingParams,
    num_completions: int,
    noise: torch.Tensor | None,
) -> None:
    if prompt_ids.ndim != 2 or prompt_ids.shape != prompt_mask.shape or not prompt_ids.numel():
        raise ValueError(
            f"prompt_ids={tuple(prompt_ids.shape)!r} must be [groups, prompt_len] like prompt_mask="
            f"{tuple(prompt_mask.shape)!r}: each token needs its mask. Pass both as the "
            "environment gave them."
        )
    if prompt_mask.dtype != torch.bool:
        raise ValueError(
            f"prompt_mask={prompt_mask.dtype!r} must be torch.bool: True where a token counts. "
            "Convert it with .bool()."
        )
    if num_completions < 1:
        raise ValueError(
            f"num_completions={num_completions!r} must be at least 1: it counts the completions of "
            "each prompt. Use 1 for a single one."
        )
    if model.training:
        raise ValueError(
            "model.training=True must be False: dropout would make the log-probs another model's. "
            "Call model.eval() before generating."
        )
    lengths = prompt_mask.sum(dim=1)
    if not bool(prompt_mask[:, -1].all()) or bool((prompt_mask.long().diff(dim=1) < 0).any()):
        raise ValueError(
            "prompt_mask must be left-padded, with a token in its last column: completions are "
            "appended there. Move the padding of every prompt to its front; drop empty prompts."
        )
    _check_positions(model, int(lengths.max()), params)
    _check_noise(noise, prompt_ids.shape[0] * num_completions, params)


def _check_positions(model: nn.Module, longest_prompt: int, params: SamplingParams) -> None:
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and longest_prompt + params.max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens={params.max_new_tokens!r} must be at most "
            f"{limit - longest_prompt}: the longest prompt has {longest_prompt} tokens and the "
            f"model {limit} positions. Shorten prompts or completions."
        )


def _check_noise(noise: torch.Tensor | None, batch: int, params: SamplingParams) -> None:
    if params.greedy:
        return
    if noise is None:
        raise ValueError(
            "noise=None must be a tensor of uniforms: only greedy decoding needs none. "
            "Draw it with rllib_llm.sampling.noise.uniform_noise."
        )
    if noise.ndim != 2 or noise.shape[0] != batch or noise.shape[1] < params.max_new_tokens:
        raise ValueError(
            f"noise={tuple(noise.shape)!r} must be [{batch}, >= {params.max_new_tokens}]: one "
            "uniform per completion and token. Draw it for groups * num_completions rows."
        )
