"""The images of prompts as a model sees them: its tower reads each prompt's once, and its decoder
has the result in the places of their tokens."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rllib_llm.modules.images import OF_FILES, Shown, image_token_id, pad_rows
from rllib_llm.modules.multimodal import heads, text_decoder
from rllib_llm.modules.packing import TokenRows, WantedTokens, pack
from rllib_llm.modules.shards import local_data
from rllib_llm.shared.errors import require

# What stands in the places of an image's tokens, and what Qwen3-VL adds behind layers.
_OF_TOWERS = ("pooler_output", "deepstack_features")


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other, padded with zeros to the largest size in each further dimension."""
    padded, shapes = pad_rows(parts)
    return torch.cat([part[:n] for part, n in zip(padded, shapes[:, 0].tolist(), strict=True)])


def _split(found: Any, sizes: list[int]) -> list[Any]:
    """Cuts what a tower gives of several prompts, one after the other: tensors of tokens, or lists
    of one for each image."""
    if isinstance(found, Tensor):
        require(sum(sizes) == found[..., 0].numel(), "image", f"of {found[..., 0].numel()} tokens",
                f"be shown by as many tokens of the prompt, not {sum(sizes)}")  # fmt: skip
        return [*found.flatten(0, -2).split(sizes)]
    if not isinstance(found, list | tuple) or not found:
        return [found] * len(sizes)
    if all(isinstance(each, Tensor) for each in found):
        return [[part] for part in _split(torch.cat([t.flatten(0, -2) for t in found]), sizes)]
    return [*zip(*(_split(each, sizes) for each in found), strict=True)]


def _together(parts: Sequence[Any]) -> Any:
    """Joins the parts of prompts as a tower would give them; the inverse of `_split`."""
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts])
    if not isinstance(parts[0], list | tuple):
        return parts[0]
    return [_together(own) for own in zip(*parts, strict=True)]


class _Tower:
    """In the place of a model's `get_image_features`: reads each prompt's images once, and in a
    batch once where it is frozen.

    order: places of what rows show. num_tokens: of each of these prompts' images, by its place.
    inputs: the tensors of given places.
    """

    def __init__(
        self, model: Any, features: WeakIdKeyDictionary, order: Sequence[int],
        num_tokens: Mapping[int, int], inputs: Callable[[Sequence[int]], Mapping[str, Tensor]],
    ) -> None:  # fmt: skip
        self._own, self._order = model.base_model.get_image_features, order
        self._num_tokens, self._inputs = num_tokens, inputs
        kept = {p for part in (text_decoder(model), *heads(model)) for p in part.parameters()}
        own = [p for p in model.parameters() if p not in kept]
        # All learners, or none, must call one whose layers are spread over them.
        self._is_fixed = not any(p.requires_grad or local_data(p) is not p for p in own)
        self._known = features.setdefault(model, {}) if self._is_fixed else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self._own).bind(*args, **kwargs).arguments
        further = given.pop("kwargs", {})
        if new := [place for place in self._num_tokens if place not in self._known]:
            tensors = self._inputs(new)
            given |= {name: tensors[name] for name in given if name in tensors}
            with torch.no_grad() if self._is_fixed else contextlib.nullcontext():
                made = self._own(**given, **further)
            sizes = [self._num_tokens[place] for place in new]
            fields = (getattr(made, name, None) for name in _OF_TOWERS)
            self._known.update(zip(new, _split([*fields], sizes), strict=True))
        found = _together([self._known[place] for place in self._order])
        return SimpleNamespace(**dict(zip(_OF_TOWERS, found, strict=True)))


@contextlib.contextmanager
def seeing(
    model: Any, input_ids: Tensor, is_text: Tensor, shown: Shown
) -> Iterator[dict[str, Tensor]]:
    """Gives the arguments by which `model.base_model` sees what rows show, in this block.

    input_ids: [rows, length]. is_text: bool, tokens of images that were said, not shown, and
    padding. The decoder reads them as any other, in the place of the filler that the model around
    it is given.
    """
    around, image, device = model.base_model, image_token_id(model.config), input_ids.device
    shows = torch.tensor([place >= 0 for place in shown.places], device=device).unsqueeze(1)
    is_text = is_text | (input_ids == image) & ~shows
    ids = input_ids.masked_fill(is_text, int(image == 0))
    is_image = ids == image
    counts = zip(shown.places, is_image.sum(dim=1).tolist(), strict=True)
    pairs = [(place, num) for place, num in counts if num]  # rows of failures have no prompt
    order, num_tokens = [place for place, _ in pairs], dict(pairs)
    dtype = next(model.parameters()).dtype

    def inputs(places: Sequence[int]) -> dict[str, Tensor]:
        joined = {name: _joined([shown.images[place][name] for place in places])
                  for name in shown.images[places[0]] if name not in OF_FILES}  # fmt: skip
        return {
            name: tensor.to(device, dtype if tensor.is_floating_point() else None)
            for name, tensor in joined.items()
        }

    def read_said(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = model.get_input_embeddings()(input_ids)
        embeddings = kwargs["inputs_embeds"].where(~is_text.unsqueeze(-1), own)
        return args, {**kwargs, "inputs_embeds": embeddings}

    known = inspect.signature(around.forward).parameters
    types = {n: is_image.long() for n in ("token_type_ids", "mm_token_type_ids") if n in known}
    hook = text_decoder(model).register_forward_pre_hook(read_said, with_kwargs=True)
    around.get_image_features = _Tower(model, shown.features, order, num_tokens, inputs)
    try:
        yield {"input_ids": ids, **(inputs(order) if order else {}), **types}
    finally:
        hook.remove()
        del around.get_image_features


def seen_hidden(model: Any, rows: TokenRows) -> tuple[WantedTokens, Tensor]:
    """Last hidden states [tokens, hidden] at the positions that predict the wanted tokens of rows
    with images, by the model around the decoder. Tokens of images stand in prompts; those that are
    wanted, or behind a prompt, were said."""
    assert rows.shown is not None, "there are images"
    device, image = next(model.parameters()).device, image_token_id(model.config)
    wanted = pack(rows, device)
    ids = wanted.input_ids
    place = torch.arange(ids.shape[1], device=device)
    is_text = place >= rows.attended.sum(dim=1, keepdim=True).to(device)
    is_text.view(-1)[wanted.predicted_at[wanted.targets == image] + 1] = True
    if rows.num_leading:
        num_leading = rows.attended[:, : rows.num_leading].sum(dim=1, keepdim=True).to(device)
        is_text |= (ids == image) & (place >= num_leading)
    with seeing(model, ids, is_text, rows.shown) as inputs:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    return wanted, wanted.pick(hidden)
