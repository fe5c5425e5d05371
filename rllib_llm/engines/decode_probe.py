"""Whether a model decodes with a cache as it computes without one, tried on the model itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rllib_llm.engines.decode_step import open_decode_step
from rllib_llm.engines.kv_cache import make_cache
from rllib_llm.engines.prefill import prefill

_PROMPT_LEN, _PADDING = 6, 2
# Share of the logits' spread by which they may differ. Correct models are at 1e-6 in float32 and at
# some hundredths in bfloat16; states that are lost, or that padding enters, give 0.3 to 2.
_TOLERANCE = 0.2


# Says of a model, on the model itself, that it has passed.
_PASSED = "decodes_with_a_cache"


def check_decoding_once(model: nn.Module) -> None:
    """`check_decoding`, at the first call for a model."""
    if not getattr(model, _PASSED, False):
        check_decoding(model)
        setattr(model, _PASSED, True)


@torch.no_grad()
def check_decoding(model: nn.Module) -> None:
    """Two cached steps of two rows, one with padding, against passes without cache or padding; one
    of the rows leaves in between. Costs a few passes over eight tokens.

    Args:
        model: causal LM of transformers in eval mode.

    Raises:
        ValueError: they differ: completions would be those of another model.
    """
    device = next(model.parameters()).device
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(5, 5 + _PROMPT_LEN + 2, device=device) * 7 % vocab
    expected = _without_cache(model, ids)
    for name, logits in _with_cache(model, ids):
        if not bool(expected[name].isfinite().all()):
            return  # of the weights, which is found while sampling
        gap = _spread(logits - expected[name]) / _spread(expected[name]).clamp(min=1e-20)
        # Compared this way round, NaN is refused, too.
        if not bool((gap <= _TOLERANCE).all()):
            raise ValueError(
                f"pretrained_model={type(model).__name__!r} must give the same logits with a cache "
                f"and padding as without: they differ by {float(gap.max()):.2g} of their spread "
                f"({name}). Its state (recurrent layers, perhaps) cannot be decoded in batches "
                "here, so completions would not be the model's. Use a model of attention layers "
                "with engine='torch'."
            )


def _without_cache(model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    whole, shorter = (
        model(input_ids=row.unsqueeze(0), use_cache=False).logits[0, -3:].float()
        for row in (ids, ids[_PADDING:])
    )
    return {
        "prompts": torch.stack([whole[0], shorter[0]]),
        "first step": torch.stack([whole[1], shorter[1]]),
        "second step": shorter[2:],
    }


def _with_cache(model: nn.Module, ids: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits of one step after the other, each looked at before the next one is taken."""
    mask = torch.ones(2, len(ids), dtype=torch.bool, device=ids.device)
    mask[1, :_PADDING] = False
    # Padding that is an ordinary token: the mask alone says that it does not count.
    prompts = ids[:_PROMPT_LEN].where(mask[:, :_PROMPT_LEN], ids[-1])
    cache = make_cache(model.config, 1, len(ids))
    with open_decode_step(model, cache, 2) as step:
        first = prefill(model, None, prompts, mask[:, :_PROMPT_LEN], cache)
        yield "prompts", first.float()
        positions = mask[:, :_PROMPT_LEN].sum(dim=1)
        tokens = ids[_PROMPT_LEN].expand(2)
        second = step(tokens, positions, cache, mask[:, : _PROMPT_LEN + 1])
        yield "first step", second.float()
        # The row without padding leaves; the other takes its place.
        cache.move_rows(positions.new_tensor([1]), positions.new_tensor([0]), 1)
        last = step(ids[-1:], positions[1:] + 1, cache, mask[1:])
        yield "second step", last.float()


def _spread(logits: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row: a number added to all logits changes nothing."""
    return logits.std(dim=-1)
