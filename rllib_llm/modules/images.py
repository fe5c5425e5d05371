"""Images of prompts: read, made into tokens and pixels by a model's processor, kept as columns of a
batch, and handed to the model.

    image/pixel_values        [rows, ...] what the processor made, padded with zeros
    image_shape/pixel_values  [rows, dimensions] int64, the shape of each row's own
"""

from __future__ import annotations

import base64
import inspect
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllib_llm.shared.errors import Problems, require

PREFIX, SHAPE = "image/", "image_shape/"
_DATA_URL = "data:image/"


def read_image(given: Any) -> Any:
    """An RGB image of PIL, from one, from bytes, a file's path, a data URL, or what
    `datasets.Image` has without decoding it ({"bytes", "path"}).

    Raises:
        Problems: it is none of them, or cannot be read. Addresses on a network are not fetched.
    """
    from PIL import Image, UnidentifiedImageError  # few runs need it

    found = given
    if isinstance(found, Mapping):
        found = found.get("bytes") or found.get("path")
    rule = "be a file, bytes, a data URL or an image of PIL"
    try:
        if isinstance(found, str) and found.startswith(_DATA_URL):
            found = base64.b64decode(found.partition(",")[2], validate=True)
        if isinstance(found, bytes):
            found = Image.open(io.BytesIO(found))
        elif isinstance(found, str | os.PathLike):
            found = Image.open(Path(found).expanduser())
        if not isinstance(found, Image.Image):
            raise Problems("image", rule, f"it is a {type(found).__name__}")
        return found.convert("RGB")
    except (OSError, ValueError, UnidentifiedImageError) as error:
        if isinstance(error, Problems):
            raise
        shown = given if isinstance(given, str) and not given.startswith(_DATA_URL) else ...
        raise Problems("image", rule, str(error), "", shown) from error


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tensors of as many dimensions, padded with zeros to the largest size in each, [rows, ...];
    and their shapes, [rows, dimensions] int64."""
    shapes = torch.tensor([row.shape for row in rows])
    whole = rows[0].new_zeros(len(rows), *shapes.amax(dim=0).tolist())
    for place, row in zip(whole, rows, strict=True):
        place[tuple(slice(size) for size in row.shape)] = row
    return whole, shapes


def image_columns(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The columns of a batch; `rows`: what the processor made of each row's images, {} of none."""
    batch: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        like = next(row[name] for row in rows if name in row)
        none = like.new_zeros(0, *[0] * (like.ndim - 1))
        batch[PREFIX + name], batch[SHAPE + name] = pad_rows([row.get(name, none) for row in rows])
    return batch


def is_image(column: str) -> bool:
    """Whether a column of this name is one of `image_columns`."""
    return column.startswith((PREFIX, SHAPE))


def refuse_images(prompts: Mapping[str, Any]) -> None:
    """Raises Problems for prompts with images, where only token ids are handed on."""
    require(not any(map(is_image, prompts)), "image", ..., "be left out here",
            "images are read by engine='torch' in batches alone",
            "Leave out engine and streaming, or the images")  # fmt: skip


def join(parts: Sequence[Tensor]) -> Tensor:
    """Columns of images of several batches, one after the other."""
    sizes = torch.tensor([part.shape[1:] for part in parts]).amax(dim=0).tolist()
    whole = parts[0].new_zeros(sum(map(len, parts)), *sizes)
    for place, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        filled = (slice(None), *map(slice, part.shape[1:]))
        place[filled] = part
    return whole


def image_rows(batch: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The rows that `image_columns` was given; [] where a batch has no such columns."""
    rows: list[dict[str, Tensor]] = []
    for column in (name for name in batch if name.startswith(PREFIX)):
        name = column.removeprefix(PREFIX)
        rows = rows or [{} for _ in batch[column]]
        shapes = batch[SHAPE + name].tolist()
        for row, tensor, shape in zip(rows, batch[column], shapes, strict=True):
            if shape[0]:
                row[name] = tensor[tuple(slice(size) for size in shape)]
    return rows


def images_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The processor's tensors of all images of a batch, in the order of its rows, as models take
    it; {} where it has none."""
    rows = image_rows(batch)
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        padded, shapes = pad_rows([row[name] for row in rows if name in row])
        found[name] = torch.cat([t[:n] for t, n in zip(padded, shapes[:, 0].tolist(), strict=True)])
    return found


def image_token_id(config: Any) -> int | None:
    """The token in whose places a model puts what it sees; None where it sees nothing."""
    names = ("image_token_id", "image_token_index")
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


def image_inputs(model: Any, input_ids: Tensor, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arguments by which the trunk of a multimodal `model` sees `images`, on the device of
    `input_ids` [rows, length]; padding must not be image tokens."""
    dtype = next(model.parameters()).dtype
    inputs = {
        name: tensor.to(input_ids.device, dtype if tensor.is_floating_point() else None)
        for name, tensor in images.items()
    }
    known = inspect.signature(model.base_model.forward).parameters
    types = (input_ids == image_token_id(model.config)).long()
    return inputs | {n: types for n in ("token_type_ids", "mm_token_type_ids") if n in known}
