"""Judged batches: how they are joined and cut, and their groups as a ledger holds them, without
unpacking: as bytes, or in process as indices into the batch they were sampled in."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from rllib_llm.numerics.scores import RolloutRows
from rllib_llm.rollouts.groups import UNJUDGED, Closed, JudgedGroup, Lease
from rllib_llm.rollouts.mixture import Place
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared import columns
from rllib_llm.shared.columns import NO_VERSION, widen
from rllib_llm.shared.messages import TrialMessage

Column: TypeAlias = torch.Tensor
# Columns padded on the left; all other two-dimensional ones are padded on the right.
_LEFT_PADDED = (
    columns.PROMPT_IDS, columns.PROMPT_MASK, columns.TEACHER_PROMPT_IDS,
    columns.TEACHER_PROMPT_MASK, columns.PROMPT_EXPERTS,
)  # fmt: skip
_EXPERTS = (columns.PROMPT_EXPERTS, columns.COMPLETION_EXPERTS)  # unknown where rows have none
# What learners compute for all rows where some lack it, as those of a run with other samplers do.
_RECOMPUTED = (columns.SAMPLER_VALUES, columns.REF_LOGPROBS, columns.TEACHER_LOGPROBS)
_TOKEN_IDS = (columns.PROMPT_IDS, columns.COMPLETION_IDS, columns.TEACHER_PROMPT_IDS)


@dataclass(frozen=True)
class SampleRequest:
    """Prompts `position .. position + num_prompts - 1`, `num_completions` of each.

    env: number of the environment that has them. groups: their positions among those of all
    environments; (): the same. stride: between the ids of their first rows; 0: num_completions.
    """

    position: int
    num_prompts: int
    num_completions: int = 1
    explore: bool = True
    return_texts: bool = False
    env: int = 0
    groups: tuple[int, ...] = ()
    stride: int = 0

    @property
    def positions(self) -> Sequence[int]:
        """The positions of the groups among those of all environments."""
        return self.groups or range(self.position, self.position + self.num_prompts)


def requests_of(lease: Lease, settings: ServingSettings) -> list[SampleRequest]:
    """The requests of a lease, one for each environment, so that the round-off is the same on any
    sampler, also on one that opens some of them. Groups have consecutive positions in their
    environments: those between groups of a lease are of others."""
    of_env: dict[int, list[tuple[int, int]]] = {}
    places = lease.places or [Place(0, position) for position in lease.positions]
    for group, place in zip(lease.positions, places, strict=True):
        of_env.setdefault(place.env, []).append((place.position, group))
    return [
        SampleRequest(
            own[0][0], len(own), settings.completions_of(env), settings.explore,
            lease.return_texts, env,
            () if all(each == g for each, g in own) else tuple(g for _, g in own),
            settings.num_completions,
        ) for env, own in of_env.items()
    ]  # fmt: skip


@dataclass
class JudgedBatch:
    """Judged completions of one request.

    columns: the training columns of `rllib_llm.shared.columns`, B rows, on the sampler's device.
    rewards: [B] float32, the environment's own (score minus its KL share).
    components, metrics: [B] float32 by name; what the score is made of, and what it is not. A
        metric is NaN in rows for which it was not reported.
    node: id of the node that made it.
    messages: what was said in the process that made it.
    pad_token_id: what stands in prompts and completions where there is no token.
    num_replayed: rows at the end that were learnt from before.
    cause: what was raised where no row could be judged; of joined batches, that of the first such.
    texts: {columns.IMAGES: [...]} where prompts show images, their files in base64 with spaces
        between them; {"prompt": [...], "completion": [...]} where they were decoded: when asked
        for, or for a reward function.
    """

    columns: dict[str, Column]
    rewards: Column
    components: dict[str, Column] = field(default_factory=dict)
    metrics: dict[str, Column] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    node: str = ""
    messages: list[TrialMessage] = field(default_factory=list)
    pad_token_id: int = 0
    num_replayed: int = 0
    cause: str = ""

    @property
    def fresh(self) -> JudgedBatch:
        """The rows that were not learnt from before."""
        if not self.num_replayed:
            return self
        rows = torch.arange(self.num_rows - self.num_replayed, device=self.rewards.device)
        return dataclasses.replace(take_rows(self, rows), num_replayed=0)

    @property
    def num_rows(self) -> int:
        return len(self.rewards)

    @property
    def num_rollouts(self) -> int:
        """Completions, or conversations whatever number of rows each has."""
        whole = self.rollouts
        return self.num_rows if whole.is_alone else int(whole.is_first.sum())

    def to(self, device: torch.device | str) -> JudgedBatch:
        """The batch with its tensors on `device`."""
        return JudgedBatch(**_mapped(vars(self), lambda column: column.to(device)))

    @property
    def sampled_mask(self) -> Column:
        """[B, T] bool, the tokens that the policy sampled, learnt from or not."""
        return columns.written_mask(self.columns)

    @property
    def rollouts(self) -> RolloutRows:
        """Which rows are of one rollout."""
        return RolloutRows.of_batch(self.columns)

    @property
    def versions(self) -> Column:
        """Versions of the weights that sampled each of the sampled tokens, int32 [tokens]."""
        return self.columns[columns.WEIGHTS_VERSION][self.sampled_mask]

    # --- summaries ---------------------------------------------------------------------------

    @property
    def judged(self) -> Column:
        """[B] bool, one row of each rollout that was judged."""
        return self.columns[columns.VALID] & self.rollouts.is_first

    def mean_reward(self) -> float:
        """The mean over rollouts that were judged."""
        return _mean(self.rewards, self.judged)

    def train_metrics(self) -> dict[str, float]:
        """`rewards` and one `<component>_rewards` each, means over rollouts that were judged."""
        judged = self.judged
        means = {"rewards": _mean(self.rewards, judged)}
        for name, column in self.components.items():
            means[f"{name}_rewards"] = _mean(column, judged & ~column.isnan())
        if columns.PROMPT_TRUNCATED in self.metrics:
            cut = self.metrics[columns.PROMPT_TRUNCATED]
            means["truncated_share"] = _mean(cut, self.rollouts.is_first & ~cut.isnan())
        return means

    def mean_version(self) -> float:
        """The mean version of the weights over the sampled tokens."""
        mask = self.sampled_mask
        versions = self.columns[columns.WEIGHTS_VERSION].where(mask, 0)
        return float(versions.sum().double() / mask.sum())

    def env_metrics(self) -> dict[str, float]:
        """Means of the environment's diagnostics over rollouts, and `distinct`: see
        `distinct_share`."""
        first = self.rollouts.is_first
        valid = self.columns[columns.VALID] & first
        means = {}
        for name, column in self.metrics.items():
            if name != columns.PROMPT_TRUNCATED:
                counted = first if name.endswith(columns.FAILED) else valid
                means[name] = _mean(column, counted & ~column.isnan())
        if columns.LOSS_MASK in self.columns:
            mask = self.columns[columns.COMPLETION_MASK]
            means["sampled_share"] = float(self.sampled_mask.sum() / mask.sum())
        means["distinct"] = self.distinct_share()
        return means

    def distinct_share(self, is_greedy: bool = False) -> float:
        """Different completions over rollouts. Where sampling `is_greedy`, those of one prompt
        cannot differ, and equal ones count once."""
        # What stands after the end differs with who made the row.
        mask = self.columns[columns.COMPLETION_MASK]
        ids = self.columns[columns.COMPLETION_IDS].where(mask, -1)
        # Sorting rows, as torch.unique does, takes ten times as long.
        said: dict[int, bytes] = {}
        whole = self.rollouts
        owners = range(self.num_rows) if whole.is_alone else whole.owners.tolist()
        for owner, row in zip(owners, ids.cpu().numpy(), strict=True):
            said[owner] = said.get(owner, b"") + row.tobytes()
        num_rollouts = len(said)
        if is_greedy and columns.PROMPT_INDEX in self.columns:
            prompts = self.columns[columns.PROMPT_INDEX].tolist()
            num_rollouts = len({(prompts[owner], each) for owner, each in said.items()})
        return len({*said.values()}) / max(1, num_rollouts)

    def weights_metrics(self) -> dict[str, float]:
        """`WeightsReceiver.metrics`, the maximum over samplers, and the oldest version that sampled
        a token, if any did."""
        if not bool(self.sampled_mask.any()):
            return dict(self.weights)
        versions = self.columns[columns.WEIGHTS_VERSION]
        latest = torch.iinfo(versions.dtype).max
        oldest = versions.masked_fill(~self.sampled_mask, latest).min()
        return {**self.weights, "oldest_version": int(oldest)}


def _mapped(fields: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The fields of a batch, all its columns changed."""
    of_columns = ("columns", "components", "metrics")
    changed = {name: {k: change(column) for k, column in fields[name].items()}
               for name in of_columns}  # fmt: skip
    return {**fields, **changed, "rewards": change(fields["rewards"])}


