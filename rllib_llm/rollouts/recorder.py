"""Records the outcome of every prompt group: in the rollout store, if there is one, and sample
texts as JSON rows in the trial's samples.jsonl."""

from __future__ import annotations

import datetime
import functools
import json
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rllib_llm.data.rollout_store import RolloutStore
from rllib_llm.envs.actions import decode_completions
from rllib_llm.modules.images import files_of
from rllib_llm.rollouts.judged_batch import JudgedBatch
from rllib_llm.shared import columns
from rllib_llm.shared.columns import NO_VERSION
from rllib_llm.shared.storage import BestEffort, keep_json_rows

ONE_AFTER_THE_OTHER = ("generate_seconds", "judge_seconds")  # timings that follow one another


@dataclass(frozen=True)
class AboutRun:
    """Values that are equal in all rows of a run."""

    run: str
    env: str
    num_completions: int  # of each prompt
    num_held_out_completions: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    tokenizer: Any = None  # for texts that were not decoded; None: the ids alone are stored
    vocabulary: str = ""  # a hash of it
    of_envs: tuple[Mapping[str, Any], ...] = ()  # those of each of several environments instead


def rows_of(
    batch: JudgedBatch, about: AboutRun, *, status: str, reason: str, ended: datetime.datetime,
    keep: Callable[[bytes], str] | None = None,
) -> pa.Table:  # fmt: skip
    """The rows of `batch`, which is on the CPU; a column that it lacks is left out. `keep`: stores
    the file of an image and returns its name."""
    have = batch.columns
    num_rows = batch.num_rows
    seconds = sum(batch.timings.get(name, 0.0) for name in ONE_AFTER_THE_OTHER)
    constants: dict[str, Any] = {
        **{name: getattr(about, name) for name in _OF_RUN},
        "status": status,
        "reason": reason,
        "tokenizer": about.vocabulary,
        "started": ended - datetime.timedelta(seconds=seconds),
        "ended": ended,
    }
    rows: dict[str, pa.Array] = {
        name: pa.repeat(pa.scalar(value), num_rows) for name, value in constants.items()
    }
    if columns.ENVIRONMENT in have and about.of_envs:
        own = [about.of_envs[i] for i in have[columns.ENVIRONMENT].tolist()]
        for name in about.of_envs[0]:
            rows[name] = pa.array([each[name] for each in own])
    rows["reward"] = pa.array(batch.rewards.float().numpy())
    rows |= {name: pa.array(have[column].numpy()) for name, column in _SCALARS if column in have}
    if columns.ROW_ID in have:
        is_held_out = status == "evaluated"
        size = about.num_held_out_completions if is_held_out else about.num_completions
        sample = have[columns.ROW_ID] % size
        rows["sample"] = pa.array(sample.int().numpy())
        before = batch.rollouts.total_so_far(torch.ones_like(sample)) - 1
        rows["row"] = pa.array(before.int().numpy())
    if columns.FINISHED in have:
        finish = np.where(have[columns.FINISHED].numpy(), "stop", "length")
        rows["finish_reason"] = pa.array(finish, pa.string())
    rows["rewards"] = _by_name(batch.components, num_rows)
    rows["metrics"] = _by_name(batch.metrics, num_rows)
    rows |= _tokens(batch)
    rows |= _texts(batch, about.tokenizer)
    if keep is not None and columns.IMAGES in batch.texts:
        shown = batch.texts[columns.IMAGES]  # the same for all rows of a group
        names = {each: [*map(keep, files_of(each))] for each in dict.fromkeys(shown)}
        rows["images"] = pa.array([names[each] for each in shown], pa.list_(pa.string()))
    return pa.table(rows)


