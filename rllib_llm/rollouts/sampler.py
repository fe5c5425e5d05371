"""The work of one sampler: prompts of a request, their completions and scores.

    request ──▶ environment ── prompts ──▶ policy ── completions ──▶ environment ──▶ judged batch
                                             ▲
                                 published weights, by their receiver

`SamplingEnvironment` is the environment as the sampler asks it: for prompts by their position, and
in threads for scores, beside decoding. A sampler is given its parts and knows neither RLlib nor a
config; `env_runner.py` makes them from one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.envs.actions import Judgement, info_columns
from rllib_llm.envs.bandit import BanditEnv
from rllib_llm.envs.judges.rewards import UnjudgedError
from rllib_llm.modules.images import is_image
from rllib_llm.overseer.phases import GENERATING, IDLE, JUDGING, LOADING, Phases
from rllib_llm.rollouts.judged_batch import NO_VERSION, JudgedBatch, SampleRequest
from rllib_llm.rollouts.policy import Generation, SamplingPolicy
from rllib_llm.shared import columns
from rllib_llm.shared.process import CpuClock
from rllib_llm.weights.published import PublishedWeights, WeightsLostError
from rllib_llm.weights.receiver import WeightsReceiver

MAX_JUDGING = 16  # batches of completions that are judged at the same time


class SamplingEnvironment:
    """A vector environment whose prompts are requested by position.

    Args:
        env: a `gymnasium.vector.VectorEnv` that keeps the contract of `BanditEnv`.
        replica: the number of the sampler that has it.
        number: of several environments, which it is; None: it is the only one.
    """

    def __init__(self, env: Any, replica: int = 0, number: int | None = None) -> None:
        self.env, self._replica, self._number = env, replica, number
        # Others than `BanditEnv` hand out prompts and judge in turns.
        self._turns = threading.RLock()
        self._places: queue.SimpleQueue[SamplingEnvironment] | None = None

    @contextlib.contextmanager
    def judging(self, request: SampleRequest) -> Iterator[SamplingEnvironment]:
        """An environment that has handed out the prompts of `request` and judges completions of
        them, whatever this one does meanwhile; waits for one that is free. Others than `BanditEnv`
        judge serially: one batch at a time, and no prompts are handed out meanwhile.
        """
        with self._turns:
            if self._places is None:
                self._places = queue.SimpleQueue()
                # One that overrides judging is never called by two threads at once.
                for _ in range(MAX_JUDGING if type(self.env) is BanditEnv else 1):
                    self._places.put(
                        SamplingEnvironment(self.env.fork(), self._replica, self._number)
                        if isinstance(self.env, BanditEnv) else self
                    )  # fmt: skip
        place = self._places.get()
        try:
            with self._turns if place is self else contextlib.nullcontext():
                place.prompts(request)
                yield place
        finally:
            self._places.put(place)

    def origin(self, groups: torch.Tensor, request: SampleRequest) -> dict[str, torch.Tensor]:
        """`columns.REPLICA`, and of several environments `columns.ENVIRONMENT` and
        `columns.POSITION`, for rows of these groups, [B] int64, of a request."""
        found = {columns.REPLICA: torch.full_like(groups, self._replica, dtype=torch.int32)}
        if self._number is not None:
            found[columns.ENVIRONMENT] = torch.full_like(groups, self._number, dtype=torch.int32)
            places = torch.searchsorted(torch.tensor(request.positions).to(groups.device), groups)
            found[columns.POSITION] = request.position + places
        return found

    def prompts(self, request: SampleRequest) -> dict[str, torch.Tensor]:
        """The prompts of a request, those of a group adjacent, and which they are."""
        n = request.num_completions
        names = ("position", "num_prompts", "num_completions")
        options = {name: getattr(request, name) for name in names}
        with self._turns:
            self.env.return_texts = request.return_texts
            observation, infos = self.env.reset(options=options)
        device = observation[columns.PROMPT_IDS].device
        groups = torch.tensor(request.positions).repeat_interleave(n)
        row_ids = groups * (request.stride or n) + torch.arange(n).repeat(request.num_prompts)
        return {
            **observation,
            columns.PROMPT_INDEX: infos[columns.PROMPT_INDEX],
            columns.ROW_ID: row_ids.to(device),
            columns.GROUP: groups.to(device),
            **self.origin(groups.to(device), request),
        }

    def judge(self, completions: Mapping[str, torch.Tensor], global_step: int) -> Judgement:
        """The results of `step` for completions of the last prompts.

        Args:
            global_step: updates done before these were sampled, for reward functions that ask.

        What is learnt from is `infos["scores"]`. An environment that gives none is learnt from by
        its rewards, all rows of which count unless `infos["valid"]` says otherwise. One that said
        a part of the completions itself tells which tokens were sampled (see `info_columns`).
        Components, metrics and texts are there to be read, and may be left out.

        Raises:
            Problems: what it says of tokens does not fit the completions.
        """
        with self._turns:
            self.env.global_step = global_step
            _, rewards, _, _, infos = self.env.step(completions)
        rewards = torch.as_tensor(rewards, dtype=torch.float32)
        judged = {
            columns.SCORES: infos.get(columns.SCORES, rewards),
            columns.VALID: infos.get(columns.VALID, torch.ones_like(rewards, dtype=torch.bool)),
        }
        if columns.REF_LOGPROBS in infos:
            judged[columns.REF_LOGPROBS] = infos[columns.REF_LOGPROBS]
        apart = (columns.REWARD_PART, columns.REWARD_WEIGHT, "teacher_")
        judged.update({name: infos[name] for name in infos if name.startswith(apart)})
        judged.update(info_columns(infos, completions[columns.COMPLETION_MASK]))
        texts = {n: infos[n] for n in (columns.IMAGES,) if n in infos}
        if "completion_texts" in infos:
            texts |= {"prompt": infos["prompt_texts"], "completion": infos["completion_texts"]}
            texts |= {name: infos[name] for name in ("turns", "question") if name in infos}
        components, metrics = (dict(infos.get(name, {})) for name in ("components", "metrics"))
        return Judgement(rewards, judged, components, metrics, texts)


@dataclass
class UnjudgedBatch:
    """Completions of a request that are to be judged.

    version: of the weights that made them. prompts: columns of the prompts. completions: columns,
    or conversations that are over. step: updates done when the weights were published.
    timings, weights: see `JudgedBatch`. continues: see `JudgedGroup`. masks_stale_prefix: see
    `ServingSettings`.
    """

    request: SampleRequest
    version: int
    prompts: dict[str, torch.Tensor]
    completions: Any
    step: int
    timings: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    continues: bool = False
    masks_stale_prefix: bool = False


class Sampler:
    """Answers requests; an answer depends only on request, seed and weights.

    Args:
        params: says how to sample; given whether to explore.
        seed: of the noise, together with the id of a row.
        on_judged: is given each batch that was judged for a request; what it returns is handed
            out.
    """

    takes_rows = True  # whether its completions are independent rows of an engine

    def __init__(
        self, environment: SamplingEnvironment, policy: SamplingPolicy, *,
        params: Callable[[bool], SamplingParams], seed: int, name: str = "the sampler",
        phase: Phases | None = None,
        on_judged: Callable[[JudgedBatch], JudgedBatch] = lambda batch: batch,
    ) -> None:  # fmt: skip
        self.phase = phase or Phases(IDLE)
        self.environment = environment
        self.policy = policy
        # A second copy of the policy, where rows finish on weights before the newest.
        self.older_policy: SamplingPolicy | None = None
        self.weights = WeightsReceiver()
        self._published: tuple[int, int] | None = None  # of the last request
        self._step = 0  # updates done when those were published
        self.params, self.seed, self.name, self._on_judged = params, seed, name, on_judged

    def of(self, request: SampleRequest) -> Sampler:
        """The sampler of the environment that a request is for."""
        return self

    def sample(self, request: SampleRequest) -> JudgedBatch:
        """Judged completions made with the weights that the policy has.

        Raises:
            RuntimeError: it was never given any.
            UnjudgedError: no row could be judged.
        """
        return self._score(self.environment, self.generate(request))

    def generate(
        self, request: SampleRequest, published: PublishedWeights | None = None
    ) -> UnjudgedBatch:
        """Completions made with the published weights, or those that the policy has, to be judged.

        Raises:
            WeightsLostError: the weights are not to be had.
            RuntimeError: the policy was never given any.
        """
        with self._generating(request, published) as generated:
            rows, n = self.environment.prompts(request), request.num_completions
            params = self.params(request.explore)
            asked = Generation(
                params, n, self.seed, rows[columns.ROW_ID].cpu(), weights=self._published,
                on_step=self.phase.steps(f"of {params.max_new_tokens} tokens"),
            )  # fmt: skip
            of_prompts = (columns.PROMPT_IDS, columns.PROMPT_MASK, columns.IMAGE_ROW)
            prompts = {name: rows[name][::n] for name in of_prompts if name in rows}
            prompts |= {name: rows[name] for name in filter(is_image, rows)}
            generated.prompts = rows
            generated.completions = self.policy.generate(prompts, asked)
        return generated

    @contextlib.contextmanager
    def _generating(
        self, request: SampleRequest, published: PublishedWeights | None
    ) -> Iterator[UnjudgedBatch]:
        """A batch whose prompts and completions are to be set, with the weights in their place."""
        cores = CpuClock()
        if published is not None:
            if self.policy.takes_weights:
                with self.phase(LOADING):
                    self.weights.receive(published, self.policy.load)
            self._published, self._step = published.order, published.version
        if not self.policy.has_weights:
            raise RuntimeError(f"{self.name} has no weights yet: publish them, or set_state()")
        generated = UnjudgedBatch(request, self.weights.version, {}, {}, self._step)
        first, last = request.positions[0], request.positions[-1]
        with self.phase(GENERATING, f"{GENERATING} for prompts {first}-{last}"):
            yield generated
        generated.timings["generate_seconds"] = self.phase.took[GENERATING]
        generated.timings["starved_seconds"] = cores.lap()[0]
        generated.weights = self.weights.metrics()

    def judge(self, generated: UnjudgedBatch, *, beside: bool = False) -> JudgedBatch:
        """The completions with their scores; where no row could be judged, rows that are not valid,
        and the cause.

        Args:
            beside: whether the environment may hand out other prompts meanwhile: callable from any
                thread during sampling. Else the completions are of the prompts handed out last.
        """
        here = contextlib.nullcontext(self.environment)
        beside_it = self._environment_beside(generated.request) if beside else here
        with beside_it as environment, contextlib.nullcontext() if beside else self.phase(JUDGING):
            try:
                batch = self._score(environment, generated)
            except UnjudgedError as error:
                batch = self._unjudged(generated, error)
        return self._on_judged(batch)

    def _environment_beside(
        self, request: SampleRequest
    ) -> contextlib.AbstractContextManager[SamplingEnvironment]:
        return self.environment.judging(request)

    def _score(self, environment: SamplingEnvironment, generated: UnjudgedBatch) -> JudgedBatch:
        start = time.perf_counter()
        judged = environment.judge(generated.completions, generated.step)
        return self._judged(generated, judged, time.perf_counter() - start)

    def _unjudged(self, generated: UnjudgedBatch, error: UnjudgedError) -> JudgedBatch:
        """Rows that are not valid, with what failed on them, and the cause."""
        ids = generated.completions[columns.COMPLETION_IDS]
        rewards = ids.new_zeros(len(ids), dtype=torch.float32)
        valid = torch.zeros_like(rewards, dtype=torch.bool)
        scores = {columns.SCORES: rewards, columns.VALID: valid}
        failed = failed_metrics(error, rewards)
        judged = Judgement(rewards, scores, metrics=failed, cause=str(error))
        return self._judged(generated, judged, 0.0)

    def _judged(self, generated: UnjudgedBatch, judged: Judgement, seconds: float) -> JudgedBatch:
        # What prompts show stays here: rows say where it is to be read again.
        prompts = {n: column for n, column in generated.prompts.items() if not is_image(n)}
        made = {**prompts, **generated.completions, **judged.columns}
        sampled = columns.sampled_mask(made)
        versions = torch.full_like(sampled, generated.version, dtype=torch.int32)
        # Where the environment, or an engine, says which weights sampled what, that holds; an
        # engine does not know what the environment says was not sampled.
        versions = made.get(columns.WEIGHTS_VERSION, versions).where(sampled, NO_VERSION)
        made[columns.WEIGHTS_VERSION] = versions
        if generated.masks_stale_prefix:
            newest = versions.max(dim=1, keepdim=True).values
            made[columns.LOSS_MASK] = sampled & (versions == newest)
        return JudgedBatch(
            columns=made, rewards=judged.rewards, components=judged.components,
            metrics=judged.metrics, texts=judged.texts, cause=judged.cause,
            timings={**generated.timings, "judge_seconds": seconds}, weights=generated.weights,
            pad_token_id=self.policy.pad_token_id,
        )  # fmt: skip

    def differing(self, published: PublishedWeights | None = None) -> list[str]:
        """Names of the parameters that are not as published, after these were loaded; None: not as
        those in use, which are kept. The error in their place where these cannot be had."""
        wanted = published or self.weights.in_use
        if wanted is None or not wanted.ref or not self.policy.takes_weights:
            return []
        try:
            if published is not None:
                self.weights.receive(published, self.policy.load)
            return self.policy.differing(self.weights.published_bytes())
        except WeightsLostError as error:
            return [str(error)]

    def close(self) -> None:
        """Closes the policy and the environment."""
        self.policy.close()
        if self.older_policy is not None:
            self.older_policy.close()
        self.environment.env.close()


class MixedSampler(Sampler):
    """Samplers of several environments that share a policy and its weights: each answers the
    requests for its own.

    Args:
        samplers: by `SampleRequest.env`.
    """

    def __init__(self, samplers: Mapping[int, Sampler]) -> None:
        self._samplers, first = samplers, next(iter(samplers.values()))
        super().__init__(
            first.environment, first.policy, params=first.params, seed=first.seed, name=first.name,
            phase=first.phase,
        )  # fmt: skip
        self.takes_rows = all(sampler.takes_rows for sampler in samplers.values())
        for sampler in samplers.values():
            sampler.weights = self.weights

    def of(self, request: SampleRequest) -> Sampler:
        sampler = self._samplers[request.env]
        sampler.phase = self.phase  # the driver sets it
        return sampler

    def generate(
        self, request: SampleRequest, published: PublishedWeights | None = None
    ) -> UnjudgedBatch:
        return self.of(request).generate(request, published)

    def judge(self, generated: UnjudgedBatch, *, beside: bool = False) -> JudgedBatch:
        return self.of(generated.request).judge(generated, beside=beside)

    def sample(self, request: SampleRequest) -> JudgedBatch:
        return self.of(request).sample(request)

    def close(self) -> None:
        super().close()
        for sampler in self._samplers.values():
            if sampler.environment is not self.environment:
                sampler.environment.env.close()


def failed_metrics(error: UnjudgedError, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metric of what failed on all rows, as many as `like` has."""
    return {f"{error.judge}{columns.FAILED}": torch.ones_like(like)}