def concatenate(batches: list[JudgedBatch]) -> JudgedBatch:
    """All rows in one batch, in this order; shorter rows are padded on their padded side."""
    if len(batches) == 1:
        return batches[0]
    pad = batches[0].pad_token_id
    kinds = {
        name: column for b in batches for name, column in b.columns.items()
        if name not in _RECOMPUTED or all(name in each.columns for each in _judged(batches))
    }  # fmt: skip
    fillers = {columns.WEIGHTS_VERSION: NO_VERSION, **dict.fromkeys(_TOKEN_IDS, pad),
               **dict.fromkeys(_EXPERTS, columns.UNKNOWN_EXPERT)}  # fmt: skip
    whole: dict[str, Column] = {}
    for name, kind in kinds.items():
        parts, left = [_column(b, name, kind) for b in batches], name in _LEFT_PADDED
        if kind.ndim > 1:
            longest = max(part.shape[1] for part in parts)
            parts = [widen(part, longest, fillers.get(name, 0), left=left) for part in parts]
        whole[name] = torch.cat(parts)
    return JudgedBatch(
        columns=whole,
        rewards=torch.cat([b.rewards for b in batches]),
        components=_concatenate_all(batches, "components"),
        metrics=_concatenate_all(batches, "metrics"),
        # Groups of a checkpoint may come from an environment that decoded nothing.
        texts={
            name: [text for b in batches for text in b.texts.get(name, [""] * b.num_rows)]
            for name in dict.fromkeys(name for b in batches for name in b.texts)
            if name == columns.IMAGES or all(
                name in b.texts or (name == "messages" and b.texts) for b in batches
            )
        },
        # Samplers work at the same time: the slowest is what was waited for.
        timings=_largest([b.timings for b in batches]),
        weights=_largest([b.weights for b in batches]),
        messages=[message for b in batches for message in b.messages],
        pad_token_id=pad,
        cause=next((b.cause for b in batches if b.cause), ""),
    )


