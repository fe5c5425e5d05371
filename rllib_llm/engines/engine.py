"""The decode loop: prompts in, completions and their log-probs out, for any HF causal LM.

Each prompt is prefilled once for all its completions. Rows that have ended leave the batch, and
where not all fit at once the next prompts take their places. One uniform per row and token is given
from outside, so a row's tokens are a function of the model, its prompt and its own noise, whatever
batch it is in (up to the round-off of differently shaped matrix products).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from torch import nn

from rllib_llm.engines.batch_rows import CompletionBuffers, Group, Prompts
from rllib_llm.engines.checks import check_at_least_one, check_decoding_once, check_inputs
from rllib_llm.engines.completions import Completions
from rllib_llm.engines.decode_step import DecodePlan, open_decode_step
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.row_budget import row_budget, with_fewer_rows

__all__ = ["Completions", "generate"]

# On a GPU each look at which rows have ended waits for the device.
_STEPS_BETWEEN_LOOKS_ON_GPU = 8
# Prompts are let in when this share of the places is free: a prefill of a few is poorly used.
_FREE_SHARE = 0.25


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
    cuda_graphs: bool = True,
    row_blocks: bool = True,
    value_head: nn.Module | None = None,
    on_step: Callable[[], None] | None = None,
    on_fewer_rows: Callable[[int], None] | None = None,
    plan: DecodePlan | None = None,
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
        cuda_graphs: on a CUDA device the steps of Llama-shaped models are recorded once and
            replayed; no effect elsewhere. Changes speed only.
        row_blocks: on a CPU, rows of Llama-shaped models that are unlike in length have caches of
            their own; no effect elsewhere. Changes speed and memory only.
        value_head: of the trunk's last state, its layer as `linear`; then the completions have
            values. The model must be one that `lm_head.take_apart` takes apart.
        on_step: called after each step, to report progress.
        on_fewer_rows: called with the rows that are decoded at once, where a GPU's memory does not
            suffice for as many as were meant; the same completions are made of them.
        plan: of the model, for callers that generate with it repeatedly.

    Raises:
        ValueError: inputs that do not fit each other, a prompt without tokens, more positions than
            the model has, or a model that cannot be decoded here: that is tried at its first call.
        FloatingPointError: the model's logits are not finite.
    """
    check_inputs(model, prompt_ids, prompt_mask, params, num_completions, noise)
    check_decoding_once(model)
    check_at_least_one(steps_between_looks=steps_between_looks, max_rows=max_rows)
    plan = plan or DecodePlan.of(model)
    device = next(model.parameters()).device
    if steps_between_looks is None:
        steps_between_looks = 1 if device.type == "cpu" else _STEPS_BETWEEN_LOOKS_ON_GPU
    prompts = Prompts(prompt_ids.to(device), prompt_mask.to(device))
    num_rows = len(prompt_ids) * num_completions
    rows_at_once, positions = _places(
        plan, prompt_mask, params, num_completions, steps_between_looks, max_rows
    )

    def completions(rows_at_once: int) -> Completions:
        buffers = CompletionBuffers(
            params.max_new_tokens, num_rows, params.pad_token_id, device,
            with_values=value_head is not None,
            noise=None if noise is None or params.greedy else noise.to(device),
        )  # fmt: skip
        decoder = Decoder(
            plan,
            buffers,
            steps=params.max_new_tokens,
            steps_between_looks=steps_between_looks,
            max_rows=rows_at_once,
            free_share=_FREE_SHARE,
            room=(min(rows_at_once, num_rows), positions),
            open_step=functools.partial(open_decode_step, cuda_graphs=cuda_graphs),
            value_head=value_head,
            block_cost=None if row_blocks else float("inf"),
        )
        decoder.queue.put(groups_of(prompts, params, num_completions))
        # Inference mode spares each operation its autograd bookkeeping: up to a tenth of the time.
        with torch.inference_mode(), contextlib.closing(decoder):
            while decoder.num_rows:
                decoder.step()
                if on_step is not None:
                    on_step()
        # Outside, since tensors of inference mode could not enter a loss.
        return buffers.completions(
            torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        )

    return with_fewer_rows(completions, rows_at_once, num_completions, on_fewer_rows)


def _places(
    plan: DecodePlan,
    prompt_mask: torch.Tensor,
    params: SamplingParams,
    num_completions: int,
    steps_between_looks: int,
    max_rows: int | None,
) -> tuple[int, int]:
    """(rows that are decoded at once, positions that their cache has)."""
    groups, prompt_len = prompt_mask.shape
    model = plan.model
    if max_rows is None:
        max_rows = row_budget(model, prompt_len + params.max_new_tokens)
        if max_rows is not None and max_rows < groups * num_completions:
            max_rows = row_budget(model, capacity(prompt_len, params, steps_between_looks))
    groups_at_once = groups
    if max_rows is not None:
        groups_at_once = min(groups, max(1, max_rows // num_completions))
    # Rows without stop tokens end together: there is no place before all are free.
    waits = groups_at_once < groups and params.stop_token_ids and plan.shares_prompts
    longest = int(prompt_mask.any(dim=0).sum())
    if waits:
        positions = capacity(longest, params, steps_between_looks)
    else:
        positions = longest + params.max_new_tokens
    return groups_at_once * num_completions, positions


def capacity(prompt_len: int, params: SamplingParams, steps_between_looks: int) -> int:
    """Positions of the cache in which prompts are prefilled: enough for the longest row and for
    padding, so that the cache is rarely shifted."""
    return prompt_len + 2 * params.max_new_tokens + steps_between_looks


def groups_of(prompts: Prompts, params: SamplingParams, num_completions: int) -> list[Group]:
    """The groups of a batch; the rows of group g are `num_completions` from g times that on."""
    n = num_completions
    return [
        Group(prompts, g, length, list(range(g * n, (g + 1) * n)), [params] * n, [0] * n)
        for g, length in enumerate(prompts.mask.sum(dim=1).tolist())
    ]
