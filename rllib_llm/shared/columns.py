"""Every column of a training batch: name, shape, dtype, meaning; and rows of unequal length as one
tensor.

Shapes: B completions (rows), P prompt tokens (left-padded), T completion tokens (right-padded),
N pretraining texts of L tokens. Masks are bool and True where a token counts.

A completion may hold tokens that the policy did not sample: what an environment or a tool said.
`COMPLETION_MASK` says which tokens exist, and so what is attended to, packed and held in memory;
`LOSS_MASK` says which of them the policy sampled, and so what losses, KL, entropy, advantages,
lengths and denominators are taken over (`sampled_mask`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NO_VERSION = -1  # in WEIGHTS_VERSION: no weights sampled the token
UNKNOWN_EXPERT = -1  # in PROMPT_EXPERTS and COMPLETION_EXPERTS: the router may choose

# --- made by the environment and the sampler -------------------------------------------------
PROMPT_IDS = "prompt_ids"  # [B, P] int64, left-padded
PROMPT_MASK = "prompt_mask"  # [B, P] bool
COMPLETION_IDS = "completion_ids"  # [B, T] int64, right-padded
COMPLETION_MASK = "completion_mask"  # [B, T] bool, the token exists; the stop token is inside
LOSS_MASK = "loss_mask"  # [B, T] bool, sampled (absent: all that exist); of texts [N, L]: a target
SAMPLER_LOGPROBS = "sampler_logprobs"  # [B, T] float32, the sampler's own, at its temperature
SAMPLER_VALUES = "sampler_values"  # [B, T] float32, the critic's, where the sampler has it
REF_LOGPROBS = "ref_logprobs"  # [B, T] float32, the frozen reference's
SCORES = "scores"  # [B] float32, what the judge says, before any KL share
REWARDS = "rewards"  # [B, T] float32, what of the score was earned at a turn, at its last token
REWARD_PART = "reward_part/"  # before a name: [B] float32, NaN where this reward does not judge it
REWARD_WEIGHT = "reward_weight/"  # before a name: [B] float32, of this reward in the score
VALID = "valid"  # [B] bool, False where the judge failed: the row must not be learnt from
FINISHED = "finished"  # [B] bool, True where a stop token ended the completion
PROMPT_INDEX = "prompt_index"  # [B] int64, the prompt's row in its data set
IMAGE_ROW = "image_row"  # [B] int64, which of the batch's images its prompt shows; -1: none
ROW_ID = "row_id"  # [B] int64, prompt position * completions per prompt + place in the group
GROUP = "group"  # [B] int64, the prompt's position: rows alike in it are completions of one prompt
POSITION = "position"  # [B] int64, of several environments: the prompt's position in its own
FROM_DATA = "from_data"  # [B] bool, True where a data set has the completion, not the policy
REPLICA = "replica"  # [B] int32, of the environment that judged the row: its sampler's number
ENVIRONMENT = "environment"  # [B] int32, of several: the number of the row's in `envs`
ROW_WEIGHT = "row_weight"  # [B] float32, share of its rollout: rows alike in ROW_ID sum to 1
TEMPERATURE = "temperature"  # [B] float32, of the row's environment, where those differ
WEIGHTS_VERSION = "weights_version"  # [B, T] int32, of the weights that sampled it; -1: none did
# Of a mixture of experts with routing_replay: the experts that the sampler chose, k of each layer.
PROMPT_EXPERTS = "prompt_experts"  # [B, P, layers * k] int16, left-padded; -1: unknown
COMPLETION_EXPERTS = "completion_experts"  # [B, T, layers * k] int16; -1: unknown

# --- metrics of the environment that count over all rows, also those that were not judged -------
FAILED = "_failed"  # after the name of a reward function: 1 where it failed
PROMPT_TRUNCATED = "prompt_truncated"  # 1 where a prompt lost its beginning

# --- among the texts of a batch: the files of what each row's prompt shows, in base64
IMAGES = "image_files"

# --- of a teacher: its prompts, and where the environment has it what it says -----------------
TEACHER_PROMPT_IDS = "teacher_prompt_ids"  # [B, Q] int64, left-padded, what a teacher reads instead
TEACHER_PROMPT_MASK = "teacher_prompt_mask"  # [B, Q] bool
TEACHER_PROMPTS = {TEACHER_PROMPT_IDS: PROMPT_IDS, TEACHER_PROMPT_MASK: PROMPT_MASK}
TEACHER_LOGPROBS = "teacher_logprobs"  # [B, T] float32, of the sampled tokens
TEACHER_TOP_IDS = "teacher_top_ids"  # [B, T, K] int32, its likeliest tokens, from the likeliest on
TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"  # [B, T, K] float32, -inf where it named fewer

# --- made by the learner, once per update ----------------------------------------------------
OLD_LOGPROBS = "old_logprobs"  # [B, T] float32, of the policy before the update
OLD_VALUES = "old_values"  # [B, T] float32, of the critic before the update
ADVANTAGES = "advantages"  # [B, T] float32
RETURNS = "returns"  # [B, T] float32, targets of the critic

# --- forward pass of the policy being trained ------------------------------------------------
LOGPROBS = "logprobs"  # [B, T] float32
ENTROPY = "entropy"  # [B, T] float32, nats
VALUES = "values"  # [B, T] float32
FULL_KL = "full_kl"  # [B, T] float32, exact KL from the reference, nats
DIVERGENCE = "divergence"  # [B, T] float32, from the teacher, nats
TEACHER_KL = "teacher_kl"  # [B, T] float32, exact KL from the teacher, nats, without gradient
TEACHER_AGREES = "teacher_agrees"  # [B, T] float32, 1 where both like the same token best
ROUTER_AUX_LOSS = "router_aux_loss"  # scalar float32, how unevenly routers spread the tokens
COMPUTED_AND_PADDING = "computed_and_padding"  # [2] float32: tokens through the trunk, idle ones

# --- texts: supervised fine-tuning and the pretraining share of PPO-ptx ----------------------
INPUT_IDS = "input_ids"  # [N, L] int64, right-padded
ATTENTION_MASK = "attention_mask"  # [N, L] bool
TEXT_LOGPROBS = "text_logprobs"  # [N, L] float32, 0 where the loss mask is False

# --- preference pairs ------------------------------------------------------------------------
# Of a reward model whole texts; of a policy what follows the prompts, which stand in `prompt_ids`.
CHOSEN_IDS = "chosen_ids"  # [N, L] int64, right-padded
CHOSEN_MASK = "chosen_mask"  # [N, L] bool
REJECTED_IDS = "rejected_ids"  # [N, L] int64, right-padded
REJECTED_MASK = "rejected_mask"  # [N, L] bool
# Of pairs whose answers hold tokens that the policy did not sample (a tool's): those that it did.
CHOSEN_LOSS_MASK = "chosen_loss_mask"  # [N, L] bool
REJECTED_LOSS_MASK = "rejected_loss_mask"  # [N, L] bool
CHOSEN_LOGPROBS = "chosen_logprobs"  # [N] float32, sums over the completion's tokens
REJECTED_LOGPROBS = "rejected_logprobs"  # [N] float32
REF_CHOSEN_LOGPROBS = "ref_chosen_logprobs"  # [N] float32, the frozen reference's
REF_REJECTED_LOGPROBS = "ref_rejected_logprobs"  # [N] float32


_ON_HOST = "rllib_llm_on_host"  # a tensor's attribute, which no tensor computed from it has


def remember(column: Tensor, on_host: Tensor) -> Tensor:
    """`column`, for which `fetched` gives `on_host`, the same numbers, from now on: lengths and
    layouts of rows are computed from them without waiting for the column's device."""
    if column.device.type != "cpu":
        setattr(column, _ON_HOST, on_host)
    return column