def _judged(batches: list[JudgedBatch]) -> list[JudgedBatch]:
    """Those with a row that was judged."""
    return [batch for batch in batches if bool(batch.columns[columns.VALID].any())]


def _largest(numbers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in numbers for name in each)
    return {name: max(each.get(name, 0.0) for each in numbers) for name in names}


def _column(batch: JudgedBatch, name: str, kind: Column) -> Column:
    """A column of a batch, of one `kind` with those of others; a missing loss mask is all True, and
    where nothing could be judged what the judge would have added is 0."""
    if name in batch.columns:
        return batch.columns[name]
    if name == columns.LOSS_MASK:
        return batch.columns[columns.COMPLETION_MASK]
    if name in _EXPERTS:
        like = columns.PROMPT_IDS if name == columns.PROMPT_EXPERTS else columns.COMPLETION_IDS
        shape = (*batch.columns[like].shape, kind.shape[2])
        return kind.new_full(shape, columns.UNKNOWN_EXPERT, device=batch.rewards.device)
    if name in columns.TEACHER_PROMPTS:  # its teacher reads what the policy reads
        return batch.columns[columns.TEACHER_PROMPTS[name]]
    if name == columns.REWARDS:  # nothing was earned at turns
        return torch.zeros_like(batch.columns[columns.COMPLETION_MASK], dtype=kind.dtype)
    if name == columns.ROW_WEIGHT:  # each row is a rollout
        return torch.ones_like(batch.rewards)
    if name == columns.ENVIRONMENT:  # of a checkpoint, when there was one
        return torch.zeros_like(batch.rewards, dtype=kind.dtype)
    if name == columns.POSITION:
        return batch.columns[columns.GROUP]
    if name.startswith((columns.REWARD_PART, columns.REWARD_WEIGHT)):
        return torch.full_like(batch.rewards, torch.nan)
    if name == columns.IMAGE_ROW:  # all of its prompts are text
        return torch.full_like(batch.rewards, -1, dtype=kind.dtype)
    if not bool(batch.columns[columns.VALID].any()):
        like = batch.rewards if kind.ndim == 1 else batch.columns[columns.COMPLETION_MASK]
        return torch.zeros_like(like, dtype=kind.dtype)
    raise ValueError(f"the environment must return {name!r} with all batches, or with none")


def take_rows(batch: JudgedBatch, rows: Column) -> JudgedBatch:
    """The rows [n] of a batch, int64, in this order."""
    taken = JudgedBatch(**_mapped(vars(batch), lambda column: column[rows]))
    taken.texts = {name: [texts[i] for i in rows.tolist()] for name, texts in batch.texts.items()}
    return taken


def take_trimmed(batch: JudgedBatch, rows: Column) -> JudgedBatch:
    """As `take_rows`, cut to the longest prompt and completion among them."""
    taken = take_rows(batch, rows)
    held = taken.columns
    prompt_len = max(1, int(held[columns.PROMPT_MASK].any(dim=0).sum()))
    completion_len = max(1, int(held[columns.COMPLETION_MASK].any(dim=0).sum()))
    for name, column in held.items():
        if column.ndim >= 2 and not name.startswith("teacher_prompt"):
            is_prompt = name in _LEFT_PADDED
            held[name] = column[:, -prompt_len:] if is_prompt else column[:, :completion_len]
    return taken