# Columns whose values `AboutRun` has.
_OF_RUN = ("run", "env", "temperature", "top_p", "top_k", "seed")
# Stored column and the batch's column of one number for each row.
_SCALARS = (
    ("position", columns.GROUP),
    ("group", columns.GROUP),
    ("prompt_index", columns.PROMPT_INDEX),
    ("replica", columns.REPLICA),
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
        prompts = _Ragged(have[columns.PROMPT_MASK])
        rows["prompt_ids"] = prompts.lists(have[columns.PROMPT_IDS])
    if columns.COMPLETION_MASK not in have:
        return rows
    sampled = batch.sampled_mask
    tokens = _Ragged(have[columns.COMPLETION_MASK])
    rows |= {name: tokens.lists(have[column]) for name, column in _PER_TOKEN if column in have}
    rows["loss_mask"] = tokens.lists(sampled)
    rows["tokens"] = pa.array(sampled.sum(dim=1, dtype=torch.int32).numpy())
    if columns.WEIGHTS_VERSION in have:
        rows["version_spans"] = tokens.spans(
            have[columns.WEIGHTS_VERSION].where(sampled, NO_VERSION)
        )
    return rows


class _Ragged:
    """Rows of which the entries count where `mask` [B, T] is True; none are looked at twice."""

    def __init__(self, mask: Tensor) -> None:
        self._shape = mask.shape
        self._lengths = mask.sum(dim=1).numpy()
        self._offsets = _offsets(self._lengths)
        self._flat = np.flatnonzero(mask.numpy())  # places in the flattened rows

    def values(self, column: Tensor) -> np.ndarray:
        """The entries of a column [B, T], or [B, 1] for all tokens alike, one row after the
        other; ids as int32."""
        if column.shape != self._shape:
            values = np.repeat(column.reshape(-1).numpy(), self._lengths)
        else:
            values = column.reshape(-1).numpy().take(self._flat)
        return values.astype(np.int32) if values.dtype == np.int64 else values

    def rows(self, column: Tensor) -> list[list[int]]:
        """The entries of each row."""
        values, ends = self.values(column).tolist(), self._offsets.to_pylist()
        return [values[i:j] for i, j in zip(ends, ends[1:], strict=False)]

    def lists(self, column: Tensor) -> pa.ListArray:
        """The entries, a list for each row."""
        return pa.ListArray.from_arrays(self._offsets, pa.array(self.values(column)))

    def spans(self, versions: Tensor) -> pa.ListArray:
        """Each row's runs {version, start, end} of tokens sampled by the same weights, counted from
        the completion's first token; tokens that were not sampled lie between them."""
        flat = self.values(versions)
        firsts = self._offsets.to_numpy()[:-1]
        begins = np.ones(len(flat) + 1, dtype=bool)
        begins[1:-1] = flat[1:] != flat[:-1]
        begins[firsts] = True
        bounds = np.flatnonzero(begins)
        start, end = bounds[:-1], bounds[1:]
        kept = flat[start] != NO_VERSION
        start, end = start[kept], end[kept]
        rows = np.searchsorted(firsts, start, side="right") - 1
        parts = flat[start], *((at - firsts[rows]).astype(np.int32) for at in (start, end))
        spans = pa.StructArray.from_arrays([*map(pa.array, parts)], ["version", "start", "end"])
        return pa.ListArray.from_arrays(_offsets(np.bincount(rows, minlength=len(firsts))), spans)


def _offsets(lengths: np.ndarray) -> pa.Array:
    return pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int32())


def _by_name(found: dict[str, Tensor], num_rows: int) -> pa.Array:
    """Each row's numbers by name, as JSON, without missing (NaN) and infinite ones."""
    by_name: list[list[str]] = []
    for name in sorted(found):
        # Rows share few numbers: each becomes text once. They are compared by their bits.
        bits, places = np.unique(found[name].float().numpy().view(np.int32), return_inverse=True)
        # The shortest decimal of a float32: 0.1, not 0.10000000149.
        texts = [
            f"{json.dumps(name)}: {float(str(number))}" if np.isfinite(number) else ""
            for number in bits.view(np.float32)
        ]
        by_name.append([texts[place] for place in places.tolist()])
    rows = zip(*by_name, strict=True) if by_name else [()] * num_rows
    return pa.array(["{" + ", ".join(filter(None, row)) + "}" for row in rows], pa.string())


def _texts(batch: JudgedBatch, tokenizer: Any) -> dict[str, pa.Array]:
    """Prompt and completion as text, decoded here unless the environment did; of a conversation
    its messages."""
    if "completion" in batch.texts:
        stored = [name for name in ("prompt", "completion", "messages") if name in batch.texts]
        rows: dict[str, pa.Array] = {
            name: pa.array(batch.texts[name], pa.string()) for name in stored
        }
        if "messages" in rows:  # "" where it was no conversation
            told = [messages or None for messages in batch.texts["messages"]]
            rows["messages"] = pa.array(told, pa.string())
        return rows
    have = batch.columns
    if tokenizer is None or columns.COMPLETION_MASK not in have:
        return {}
    prompts = _Ragged(have[columns.PROMPT_MASK]).rows(have[columns.PROMPT_IDS])
    # Each is decoded once. The chat template's text is kept, a BOS token added by encoding is not.
    distinct = {tuple(ids): "" for ids in prompts}
    bare = [ids[1:] if ids[:1] == (tokenizer.bos_token_id,) else ids for ids in distinct]
    decoded = tokenizer.batch_decode(bare, clean_up_tokenization_spaces=False)
    found = dict(zip(distinct, decoded, strict=True))
    completions = _Ragged(have[columns.COMPLETION_MASK]).rows(have[columns.COMPLETION_IDS])
    texts = decode_completions(tokenizer, [ids[-1] for ids in prompts], completions)
    return {
        "prompt": pa.array([found[tuple(ids)] for ids in prompts], pa.string()),
        "completion": pa.array(texts, pa.string()),
    }


