"""The work of a sampler: leases that are each sampled as one batch, or groups row by row.

    add(lease) ─▶ step() ─▶ groups whose last row has ended, to be judged

`Batches` samples a lease in one step: what is computed together follows from the lease alone, and
with it the round-off. `SingleRows` samples one token of every row in a step: rows enter and leave
at any of them, and new weights come between two; each token carries the version that sampled it,
stamped by the engine. Rows never begin on weights before those of their lease.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rllib_llm.engines.protocol import (
    NOT_FINITE,
    Ended,
    Engine,
    Noise,
    Row,
    Tokens,
    pad_completions,
)
from rllib_llm.modules.images import image_rows
from rllib_llm.overseer.phases import GENERATING
from rllib_llm.rollouts.groups import Lease, PartialCompletion
from rllib_llm.rollouts.judged_batch import SampleRequest, requests_of
from rllib_llm.rollouts.policy import ModulePolicy, SamplingPolicy
from rllib_llm.rollouts.sampler import Sampler, UnjudgedBatch
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared import columns
from rllib_llm.weights.published import PublishedWeights

if TYPE_CHECKING:
    from rllib_llm.engines.torch_engine import TorchEngine

Failed = list[tuple[Exception, Sequence[int]]]
"""What was raised, and the positions of the groups that are not sampled for it."""
Partial = dict[int, dict[int, tuple[PartialCompletion, ...]]]
"""By lease and position."""
Finished = list[tuple[Lease, UnjudgedBatch | Exception]]
"""Groups of a lease that are to be judged, or what the whole lease fails with."""


class Batches:
    """Leases, each sampled as one batch in one step, with the weights that it names."""

    def __init__(self, sampler: Sampler, settings: ServingSettings) -> None:
        self._sampler, self._settings = sampler, settings
        self._leases: dict[int, Lease] = {}

    @property
    def leases(self) -> set[int]:
        """Ids of the leases that are not finished yet."""
        return set(self._leases)

    @property
    def room(self) -> int:
        """How many more groups there is room for."""
        return 0 if self._leases else self._settings.groups_per_lease

    def add(self, lease: Lease) -> Failed:
        """Takes in the groups of a lease."""
        self._leases[lease.id] = lease
        return []

    def begun_anew(self, lease: Lease) -> list[int]:
        """Positions of a lease whose partial output could not be continued."""
        return []

    def step(self) -> Finished:
        """Samples; what is finished by it."""
        if not self._leases:
            return []
        lease = self._leases.pop(next(iter(self._leases)))
        try:
            asked = requests_of(lease, self._settings)
            return [(lease, self._sampler.generate(request, lease.weights)) for request in asked]
        except Exception as error:  # noqa: BLE001  (the border of the process; reported to the ledger)
            return [(lease, error)]

    def drop(self, lease: int) -> None:
        """Gives up the groups of a lease, which another sampler has now."""
        self._leases.pop(lease, None)

    def load(self, weights: PublishedWeights, order: int) -> None:
        """Samples with these as soon as may be, if they are news; see `Engine.load`."""

    def renewed(self, weights: PublishedWeights, order: int) -> Partial:
        """Loads the newest weights. Partial output that the ledger is to keep for it, by lease and
        position."""
        return {}

    def close(self) -> None:
        """Frees its memory."""


class CompletionGroup:
    """The completions of one prompt, row by row.

    before: the partial output that it was leased with.
    """

    def __init__(
        self, lease: Lease, request: SampleRequest, prompts: dict[str, Any],
        before: Sequence[PartialCompletion],
    ) -> None:  # fmt: skip
        self.lease, self.request, self.prompts, self.before = lease, request, prompts, before
        (self.position,) = request.positions
        self.has_begun = False
        # Whole completions, by place.
        self._ended = {i: row for i, row in enumerate(before) if row.finish in ("stop", "length")}

    def rows(self, sampler: Sampler) -> list[Row]:
        """Its rows, as an engine begins or continues them."""
        self.has_begun = True
        params, seed = sampler.of(self.request).params(True), sampler.seed
        mask = self.prompts[columns.PROMPT_MASK][0]
        prompt = self.prompts[columns.PROMPT_IDS][0][mask].tolist()
        row_ids, held = self.prompts[columns.ROW_ID].tolist(), [b.token_ids for b in self.before]
        images = next(iter(image_rows(self.prompts)), {})
        return [
            Row((self.position, i), [*prompt, *held[i]], params, num_sampled=len(held[i]),
                noise=Noise(seed, row_ids[i]), group=self.position, images=images)
            for i in self.running
        ]  # fmt: skip

    @property
    def running(self) -> list[int]:
        """Places of the rows that have not ended."""
        return [i for i in range(self.request.num_completions) if i not in self._ended]

    def ended(self, i: int, row: Ended) -> None:
        """A row has ended; a completion has no next one."""
        self._ended[i] = self._joined(i, row, row.finish)

    def so_far(self, running: Sequence[Tokens]) -> tuple[PartialCompletion, ...]:
        """All its rows, given the tokens of those that are running."""
        held = dict(self._ended)
        for i, tokens in zip(self.running, running, strict=True):
            held[i] = self._joined(i, tokens, tokens.finish or "aborted")
        return tuple(held[i] for i in range(self.request.num_completions))

    def _joined(self, i: int, rest: Ended | Tokens, finish: str) -> PartialCompletion:
        """A row's initial tokens followed by those sampled since."""
        before, names = self.before[i], ("token_ids", "logprobs", "versions")
        ids, logprobs, versions = ((*getattr(before, n), *getattr(rest, n)) for n in names)
        experts = rest.experts if isinstance(rest, Ended) else None
        return PartialCompletion(ids, logprobs, versions, finish, before.prompt, experts)


