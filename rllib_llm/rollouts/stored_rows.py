"""Judged completions as rows of the rollout store."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rllib_llm import columns
from rllib_llm.envs.checked_completions import decode_completions
from rllib_llm.envs.sampled_tokens import NO_VERSION
from rllib_llm.rollouts.request import JudgedBatch

ONE_AFTER_THE_OTHER = ("generate_seconds", "judge_seconds")  # timings that follow one another


@dataclass(frozen=True)
class AboutRun:
    """What is the same in all rows of a run."""

    run: str
    env: str
    num_completions: int  # of each prompt
    num_held_out_completions: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    tokenizer: Any = None  # for texts that nobody decoded; None: the ids alone are stored
    vocabulary: str = ""  # a hash of it


def rows_of(
    batch: JudgedBatch, about: AboutRun, *, status: str, reason: str, ended: datetime.datetime
) -> pa.Table:
    """The rows of `batch`, which is on the CPU; a column that it lacks is left out."""
    have = batch.columns
    num_rows = batch.num_rows
    seconds = sum(batch.timings.get(name, 0.0) for name in ONE_AFTER_THE_OTHER)
    constants: dict[str, Any] = {
        "run": about.run,
        "env": about.env,
        "status": status,
        "reason": reason,
        "temperature": about.temperature,
        "top_p": about.top_p,
        "top_k": about.top_k,
        "seed": about.seed,
        "tokenizer": about.vocabulary,
        "started": ended - datetime.timedelta(seconds=seconds),
        "ended": ended,
    }
    rows: dict[str, pa.Array] = {
        name: pa.repeat(pa.scalar(value), num_rows) for name, value in constants.items()
    }
    rows["reward"] = pa.array(batch.rewards.float().numpy())
    rows |= {name: pa.array(have[column].numpy()) for name, column in _SCALARS if column in have}
    if columns.ROW_ID in have:
        is_held_out = status == "evaluated"
        size = about.num_held_out_completions if is_held_out else about.num_completions
        sample = have[columns.ROW_ID] % size
        rows["sample"] = pa.array(sample.int().numpy())
    if columns.FINISHED in have:
        finish = np.where(have[columns.FINISHED].numpy(), "stop", "length")
        rows["finish_reason"] = pa.array(finish, pa.string())
    rows["rewards"] = _by_name(batch.components, num_rows)
    rows["metrics"] = _by_name(batch.metrics, num_rows)
    rows |= _tokens(batch)
    rows |= _texts(batch, about.tokenizer)
    return pa.table(rows)


# Stored column and the batch's column of one number for each row.
_SCALARS = (
    ("position", columns.GROUP),
    ("group", columns.GROUP),
    ("prompt_index", columns.PROMPT_INDEX),
    ("score", columns.SCORES),
    ("valid", columns.VALID),
)
# Of one number for each token.
_PER_TOKEN = (
    ("completion_ids", columns.COMPLETION_IDS),
    ("logprobs", columns.SAMPLER_LOGPROBS),
    ("ref_logprobs", columns.REF_LOGPROBS),
    ("advantages", columns.ADVANTAGES),
)


def _tokens(batch: JudgedBatch) -> dict[str, pa.Array]:
    """The lists of a row, without padding."""
    have = batch.columns
    rows = {}
    if columns.PROMPT_IDS in have:
        rows["prompt_ids"] = _ragged(have[columns.PROMPT_IDS].int(), have[columns.PROMPT_MASK])
    if columns.COMPLETION_MASK not in have:
        return rows
    mask, sampled = have[columns.COMPLETION_MASK], batch.sampled_mask
    for name, column in _PER_TOKEN:
        if column in have:
            values = have[column].expand(mask.shape)
            rows[name] = _ragged(values if values.is_floating_point() else values.int(), mask)
    rows["loss_mask"] = _ragged(sampled, mask)
    rows["tokens"] = pa.array(sampled.sum(dim=1).int().numpy())
    if columns.WEIGHTS_VERSION in have:
        rows["version_spans"] = _spans(have[columns.WEIGHTS_VERSION], mask, sampled)
    return rows


def _ragged(values: Tensor, mask: Tensor) -> pa.ListArray:
    """Of each row the values where `mask` [B, T] is True."""
    return pa.ListArray.from_arrays(_offsets(mask.sum(dim=1)), pa.array(values[mask].numpy()))


def _offsets(lengths: Tensor) -> pa.Array:
    ends = np.concatenate([[0], lengths.numpy().cumsum()])
    return pa.array(ends, pa.int32())


def _spans(versions: Tensor, mask: Tensor, sampled: Tensor) -> pa.ListArray:
    """Of each row the runs {version, start, end} of tokens that the same weights sampled, counted
    from the completion's first token; what nobody sampled lies between them."""
    flat = versions.where(sampled, NO_VERSION)[mask]
    lengths = mask.sum(dim=1)
    rows = torch.repeat_interleave(torch.arange(len(mask)), lengths)
    firsts = lengths.cumsum(0) - lengths
    place = torch.arange(len(flat)) - firsts[rows]
    begins = torch.ones(len(flat), dtype=torch.bool)
    begins[1:] = (flat[1:] != flat[:-1]) | (rows[1:] != rows[:-1])
    start = begins.nonzero().squeeze(1)
    end = torch.cat([start[1:], torch.tensor([len(flat)])])[: len(start)]
    kept = flat[start] != NO_VERSION
    start, end = start[kept], end[kept]
    spans = pa.StructArray.from_arrays(
        [
            pa.array(flat[start].int().numpy()),
            pa.array(place[start].int().numpy()),
            pa.array((place[start] + end - start).int().numpy()),
        ],
        names=["version", "start", "end"],
    )
    counts = torch.bincount(rows[start], minlength=len(mask))
    return pa.ListArray.from_arrays(_offsets(counts), spans)


