"""Samplers in this process, and scripted groups of them."""

from __future__ import annotations

import ray
import torch
from ray.exceptions import ActorUnavailableError

from rllib_llm.rollouts.env_runner import RLHFEnvRunner
from rllib_llm.rollouts.groups import Lease
from rllib_llm.rollouts.in_flight import SingleRows
from rllib_llm.rollouts.judged_batch import JudgedBatch, SampleRequest
from rllib_llm.rollouts.schedule import ServingSettings
from rllib_llm.shared import columns
from rllib_llm.weights.published import PublishedWeights

NUM_COMPLETIONS = 3  # of each prompt that is streamed


def build_sampler(config, worker_index: int = 0, *, has_weights: bool = True) -> RLHFEnvRunner:
    """A sampler as an actor would hold it, for `worker_index` above 0, but here. `has_weights`: it
    was given those that it starts from."""
    config = config.copy(copy_frozen=False)
    config.validate()
    sampler = RLHFEnvRunner(config=config, worker_index=worker_index, num_workers=2)
    if has_weights:
        sampler.set_state(sampler.get_state())
    return sampler


def publication(version: int = 0, key: str | None = None) -> PublishedWeights:
    """Weights that the samplers have already."""
    return PublishedWeights(version, key or f"weights {version}")


def stream(sampler, version=0, **settings) -> SingleRows:
    """Rows of a sampler that are sampled one by one, `NUM_COMPLETIONS` of each prompt."""
    given = {"in_flight": "keep", **settings}
    made = SingleRows(sampler, ServingSettings(NUM_COMPLETIONS, **given))
    made.load(publication(version), version)
    return made


def finish(made: SingleRows, sampler) -> dict[int, JudgedBatch]:
    """The groups, judged, until none is left, by position."""
    found = {}
    while made.leases:
        for _, generated in made.step():
            batch = sampler.judge(generated, beside=True)
            found[int(batch.columns[columns.GROUP][0])] = batch
    return found


def judged(sampler, request: SampleRequest, published: PublishedWeights) -> JudgedBatch:
    """What a sampler, or its runner, makes of a request."""
    sampler = getattr(sampler, "sampler", sampler)
    return sampler.judge(sampler.generate(request, published))


def dealt(runner: RLHFEnvRunner, request: SampleRequest, published: PublishedWeights):
    """The answer of a runner that is dealt a request as a lease: its batch, or why there is none.
    """
    lease = Lease(1, request.position, request.num_prompts, published)
    answer = runner.serve(lease, ServingSettings(request.num_completions))
    return answer[0].payload.batch if isinstance(answer, list) else answer


class Counted(RLHFEnvRunner):
    """Notes how often RLlib sets its weights."""

    num_set = 0

    def set_state(self, state):
        self.num_set += 1
        super().set_state(state)


def how_it_got_weights(runner: Counted) -> tuple[int, bool, int]:
    """How often RLlib set them, whether they are the published memory itself, and their version."""
    return runner.num_set, runner.policy.loader.is_aliased, runner.sampler.weights.version


class ScriptedActors:
    """`SamplerActors` whose samplers live here. `does`: what happens to each part that is asked
    for, in order: its sampler "dies", "hangs" or (also behind the end) serves. `revives_after`:
    pings until a dead one is back. `first`: position of the requests, that parts are noted by."""

    def __init__(self, samplers, *, does=(), revives_after: int = 1, first: int = 0):
        self.samplers = {i + 1: sampler for i, sampler in enumerate(samplers)}
        self.does = list(does)
        self.revives_after = revives_after
        self.first = first
        self.dead: dict[int, int] = {}  # pings since its death, by worker
        self.hung: set[int] = set()
        self.served: list[tuple[int, int]] = []  # (worker, first prompt of its part)
        self.killed: list[int] = []
        self.ends: dict[object, object] = {}  # of each call: its answer, or why there is none

    @property
    def workers(self):
        return list(self.samplers)

    def healthy(self):
        return [worker for worker in self.samplers if worker not in self.dead]

    def mark(self, worker, *, healthy):
        self.hung.discard(worker)
        silent = [call for call, end in self.ends.items() if end is None]
        for call in silent:
            if call.worker == worker:
                del self.ends[call]
        if healthy:
            self.dead.pop(worker, None)
        else:
            self.dead.setdefault(worker, 0)

    def processes(self, worker):
        return []

    def kill(self, worker):
        self.killed.append(worker)

    def call(self, worker, method, *args):
        call = Call(worker)
        if method == "ping":
            self.dead[worker] += 1
            back = self.dead[worker] >= self.revives_after
            self.ends[call] = "pong" if back else ActorUnavailableError("no memory", None)
            return call
        assert method == "serve" and worker not in self.dead and worker not in self.hung
        assert worker not in [made.worker for made in self.ends]
        happens = self.does.pop(0) if self.does else "serves"
        lease, settings = args
        if happens == "dies":
            self.ends[call] = ActorUnavailableError("no memory", None)
        elif happens == "hangs":
            self.hung.add(worker)
            self.ends[call] = None
        else:
            self.served.append((worker, lease.position - self.first))
            self.ends[call] = self.samplers[worker].serve(lease, settings)
        return call

    def ready(self, calls, timeout_s):
        return [call for call in calls if call.worker not in self.hung]

    def answer(self, call, timeout_s=None):
        end = self.ends.pop(call)
        if isinstance(end, Exception):
            raise end
        return end


class Call:
    """Stands for the reference of an answer."""

    def __init__(self, worker):
        self.worker = worker


def assert_same_batch(one, other) -> None:
    """But for who judged it."""
    assert one.columns.keys() == other.columns.keys()
    for name, column in one.columns.items():
        assert name == columns.REPLICA or torch.equal(column, other.columns[name]), name
    assert torch.equal(one.rewards, other.rewards)


def put(flat) -> tuple[ray.ObjectRef, ...]:
    return (ray.put(flat),)
