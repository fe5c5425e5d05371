"""Images of prompts: read, made into tokens and pixels by a model's processor, and kept beside the
columns of a batch. `towers.py` shows them to the model.

    image_row                 [B] int64, which of the batch's images a row shows; -1: none
    image/pixel_values        [images, ...] what the processor made, padded with zeros
    image_shape/pixel_values  [images, dimensions] int64, the shape of each without padding

Rows of a group share theirs: each is there once, and a tower reads it once for all of them.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from rllib_llm.shared.columns import ENVIRONMENT, GROUP, IMAGE_ROW, POSITION, fetched
from rllib_llm.shared.errors import Problems, require

PREFIX, SHAPE = "image/", "image_shape/"
_DATA_URL = "data:image/"
_RULE = "be a file, bytes, a data URL or an image of PIL"


def image_bytes(given: Any) -> bytes:
    """The file of an image: given as bytes, a path, a data URL, or what `datasets.Image` has
    without decoding it ({"bytes", "path"}); of an image of PIL as PNG.

    Raises:
        Problems: it is none of them, or cannot be read. Addresses on a network are not fetched.
    """
    is_undecoded = isinstance(given, Mapping)
    found: Any = given.get("bytes") or given.get("path") if is_undecoded else given
    is_url = isinstance(found, str) and found.startswith(_DATA_URL)
    try:
        if is_url:
            return base64.b64decode(found.partition(",")[2], validate=True)
        if isinstance(found, str | os.PathLike):
            return Path(found).expanduser().read_bytes()
        if hasattr(found, "save"):
            file = io.BytesIO()
            found.save(file, "PNG", compress_level=1)
            return file.getvalue()
    except (OSError, ValueError) as error:
        raise Problems("image", _RULE, str(error), "", ... if is_url else str(found)) from error
    require(isinstance(found, bytes), "image", ..., _RULE, f"it is a {type(found).__name__}")
    return found


def read_image(given: Any) -> Any:
    """An RGB image of PIL, from one, or from what `image_bytes` takes.

    Raises:
        Problems: see there; or it is no image.
    """
    from PIL import Image, UnidentifiedImageError  # few runs need it

    try:
        is_read = isinstance(given, Image.Image)
        found = given if is_read else Image.open(io.BytesIO(image_bytes(given)))
        return found.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        shown = given if isinstance(given, str) and not given.startswith(_DATA_URL) else ...
        raise Problems("image", _RULE, str(error), "", shown) from error


def files_text(images: Sequence[Any]) -> str:
    """The files of images in base64, with spaces between them."""
    return " ".join(base64.b64encode(image_bytes(image)).decode() for image in images)


def files_of(text: str) -> list[bytes]:
    """The files that `files_text` was given."""
    return [*map(base64.b64decode, text.split())]


# Of a prompt, for engines with a processor of their own: the files of its images, one after the
# other, the size of each, and its tokens before images have become any.
OF_FILES = FILES, FILE_SIZES, UNREAD_IDS = "file", "file_sizes", "unread_ids"


def packed_files(files: Sequence[bytes], unread_ids: Sequence[int]) -> dict[str, Tensor]:
    """Files and tokens of a prompt as tensors beside those that a processor makes."""
    return {
        FILES: torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8),
        FILE_SIZES: torch.tensor([*map(len, files)]), UNREAD_IDS: torch.tensor(unread_ids),
    }  # fmt: skip


def unpacked_files(images: Mapping[str, Tensor]) -> tuple[list[bytes], list[int]]:
    """The files and tokens that `packed_files` was given."""
    parts = images[FILES].split(images[FILE_SIZES].tolist())
    return [part.numpy().tobytes() for part in parts], images[UNREAD_IDS].tolist()


def thumbnail(data: bytes, side: int) -> str | None:
    """A data URL of an image, at most `side` pixels wide and high; None of what cannot be read."""
    try:
        small = read_image(data)
    except (Problems, ImportError):
        return None
    small.thumbnail((side, side))
    return f"{_DATA_URL}png;base64,{base64.b64encode(image_bytes(small)).decode()}"


def pad_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Tensors of as many dimensions, padded with zeros to the largest size in each, [rows, ...];
    and their shapes, [rows, dimensions] int64."""
    shapes = torch.tensor([row.shape for row in rows])
    whole = rows[0].new_zeros(len(rows), *shapes.amax(dim=0).tolist())
    for place, row in zip(whole, rows, strict=True):
        place[tuple(slice(size) for size in row.shape)] = row
    return whole, shapes