def _by_name(found: dict[str, Tensor], num_rows: int) -> pa.MapArray:
    """Of each row the numbers by name, those left out that nobody reported (NaN)."""
    names = sorted(found)
    table = torch.zeros(num_rows, 0)
    if names:
        table = torch.stack([found[name].float() for name in names], dim=1)
    known = ~table.isnan()
    keys = np.broadcast_to(np.array(names, dtype=object), (num_rows, len(names)))[known.numpy()]
    return pa.MapArray.from_arrays(
        _offsets(known.sum(dim=1)),
        pa.array(keys, pa.string()),
        pa.array(table[known].numpy(), pa.float32()),
    )


def _texts(batch: JudgedBatch, tokenizer: Any) -> dict[str, pa.Array]:
    """Prompt and completion as text, decoded here unless the environment did."""
    if batch.texts:
        return {name: pa.array(batch.texts[name], pa.string()) for name in ("prompt", "completion")}
    have = batch.columns
    if tokenizer is None or columns.COMPLETION_MASK not in have:
        return {}
    prompts = [ids[mask].tolist() for ids, mask in
               zip(have[columns.PROMPT_IDS], have[columns.PROMPT_MASK], strict=True)]  # fmt: skip
    completions = [
        ids[mask].tolist()
        for ids, mask in zip(
            have[columns.COMPLETION_IDS], have[columns.COMPLETION_MASK], strict=True
        )
    ]
    texts = decode_completions(tokenizer, [ids[-1] for ids in prompts], completions)
    return {
        "prompt": pa.array(_prompt_texts(tokenizer, prompts), pa.string()),
        "completion": pa.array(texts, pa.string()),
    }


def _prompt_texts(tokenizer: Any, prompts: list[list[int]]) -> list[str]:
    """Prompts as text, each decoded once; what a chat template wrote stays, the BOS token that
    encoding adds does not."""
    distinct = {tuple(ids): "" for ids in prompts}
    heads = (tokenizer.bos_token_id,)
    bare = [ids[1:] if ids[:1] == heads else ids for ids in distinct]
    decoded = tokenizer.batch_decode(bare, clean_up_tokenization_spaces=False)
    found = dict(zip(distinct, decoded, strict=True))
    return [found[tuple(ids)] for ids in prompts]
