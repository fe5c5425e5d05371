"""How large a model is, from its files alone."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path


class TruncatedWeightsError(ValueError):
    """A safetensors file that ends before its tensors do."""


def num_elements(file: Path) -> int:
    """Numbers that a safetensors file holds, by its header.

    Raises:
        TruncatedWeightsError: the file is shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, size))
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _truncated(file, size, 8 + length)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    if size < needed:
        raise _truncated(file, size, needed)
    return sum(math.prod(entry["shape"]) for entry in tensors)


def num_parameters(folder: str | os.PathLike) -> int | None:
    """Parameters of the model in `folder`; None where it holds no safetensors files."""
    files = sorted(Path(folder).expanduser().glob("*.safetensors"))
    return sum(num_elements(file) for file in files) if files else None


def _truncated(file: Path, size: int, needed: int) -> TruncatedWeightsError:
    return TruncatedWeightsError(
        f"truncated={str(file)!r} must have at least {needed} bytes, as its header says: it has "
        f"{size}. Copy it again."
    )
