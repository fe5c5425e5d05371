"""What an environment may say of the tokens and rows that it was given, checked.

An environment that answers within a completion, as a tool does, says with `loss_mask` in the infos
of `step` which tokens the policy sampled. All else about them has defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rllib_llm.envs.checked_completions import BanditEnvError
from rllib_llm.shared import columns

NO_VERSION = -1  # of a token that no weights sampled
_DTYPES = {
    columns.LOSS_MASK: torch.bool,
    columns.WEIGHTS_VERSION: torch.int32,
    columns.GROUP: torch.int64,
}


def told_columns(
    infos: Mapping[str, Any], completion_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Those of the columns `loss_mask` [B, T] bool, `weights_version` [B, T] int32 and `group` [B]
    int64 that `infos` hold, for completions whose tokens `completion_mask` [B, T] says.

    Raises:
        BanditEnvError: one has another type or shape; a row without a sampled token, or a sampled
            one that does not exist; a version of a token that was not sampled.
    """
    told = {name: infos[name] for name in _DTYPES if name in infos}
    for name, column in told.items():
        _check_tensor(name, column, completion_mask)
    if not told:
        return told
    sampled = told.get(columns.LOSS_MASK, completion_mask)
    where = f"infos[{columns.LOSS_MASK!r}]"
    if (row := _first_row(sampled & ~completion_mask)) is not None:
        raise BanditEnvError(
            f"{where}[{row}]={sampled[row].int().tolist()} must be False where completion_mask is, "
            f"{completion_mask[row].int().tolist()}: the policy sampled only what exists. Combine "
            "it with completion_mask."
        )
    empty = ~sampled.any(1, keepdim=True)
    if (row := _first_row(empty)) is not None:
        raise BanditEnvError(
            f"{where}[{row}]={sampled[row].int().tolist()} must be True somewhere: the score "
            "belongs to the last sampled token. Give such a row infos['valid'] False instead."
        )
    versions = told.get(columns.WEIGHTS_VERSION)
    if versions is not None and bool((versions[~sampled] != NO_VERSION).any()):
        raise BanditEnvError(
            f"infos[{columns.WEIGHTS_VERSION!r}] must be {NO_VERSION} where nothing was sampled: "
            "the age of a batch is counted over sampled tokens. Use "
            f"torch.where(loss_mask, versions, {NO_VERSION})."
        )
    return told


def _check_tensor(name: str, column: Any, completion_mask: torch.Tensor) -> None:
    shape = completion_mask.shape[:1] if name == columns.GROUP else completion_mask.shape
    dtype = _DTYPES[name]
    fits = isinstance(column, torch.Tensor) and column.dtype == dtype and column.shape == shape
    if not fits:
        arrived = type(column).__name__
        if isinstance(column, torch.Tensor):
            arrived = f"{column.dtype}, shape {list(column.shape)}"
        raise BanditEnvError(
            f"infos[{name!r}] of {arrived} must be a torch tensor of {dtype}, shape "
            f"{list(shape)}: it belongs to the completions given to step(). Return such a tensor."
        )


def _first_row(flags: torch.Tensor) -> int | None:
    """The first row with a True in it, None where there is none."""
    rows = flags.any(1)
    return int(rows.int().argmax()) if bool(rows.any()) else None