def _concatenate_all(batches: list[JudgedBatch], group: str) -> dict[str, Column]:
    parts = [(getattr(batch, group), torch.full_like(batch.rewards, torch.nan))
             for batch in batches]  # fmt: skip
    names = dict.fromkeys(name for part, _ in parts for name in part)
    return {name: torch.cat([part.get(name, nan) for part, nan in parts]) for name in names}


def _mean(column: Column, valid: Column) -> float:
    return float(column.where(valid, 0.0).sum() / valid.sum().clamp(min=1))


# --- groups as a ledger holds them ---------------------------------------------------------------

TOO_FEW = "too_few"


@dataclass(frozen=True, eq=False)
class Places:
    """Rows `first .. last - 1` of a batch that stays whole; it is shared by all of its groups."""

    batch: JudgedBatch
    first: int
    last: int


def pack(batch: JudgedBatch) -> bytes:
    """The batch as bytes, its tensors as arrays, which are quicker to pickle."""
    return pickle.dumps(_mapped(vars(batch), lambda column: column.cpu().numpy()), protocol=5)


def unpack(payload: bytes) -> JudgedBatch:
    """The inverse of `pack`."""
    return JudgedBatch(**_mapped(pickle.loads(payload), torch.from_numpy))


def judged_groups(batch: JudgedBatch, *, min_valid: int = 1) -> list[JudgedGroup]:
    """All groups of a batch with adjacent rows, without copying. Reads five numbers per row from
    the device at once."""
    valid, mask = batch.columns[columns.VALID], columns.sampled_mask(batch.columns)
    versions = batch.columns[columns.WEIGHTS_VERSION]
    num_tokens = batch.sampled_mask.sum(dim=1)
    latest = torch.iinfo(versions.dtype).max
    by_row = torch.stack([
        batch.columns[columns.GROUP],
        (valid & batch.rollouts.is_first).long(),
        num_tokens,
        num_tokens - mask.sum(dim=1).where(valid, 0),
        versions.where(mask, latest).amin(dim=1),
    ]).cpu().numpy()  # fmt: skip
    firsts = np.flatnonzero(np.diff(by_row[0], prepend=-1))
    lasts = np.append(firsts, by_row.shape[1])[1:]
    sums = np.add.reduceat(by_row[1:4], firsts, axis=1)
    oldest = np.minimum.reduceat(by_row[4], firsts)
    oldest[oldest == latest] = -1
    numbers = np.stack([by_row[0, firsts], firsts, lasts, *sums, oldest])
    return [
        JudgedGroup(
            position, Places(batch, first, last), num_tokens, num_lost, version, cause=batch.cause,
            reason="" if num_valid >= min_valid else TOO_FEW if num_valid else UNJUDGED,
        )
        for position, first, last, num_valid, num_tokens, num_lost, version in numbers.T.tolist()
    ]  # fmt: skip


def as_bytes(group: JudgedGroup | None) -> JudgedGroup | None:
    """The group as separate bytes, for a checkpoint."""
    if group is None or isinstance(group.payload, bytes):
        return group
    return dataclasses.replace(group, payload=pack(opened(group.payload)))


def opened(payload: bytes | Places) -> JudgedBatch:
    """The rows of a group."""
    if isinstance(payload, bytes):
        return unpack(payload)
    return take_trimmed(payload.batch, torch.arange(payload.first, payload.last))


def rows_of(closed: Closed) -> JudgedBatch:
    """The rows of a group that is not trained; for a failed group, one row that names it."""
    if closed.group is not None:
        return opened(closed.group.payload)
    return JudgedBatch(
        {columns.GROUP: torch.tensor([closed.position])}, rewards=torch.tensor([torch.nan])
    )


def batch_of(groups: Sequence[JudgedGroup]) -> JudgedBatch:
    """The rows of all groups, in this order. Where all lie in batches that their groups share,
    those of a batch are taken at once, and of samplers that worked in parallel the seconds are
    those of the slowest."""
    parts: list[JudgedBatch] = []
    are_shared = True
    for shared, of_batch in itertools.groupby(
        groups, lambda group: isinstance(group.payload, Places) and id(group.payload.batch)
    ):
        payloads = [group.payload for group in of_batch]
        if not shared:
            parts += map(unpack, payloads)
            are_shared = False
            continue
        batch = payloads[0].batch
        if sum(place.last - place.first for place in payloads) < batch.num_rows:
            index = [torch.arange(place.first, place.last) for place in payloads]
            batch = take_trimmed(batch, torch.cat(index))
        parts.append(batch)
    whole = concatenate(parts)
    if len(parts) > 1 and are_shared:
        spent: dict[int, Counter[str]] = {}  # by replica
        for batch in parts:
            replica = int(batch.columns[columns.REPLICA][0])
            spent.setdefault(replica, Counter()).update(batch.timings)
        whole.timings = _largest(list(spent.values()))
    return whole