Status = Literal["trained", "rejected", "failed", "evaluated"]
"""Learnt from; refused by a filter, as too old or for its lost members; not to be had from any
sampler; held-out rows of an evaluation."""


class RolloutRecorder:
    """Writes each completion as a row, in the background; without a store it keeps none. Called in
    the driver's process, once for each closed group."""

    def __init__(self, store: RolloutStore | None = None, about: AboutRun | None = None) -> None:
        self._store, self._about = store, about

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._store is not None

    def record(
        self, groups: JudgedBatch, status: Status, *, iteration: int, reason: str = ""
    ) -> None:
        """Takes whole groups that were closed alike. Waits where the disk is slower than the run.

        Args:
            groups: their rows, on any device. `columns.GROUP` names each row's group, and
                `columns.ADVANTAGES` is there where the learner handed it back.
            reason: why they were rejected or failed, one word; "" otherwise.

        Raises:
            Problems: nothing can be written, and the run is to stop then.
        """
        if self._store is None or self._about is None:
            return
        # Rows that wait hold no memory of a GPU, and the caller may add columns meanwhile.
        groups = groups.to("cpu")
        ended = datetime.datetime.now(datetime.timezone.utc)
        make = functools.partial(rows_of, groups, self._about, status=status, reason=reason,
                                 ended=ended, keep=self._store.keep_image)  # fmt: skip
        self._store.put(iteration, groups.num_rows, make)

    def state(self) -> dict[str, Any]:
        """Its state for a checkpoint, after writing everything recorded."""
        return {} if self._store is None else self._store.state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores `state`; rollouts recorded later are discarded."""
        if self._store is not None:
            self._store.set_state(state)

    def metrics(self) -> dict[str, float]:
        """Its volume so far and the time spent writing."""
        return {} if self._store is None else self._store.metrics()

    def stop(self) -> None:
        """Writes the rest and ends."""
        if self._store is not None:
            self._store.stop()


SAMPLES_FILE = "samples.jsonl"


class SampleLog:
    """Appends rows {iteration, split, prompt_index, prompt, completion, score, <components>,
    <metrics>}; the prompt of a chat is its turns, and `question` the last user's words. The first
    rows it writes replace those of that iteration and later ones: of a process that went on from
    the same checkpoint.

    Args:
        env_names: of the environments, by number, where rows have one: the column `env`.
    """

    def __init__(self, folder: Path, env_names: Sequence[str] = ()):
        self.path, self._env_names = folder / SAMPLES_FILE, env_names
        self._is_new = True
        self._file = BestEffort(SAMPLES_FILE)

    def write(self, batch: JudgedBatch, *, iteration: int, split: str, limit: int) -> None:
        """Appends `limit` rows of `batch`, of as many prompts as it has, if it has texts."""
        if "completion" not in batch.texts:
            return
        envs: Sequence[dict[str, str]] = [{}] * batch.num_rows
        if columns.ENVIRONMENT in batch.columns:
            numbers = batch.columns[columns.ENVIRONMENT].tolist()
            envs = [{"env": self._env_names[number]} for number in numbers]
        prompts = batch.columns[columns.PROMPT_INDEX].tolist()
        of_rows = [(env.get("env"), prompt) for env, prompt in zip(envs, prompts, strict=True)]
        about = {"iteration": iteration, "split": split}
        rows = [about | envs[row] | _row(batch, row) for row in _spread(of_rows, limit)]
        with self._file.writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._is_new:
                keep_json_rows(self.path, "iteration", iteration)
                self._is_new = False
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


def _spread(prompts: Sequence[Hashable], limit: int) -> list[int]:
    """`limit` rows, given the prompt of each: one of every prompt before a second of any."""
    seen: Counter[Hashable] = Counter()
    turn = []
    for prompt in prompts:
        turn.append(seen[prompt])
        seen[prompt] += 1
    return sorted(sorted(range(len(prompts)), key=turn.__getitem__)[:limit])


def _row(batch: JudgedBatch, row: int) -> dict[str, Any]:
    wrong = (columns.FAILED, columns.PROMPT_TRUNCATED)  # metrics of what went wrong, where it did
    numbers = batch.components | {
        name: column for name, column in batch.metrics.items()
        if column[row] != 0 or not name.endswith(wrong)
    }  # fmt: skip
    return {
        "prompt_index": int(batch.columns[columns.PROMPT_INDEX][row]),
        "prompt": batch.texts.get("turns", batch.texts["prompt"])[row],
        **({"question": batch.texts["question"][row]} if "question" in batch.texts else {}),
        "completion": batch.texts["completion"][row],
        "score": round(float(batch.columns[columns.SCORES][row]), 6),
        **{
            name: round(float(column[row]), 6)
            for name, column in numbers.items()
            if not column[row].isnan()  # not judged by it, or not reported
        },
    }
