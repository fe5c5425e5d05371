"""The decode loop: prompts in, completions and their log-probs out, for any HF causal LM.

Each prompt is prefilled once for all its completions. Rows that have ended leave the batch, and
where not all fit at once the next prompts take their places. One uniform per row and token is given
from outside, so a row's tokens are a function of the model, its prompt and its own noise, whatever
batch it is in (up to the round-off of differently shaped matrix products).
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from rllib_llm.engines.check_inputs import check_at_least_one, check_inputs
from rllib_llm.engines.completions import Completions, concatenate
from rllib_llm.engines.continuous import ContinuousDecoder, capacity
from rllib_llm.engines.decode_step import open_decode_step
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.kv_cache import shares_prompts
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.row_budget import row_budget

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
    cuda_graphs: bool = True,
    value_head: nn.Module | None = None,
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
        value_head: of the trunk's last state, its layer as `linear`; then the completions have
            values. The model must be one that `lm_head.take_apart` takes apart.

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
    groups, prompt_len = prompt_ids.shape
    if max_rows is None:
        max_rows = row_budget(model, prompt_len + params.max_new_tokens)
        if max_rows is not None and max_rows < groups * num_completions:
            max_rows = row_budget(model, capacity(prompt_len, params, steps_between_looks))
    groups_at_once = groups if max_rows is None else max(1, max_rows // num_completions)
    noise = None if noise is None or params.greedy else noise.to(device)
    prompt_ids, prompt_mask = prompt_ids.to(device), prompt_mask.to(device)
    open_step = functools.partial(open_decode_step, cuda_graphs=cuda_graphs)
    written = []
    # Inference mode spares each operation its autograd bookkeeping: up to a tenth of the time.
    with torch.inference_mode():
        if groups_at_once < groups and params.stop_token_ids and shares_prompts(model.config):
            waiting = ContinuousDecoder(
                model, prompt_ids, prompt_mask, params, num_completions, noise, groups_at_once,
                open_step, value_head,
            )  # fmt: skip
            waiting.run(steps_between_looks)
            written.append(waiting.buffers)
        else:
            for start in range(0, groups, groups_at_once):
                part = slice(start, start + groups_at_once)
                rows = slice(start * num_completions, (start + groups_at_once) * num_completions)
                decoder = Decoder(
                    model, prompt_mask[part], params, num_completions,
                    None if noise is None else noise[rows], open_step,
                    value_head,
                )  # fmt: skip
                decoder.run(prompt_ids[part], steps_between_looks)
                written.append(decoder.buffers)
    # Outside, since tensors of inference mode could not enter a loss.
    stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
    parts = [buffers.completions(stops) for buffers in written]
    return concatenate(parts, params.pad_token_id)
