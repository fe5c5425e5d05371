"""The decode loop: prompts in, completions and their log-probs out, for any HF causal LM.

Each prompt is prefilled once for all its completions. Rows that have ended leave the batch, and
where not all fit at once the next prompts take their places. One uniform per row and token is given
from outside, so a row's tokens are a function of the model, its prompt and its own noise, whatever
batch it is in (up to the round-off of differently shaped matrix products).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers.cache_utils import get_layer_types_and_kwargs

from rllib_llm.engines.batch_rows import PromptGroup
from rllib_llm.engines.decode_step import (
    DecodePlan,
    check_positions,
    check_tokens,
    open_decode_step,
    prefill,
)
from rllib_llm.engines.decoder import Decoder
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Completions
from rllib_llm.engines.row_blocks import row_budget
from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.routers import fixed_experts
from rllib_llm.shared.columns import expert_columns
from rllib_llm.shared.errors import Problems, report, require, warning
from rllib_llm.shared.messages import blamed_on

# Prompts are let in when this share of the places is free: a prefill of a few is poorly used.
_FREE_SHARE = 0.25


def generate(
    model: nn.Module, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, params: SamplingParams,
    *, num_completions: int = 1, noise: torch.Tensor | None = None,
    steps_between_looks: int | None = None, max_rows: int | None = None, cuda_graphs: bool = True,
    row_blocks: bool = True, value_head: nn.Module | None = None,
    on_step: Callable[[], None] | None = None, on_fewer_rows: Callable[[int], None] | None = None,
    plan: DecodePlan | None = None, images: Sequence[Mapping[str, torch.Tensor]] = (),
) -> Completions:  # fmt: skip
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
        images: of each prompt, as the model takes them; {} of one without.

    Raises:
        ValueError: inputs that do not fit each other, a prompt without tokens, more positions than
            the model has, or a model that cannot be decoded here: that is tried at its first call.
        FloatingPointError: the model's logits are not finite.
    """
    assert num_completions >= 1 and steps_between_looks != 0 and max_rows != 0
    # Environments of users give the prompts.
    require(prompt_ids.ndim == 2 and prompt_ids.shape == prompt_mask.shape and prompt_ids.numel()
            and prompt_mask.dtype == torch.bool, "prompt_ids", tuple(prompt_ids.shape),
            f"be [groups, prompt_len], as the bool prompt_mask={tuple(prompt_mask.shape)}"
            )  # fmt: skip
    require(
        prompt_mask[:, -1].all() and (prompt_mask.long().diff(dim=1) >= 0).all(), "prompt_mask",
        ..., "be left-padded, with a token in its last column",
    )  # fmt: skip
    assert not any(part.training for part in model.modules()), "dropout would change the log-probs"
    if not params.greedy:
        rows, most = len(prompt_ids) * num_completions, params.max_new_tokens
        assert noise is not None and noise.ndim == 2, "noise: a uniform per completion and token"
        assert len(noise) == rows and noise.shape[1] >= most, (noise.shape, rows, most)
    check_positions(model.config, int(prompt_mask.sum(dim=1).max()), params)
    check_tokens(model.config, (), params)
    check_decoding(model)
    plan = plan or DecodePlan.of(model)
    device = next(model.parameters()).device
    steps_between_looks = steps_between_looks or plan.steps_between_looks
    require(not images or plan.shares_prompts, "images", ..., "be left out for this model",
            "the cache of its layers holds no prompt for several rows")  # fmt: skip
    n = num_completions
    num_rows = len(prompt_ids) * n
    rows_at_once, positions = _places(
        plan, prompt_mask, params, num_completions, steps_between_looks, max_rows
    )
    decoder = Decoder(
        plan, steps=params.max_new_tokens, steps_between_looks=steps_between_looks,
        max_rows=rows_at_once, free_share=_FREE_SHARE,
        room=(min(rows_at_once, num_rows), positions),
        open_step=functools.partial(open_decode_step, cuda_graphs=cuda_graphs),
        value_head=value_head, block_cost=None if row_blocks else float("inf"),
        on_fewer_rows=on_fewer_rows and (lambda rows: on_fewer_rows(rows // n * n or n)),
    )  # fmt: skip
    put_batch(
        decoder, prompt_ids.to(device), prompt_mask, params, num_completions, noise, images
    )
    # Inference mode spares each operation its autograd bookkeeping: up to a tenth of the time.
    with torch.inference_mode(), contextlib.closing(decoder):
        while decoder.num_rows:
            decoder.step()
            if on_step is not None:
                on_step()
    # Outside, since tensors of inference mode could not enter a loss.
    made = decoder.buffers.completions(params)
    if plan.keeps_experts:
        made.experts = expert_columns(
            [decoder.experts[i] for i in range(num_rows)],
            prompt_mask.sum(dim=1).repeat_interleave(n).tolist(),
            (prompt_mask.shape[1], made.completion_ids.shape[1]),
        )
    return made


def put_batch(
    decoder: Decoder, ids: torch.Tensor, mask: torch.Tensor, params: SamplingParams,
    num_completions: int, noise: torch.Tensor | None,
    images: Sequence[Mapping[str, torch.Tensor]] = (),
) -> None:  # fmt: skip
    """Puts a batch of left-padded prompts into a decoder that is empty; the rows of group g are
    `num_completions` columns from g times that on."""
    n = num_completions
    columns = decoder.reserve(len(ids) * n, params.max_new_tokens)
    decoder.buffers.begin(columns, None if params.greedy else noise)
    decoder.put([
        PromptGroup(prompt[-length:], columns[g * n : (g + 1) * n], [params] * n, [0] * n,
                    images=images[g] if images else {})
        for g, (prompt, length) in enumerate(zip(ids, mask.sum(dim=1).tolist(), strict=True))
    ])  # fmt: skip


def _places(
    plan: DecodePlan, prompt_mask: torch.Tensor, params: SamplingParams, num_completions: int,
    steps_between_looks: int, max_rows: int | None,
) -> tuple[int, int]:  # fmt: skip
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


# --- Whether a model decodes with a cache as it computes without one, tried on the model itself

_PROMPT_LEN, _PADDING = 6, 2
# Share of the logits' spread by which they may differ, by dtype. Of 150 architectures (two layers)
# those that are right are at 2e-6 at most in float32, 16 roundings, which grows with the layers at
# most in proportion: 1e-4 for a hundred. Those that are wrong (positions offset by padding, a lost
# state) are at 9e-3 to 2. In 16 bits models that are right are at some hundredths.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_TOLERANCE_OF_HALF = 0.2
# Layers whose attention looks at the tokens that an indexer ranks highest.
_CHOOSING_LAYERS = {"indexed_attention", "compressed_sparse_attention", "minimax_m3_sparse"}


# Says of a model, on the model itself, that it has passed.
_PASSED = "decodes_with_a_cache"


@torch.no_grad()
def check_decoding(model: nn.Module) -> None:
    """Two cached steps of two rows, one with padding, against passes without cache or padding; one
    of the rows leaves in between. Costs a few passes over eight tokens, at the first call.

    Args:
        model: causal LM of transformers in eval mode.

    Warns where roundings of 16 bits choose what layers look at.

    Raises:
        Problems: they differ, so that completions would be those of another model, or the model
            cannot make them.
    """
    if getattr(model, _PASSED, False):
        return
    weight, vocab = next(model.parameters()), text_config(model).vocab_size
    tolerance = _TOLERANCE.get(weight.dtype, _TOLERANCE_OF_HALF)
    if torch.get_float32_matmul_precision() != "highest":  # TF32, or less
        tolerance = _TOLERANCE_OF_HALF
    ids = torch.arange(5, 5 + _PROMPT_LEN + 2, device=weight.device) * 7 % vocab
    name, rule = type(model).__name__, "give the same logits with a cache and padding as without"
    remedy = "Use another model, or engine='vllm' where that serves it"
    is_half = weight.dtype.itemsize < 4  # where roundings would choose experts
    with (
        blamed_on("model", name, rule, remedy=remedy),
        fixed_experts(model) if is_half else contextlib.nullcontext(),
    ):
        whole, shorter = (
            model(input_ids=row.unsqueeze(0), use_cache=False).logits[0, -3:].float()
            for row in (ids, ids[_PADDING:])
        )
        expected = {
            "prompts": torch.stack([whole[0], shorter[0]]),
            "first step": torch.stack([whole[1], shorter[1]]),
            "second step": shorter[2:],
        }
        for step, logits in _with_cache(model, ids):
            if not bool(expected[step].isfinite().all()):
                break  # of the weights, which is found while sampling
            gap = _spread(logits - expected[step]) / _spread(expected[step]).clamp(min=1e-20)
            if not bool((gap <= tolerance).all()):  # this way round, NaN is refused, too
                reason = f"they differ by {float(gap.max()):.2g} of their spread ({step})"
                raise Problems("model", rule, reason, remedy, name)
    chosen = _CHOOSING_LAYERS.intersection(get_layer_types_and_kwargs(text_config(model))[0])
    if chosen and is_half:
        report([warning(
            "model", f"be computed in float32 (it has {min(chosen)} layers)", "which tokens such a "
            "layer looks at turns on roundings: in 16 bits log-probs of sampler and learner may "
            "differ by nats where rows are longer than what it looks at", "Set dtype='float32' "
            "without mixed_precision, or an off_policy correction", name,
        )])  # fmt: skip
    setattr(model, _PASSED, True)


def _with_cache(model: nn.Module, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits of one step after the other, each looked at before the next one is taken."""
    mask = torch.ones(2, len(ids), dtype=torch.bool, device=ids.device)
    mask[1, :_PADDING] = False
    # Padding that is an ordinary token: the mask alone says that it does not count.
    prompts = ids[:_PROMPT_LEN].where(mask[:, :_PROMPT_LEN], ids[-1])
    plan = DecodePlan.of(model)
    cache = plan.make_cache(len(ids))
    step = open_decode_step(plan, 2)
    first = prefill(model, None, prompts, mask[:, :_PROMPT_LEN], cache)
    yield "prompts", first.float()
    positions = mask[:, :_PROMPT_LEN].sum(dim=1)
    tokens = ids[_PROMPT_LEN].expand(2)
    second = step(tokens, positions, [(cache, mask[:, : _PROMPT_LEN + 1])], None)
    yield "first step", second.float()
    # The row without padding leaves; the other takes its place.
    cache.move_rows(positions.new_tensor([1]), positions.new_tensor([0]), 1)
    last = step(ids[-1:], positions[1:] + 1, [(cache, mask[1:])], None)
    yield "second step", last.float()


def _spread(logits: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row: a number added to all logits changes nothing."""
    return logits.std(dim=-1)