def same_cut(column: Tensor, cut: Callable[[Tensor], Tensor]) -> Tensor:
    """`cut(column)`, a choice of rows or columns, remembered where the column is."""
    part = cut(column)
    return remember(part, cut(getattr(column, _ON_HOST))) if hasattr(column, _ON_HOST) else part


def moved(column: Tensor, device: torch.device | str) -> Tensor:
    """A column that lies on the host, on `device`, and remembered; nothing is waited for."""
    return remember(column.to(device, non_blocking=True), column)


def on_host(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All ids, masks and columns of one number a row on the host; a device is waited for once, or
    not if they are remembered."""
    names = [n for n, column in batch.items() if not column.is_floating_point() or column.ndim == 1]
    return dict(zip(names, fetched([batch[name] for name in names]), strict=True))


def remember_all(batch: Mapping[str, Tensor]) -> None:
    """Remembers what `on_host` gives."""
    for name, column in on_host(batch).items():
        remember(batch[name], column)


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host; a device is waited for once, unless all are remembered."""
    found = [getattr(tensor, _ON_HOST, tensor) for tensor in tensors]
    remote = [i for i, tensor in enumerate(found) if tensor.device.type != "cpu"]
    if remote:
        parts = [found[i].contiguous().flatten().view(torch.uint8) for i in remote]
        raw = torch.cat(parts).cpu().split([part.numel() for part in parts])
        for i, part in zip(remote, raw, strict=True):
            found[i] = part.clone().view(found[i].dtype).view(found[i].shape)
    return found


def written_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Which completion tokens the policy sampled, learnt from or not, [B, T] bool: lengths are
    counted over them. Others have no weights version."""
    mask = sampled_mask(batch)
    if LOSS_MASK not in batch or WEIGHTS_VERSION not in batch:
        return mask
    versions = batch[WEIGHTS_VERSION]
    return mask | (versions >= 0) if versions.shape == mask.shape else mask


def sampled_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Which completion tokens the policy sampled and learns from, [B, T] bool.

    The loss mask where there is one, else every token that exists. In a batch that holds texts
    beside completions the loss mask is the texts'.
    """
    if LOSS_MASK in batch and INPUT_IDS not in batch:
        return batch[LOSS_MASK]
    return batch[COMPLETION_MASK]


def pad_right(
    rows: Sequence[Sequence[Any]], filler: float, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor]:
    """The rows as [rows, longest] `dtype`, padded with `filler` on the right, and the mask [rows,
    longest] bool of real elements."""
    return _padded(rows, filler, dtype, left=False)


def pad_left(rows: Sequence[Sequence[Any]], filler: float) -> tuple[Tensor, Tensor]:
    """As `pad_right` of int64, `filler` before the shorter ones."""
    return _padded(rows, filler, torch.int64, left=True)


def teacher_prompt_columns(prompts: Sequence[Sequence[int]], pad: float) -> dict[str, Tensor]:
    """`TEACHER_PROMPT_IDS` and `TEACHER_PROMPT_MASK` of rows of token ids; `pad`: a token's id."""
    ids, mask = pad_left(prompts, pad)
    return {TEACHER_PROMPT_IDS: ids, TEACHER_PROMPT_MASK: mask}


def expert_columns(
    rows: Sequence[Tensor | None], prompt_lengths: Sequence[int], widths: tuple[int, int]
) -> dict[str, Tensor]:
    """`PROMPT_EXPERTS` and `COMPLETION_EXPERTS`; {} where no experts are known.

    Args:
        rows: [positions, layers * k] int16 of each row, from its prompt's first token on.
        prompt_lengths: tokens of each prompt.
        widths: columns of prompts and of completions.
    """
    known = next((row for row in rows if row is not None), None)
    if known is None:
        return {}
    whole = known.new_full((len(rows), sum(widths), known.shape[1]), UNKNOWN_EXPERT)
    for line, row, length in zip(whole, rows, prompt_lengths, strict=True):
        if row is not None:
            place = line[widths[0] - length :]
            place[: len(row)] = row[: len(place)]
    return dict(
        zip((PROMPT_EXPERTS, COMPLETION_EXPERTS), whole.split(list(widths), dim=1), strict=True)
    )


def widen(tensor: Tensor, length: int, filler: float = 0, *, left: bool = False) -> Tensor:
    """`tensor` [rows, L] as [rows, length], `filler` after or before its values."""
    missing = length - tensor.shape[1]
    if not missing:
        return tensor
    more = (missing, 0) if left else (0, missing)
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + more, value=filler)


def _padded(
    rows: Sequence[Sequence[Any]], filler: float, dtype: torch.dtype, left: bool
) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64).unsqueeze(1)
    longest = max(map(len, rows), default=0)
    place = torch.arange(longest)
    mask = place >= longest - lengths if left else place < lengths
    values = torch.full(mask.shape, filler, dtype=dtype)
    values[mask] = torch.tensor([value for row in rows for value in row], dtype=dtype)
    return values, mask