class SingleRows(Batches):
    """Leases whose groups are sampled row by row.

    Rows continue on new weights, or finish on those they started with: then there are two modules,
    which change places with each load.
    """

    def __init__(self, sampler: Sampler, settings: ServingSettings) -> None:
        super().__init__(sampler, settings)
        self._groups: dict[int, CompletionGroup] = {}  # by position
        self._newest: PublishedWeights | None = None
        self._newest_order = 0  # of their publication
        self._is_loaded = False
        self._order = 0  # of those that new rows begin on
        self._engine = self._open()

    def _open(self) -> Engine:
        sampler = self._sampler
        # vLLM has one copy of the weights: new rows wait for those that finish on the old ones.
        if self._settings.in_flight != "finish" or not isinstance(sampler.policy, ModulePolicy):
            return self._engine_of(sampler.policy)
        from rllib_llm.engines.hot_swap import HotSwapEngine  # few runs need it

        sampler.older_policy = sampler.older_policy or sampler.policy.another()
        newest, older = self._engine_of(sampler.policy), self._engine_of(sampler.older_policy)
        return HotSwapEngine(cast("TorchEngine", newest), cast("TorchEngine", older))

    def _engine_of(self, policy: SamplingPolicy) -> Engine:
        return policy.open_engine(None, load_weights=functools.partial(self._put, policy))

    @property
    def leases(self) -> set[int]:
        return {group.lease.id for group in self._groups.values()}

    @property
    def room(self) -> int:
        return self._settings.max_groups - len(self._groups)

    def is_news(self, weights: PublishedWeights, order: int) -> bool:
        """Whether these weights are newer than the last. Calls to the ledger can overtake one
        another."""
        newest = self._newest
        return newest is None or (weights.key != newest.key and order >= self._newest_order)

    def load(self, weights: PublishedWeights, order: int) -> None:
        is_news = self.is_news(weights, order)
        self._newest_order = max(self._newest_order, order)
        if is_news:
            self._newest, self._is_loaded = weights, False
            self._engine.load({}, weights.version, self._settings.in_flight)
        self._note_loaded()

    def _put(self, policy: SamplingPolicy, _: Mapping[str, Any]) -> None:
        """Puts the newest weights into a policy, which is the sampler's from now on."""
        sampler = self._sampler
        assert self._newest is not None, "weights are given before they are loaded"
        sampler.weights.receive(self._newest, policy.load)
        if policy is sampler.older_policy:
            sampler.policy, sampler.older_policy = sampler.older_policy, sampler.policy
        self._is_loaded = True

    def _note_loaded(self) -> None:
        if self._is_loaded:
            self._order = self._newest_order

    def add(self, lease: Lease) -> Failed:
        """Starts the groups of a lease, or resumes their partial output. They wait if new rows
        would start on weights before the lease's. Partial output under an earlier lease is
        discarded."""
        self._give_up([position for position in lease.positions if position in self._groups])
        failed: Failed = []
        groups = {}
        for position in lease.positions:
            try:
                groups[position] = self._group(lease, position)
            except Exception as error:  # noqa: BLE001  (a prompt's; reported to the ledger)
                failed.append((error, [position]))
        self._groups |= groups
        try:
            self._begin_waiting(groups)
        except Exception as error:  # noqa: BLE001  (reported to the ledger)
            for position in groups:
                del self._groups[position]
            failed.append((error, list(groups)))
        return failed

    def _group(self, lease: Lease, position: int) -> CompletionGroup:
        place = lease.positions.index(position)
        alone = dataclasses.replace(
            lease, position=position, num_groups=1, places=lease.places[place : place + 1],
            groups=(),
        )  # fmt: skip
        (request,) = requests_of(alone, self._settings)
        prompts = self._sampler.of(request).environment.prompts(request)
        prompt = zlib.crc32(
            prompts[columns.PROMPT_IDS][0][prompts[columns.PROMPT_MASK][0]].cpu().numpy()
        )
        before = lease.partial.get(position, ())
        if not self._can_continue(before, prompt, request):
            before = (PartialCompletion((), (), (), prompt=prompt),) * request.num_completions
        return CompletionGroup(lease, request, prompts, before)

    def _can_continue(
        self, before: Sequence[PartialCompletion], prompt: int, request: SampleRequest
    ) -> bool:
        """Whether these settings and data could have made this partial output: a restored run may
        have others."""
        longest = self._sampler.of(request).params(True).max_new_tokens

        def fits(row: PartialCompletion) -> bool:
            room = longest - len(row.token_ids)
            return {"length": room == 0, "aborted": room > 0}.get(row.finish, room >= 0)

        return len(before) == request.num_completions and all(
            row.prompt in (0, prompt) and fits(row) for row in before
        )

    def begun_anew(self, lease: Lease) -> list[int]:
        return [
            position for position, before in lease.partial.items()
            if position in self._groups and self._groups[position].before is not before
        ]  # fmt: skip

    def _begin_waiting(self, groups: Mapping[int, CompletionGroup]) -> None:
        """Begins those of these groups that wait, if their weights are there."""
        rows: list[Row] = []
        for group in groups.values():
            if not group.has_begun and group.lease.order <= self._order:
                rows += group.rows(self._sampler)
        if rows:
            self._engine.add(rows)

    def drop(self, lease: int) -> None:
        self._give_up([p for p, group in self._groups.items() if group.lease.id == lease])

    def _give_up(self, positions: Iterable[int]) -> None:
        for position in positions:
            group = self._groups.pop(position)
            if group.has_begun:
                self._engine.abort([(position, i) for i in group.running])

    def step(self) -> Finished:
        """Samples a token for every row.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        if not self._groups:
            return []
        with self._sampler.phase(GENERATING):
            ended_rows = self._engine.step()
        self._note_loaded()
        self._begin_waiting(self._groups)
        for ended in ended_rows:
            row_id: Any = ended.id
            position, i = row_id
            if ended.finish == "error":
                raise FloatingPointError(NOT_FINITE)
            self._groups[position].ended(i, ended)
        finished: Finished = []
        weights = self._sampler.weights
        for position in [p for p, group in self._groups.items() if not group.running]:
            group = self._groups.pop(position)
            made = pad_completions(
                group.so_far([]), self._sampler.policy.pad_token_id, with_versions=True,
                prompt_len=group.prompts[columns.PROMPT_IDS].shape[1],
            ).columns()  # fmt: skip
            finished.append((group.lease, UnjudgedBatch(
                group.request, weights.version, group.prompts, made, weights.version,
                weights=weights.metrics(), continues=True,
                masks_stale_prefix=self._settings.masks_stale_prefix,
            )))  # fmt: skip
        return finished

    def renewed(self, weights: PublishedWeights, order: int) -> Partial:
        if not self.is_news(weights, order):
            return {}
        partial = self.partial()
        self.load(weights, order)
        return partial

    def partial(self) -> Partial:
        """The partial output of each group."""
        found: Partial = {}
        for position, group in self._groups.items():
            if group.has_begun:
                ids = [(position, i) for i in group.running]
                read = self._engine.sampled(ids, [0] * len(ids))
                found.setdefault(group.lease.id, {})[position] = group.so_far(read)
        return found

    def close(self) -> None:
        self._engine.close()


def open_in_flight(sampler: Sampler, settings: ServingSettings) -> Batches:
    """Rows where the settings ask for them and the sampler has them; else batches."""
    return (SingleRows if settings.by_row and sampler.takes_rows else Batches)(sampler, settings)
