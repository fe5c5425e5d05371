"""Rollouts as the arrays that a trainer of one's own takes: padded, or packed to a length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rllib_llm.shared.errors import require

EXAMPLE_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),  # prompt and completion; 0 behind the last
        ("position_ids", pa.list_(pa.int32())),  # from 0 on in each rollout
        ("segment_ids", pa.list_(pa.int32())),  # the rollout of the row, from 1 on; 0: padding
        # A sampled token's advantage, 1 where the rollout was not trained on; 0 of other tokens.
        ("loss_weights", pa.list_(pa.float32())),
        ("policy_logprobs", pa.list_(pa.float32())),  # the sampler's, nats; 0 of other tokens
        ("reference_logprobs", pa.list_(pa.float32())),  # likewise; 0 where there is no reference
    ]
)


def training_examples(rollouts: pa.Table, length: int | None = None) -> pa.Table:
    """Rows of `EXAMPLE_SCHEMA` from rollouts: one for each, padded on the right to the longest, or
    of `length` tokens each, into which rollouts are packed in their order, as many as fit.

    Raises:
        Problems: a rollout is longer than `length`.
    """
    examples = [_example(row) for row in rollouts.to_pylist()]
    longest = max((len(example["input_ids"]) for example in examples), default=0)
    require(length is None or longest <= length, "--length", length,
            f"be at least {longest}", "the longest rollout has so many tokens",
            "Raise it, or leave rollouts out with --where")  # fmt: skip
    packs = [[example] for example in examples] if length is None else _packed(examples, length)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in EXAMPLE_SCHEMA.names}
    for pack in packs:
        for number, example in enumerate(pack, 1):
            example["segment_ids"] = np.full(len(example["input_ids"]), number)
        for name, rows in columns.items():
            whole = np.concatenate([example[name] for example in pack])
            rows.append(np.pad(whole, (0, (length or longest) - len(whole))))
    return pa.table(columns, schema=EXAMPLE_SCHEMA)


def _example(row: dict[str, Any]) -> dict[str, np.ndarray]:
    prompt, completion = row["prompt_ids"], row["completion_ids"]
    is_sampled = np.array(row["loss_mask"] or [True] * len(completion), dtype=np.float32)

    def of_completion(values: list[float] | None, otherwise: float) -> np.ndarray:
        known = np.full(len(completion), otherwise) if values is None else np.array(values)
        # What nobody sampled may have NaN.
        of_sampled = np.where(is_sampled > 0, known, 0.0)
        return np.concatenate([np.zeros(len(prompt)), of_sampled])

    return {
        "input_ids": np.array([*prompt, *completion]),
        "position_ids": np.arange(len(prompt) + len(completion)),
        "loss_weights": of_completion(row["advantages"], 1.0),
        "policy_logprobs": of_completion(row["logprobs"], 0.0),
        "reference_logprobs": of_completion(row["ref_logprobs"], 0.0),
    }


def _packed(examples: list[dict[str, Any]], length: int) -> Iterator[list[dict[str, Any]]]:
    pack: list[dict[str, Any]] = []
    room = length
    for example in examples:
        if pack and len(example["input_ids"]) > room:
            yield pack
            pack, room = [], length
        pack.append(example)
        room -= len(example["input_ids"])
    if pack:
        yield pack