def image_columns(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The columns of a batch; `rows`: what the processor made of each row's images, {} of none, the
    same object where rows share theirs."""
    shown = {id(row): row for row in rows if row}
    if not shown:
        return {}
    places = {each: place for place, each in enumerate(shown)}
    batch = {IMAGE_ROW: torch.tensor([places.get(id(row), -1) for row in rows])}
    for name in next(iter(shown.values())):
        own = [row[name] for row in shown.values()]
        batch[PREFIX + name], batch[SHAPE + name] = pad_rows(own)
    return batch


def of_rows(seen: Mapping[str, Tensor] | None, rows: Tensor) -> Shown | None:
    """The images of some of a batch's rows; `seen`: the columns of all."""
    if not seen:
        return None
    return images_of({**seen, IMAGE_ROW: seen[IMAGE_ROW].to(rows.device)[rows]})


def is_image(column: str) -> bool:
    """Whether a column of this name has images, each once, and not a number for each row."""
    return column.startswith((PREFIX, SHAPE))


def refuse_images(prompts: Mapping[str, Any]) -> None:
    """Raises Problems for prompts with images, where only token ids are handed on."""
    require(IMAGE_ROW not in prompts, "image", ..., "be left out here",
            "images are read by engine='torch' and 'vllm'", "Leave out engine, or the images")


@dataclass(frozen=True)
class Shown:
    """The images that rows show.

    images: what the processor made of each prompt, by its place in the batch. places: which of them
    each row shows; -1: none. features: what frozen towers made of them, by model and place; passes
    over the same batch share them.
    """

    images: Mapping[int, Mapping[str, Tensor]]
    places: Sequence[int]
    features: WeakIdKeyDictionary

    @classmethod
    def of(cls, images: Mapping[str, Tensor]) -> Shown:
        """The images of a single row."""
        return cls({0: images}, [0], WeakIdKeyDictionary())

    @property
    def twice(self) -> Shown:
        """As many rows again, which show the same."""
        return replace(self, places=[*self.places] * 2)


# What frozen models made of a batch's images, as long as there are both.
_features = WeakIdKeyDictionary()


def image_rows(batch: Mapping[str, Any]) -> list[Mapping[str, Tensor]]:
    """The rows that `image_columns` was given; [] where a batch has no such columns."""
    shown = images_of(batch)
    return [] if shown is None else [shown.images.get(place, {}) for place in shown.places]


def images_of(batch: Mapping[str, Any]) -> Shown | None:
    """The images of a batch; None where all rows are text."""
    if IMAGE_ROW not in batch:
        return None
    places = fetched([batch[IMAGE_ROW]])[0].tolist()
    images: dict[int, dict[str, Tensor]] = {place: {} for place in places if place >= 0}
    if not images:
        return None
    names = [name.removeprefix(PREFIX) for name in batch if name.startswith(PREFIX)]
    for name, shapes in zip(names, fetched([batch[SHAPE + name] for name in names]), strict=True):
        for place, own in images.items():
            own[name] = batch[PREFIX + name][place][tuple(map(slice, shapes[place].tolist()))]
    features = _features.setdefault(batch[PREFIX + names[0]], WeakIdKeyDictionary())
    return Shown(images, places, features)


def with_images(
    batch: Mapping[str, Any], read: Callable[[list[int], int], dict[str, Tensor]]
) -> dict[str, Any]:
    """A batch of completions with what its prompts show, each group's once: samplers and ledgers
    hand on rows alone. `read`: gives the columns of what prompts show that have these positions in
    an environment, of this number."""
    shows = batch.get(IMAGE_ROW)
    if shows is None or not bool((shows >= 0).any()):
        return {name: column for name, column in batch.items() if name != IMAGE_ROW}
    numbers, own = batch.get(ENVIRONMENT, shows * 0), batch.get(POSITION, batch[GROUP])
    both = torch.stack([numbers.long(), own], dim=1)[shows >= 0]
    prompts, places = both.unique(dim=0, return_inverse=True)
    images = [read(prompts[prompts[:, 0] == number, 1].tolist(), number)
              for number in prompts[:, 0].unique().tolist()]  # fmt: skip
    whole = images[0]
    if len(images) > 1:
        whole = image_columns([row for each in images for row in image_rows(each)])
    rows = shows.masked_scatter(shows >= 0, whole.pop(IMAGE_ROW).to(places.device)[places])
    return {**batch, IMAGE_ROW: rows, **whole}


def image_token_id(config: Any) -> int | None:
    """The token in whose places a model puts what it sees; None where it sees nothing."""
    names = ("image_token_id", "image_token_index")
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)
