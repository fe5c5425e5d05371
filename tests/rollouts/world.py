"""A run on a clock of its own: the real ledger, source, driver's looks at samplers, and samplers'
turns; scripted engines, judges, deaths, hangs and delays, in an order that a random generator
decides."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import torch
from ray.exceptions import RayError

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Ended, Tokens
from rllib_llm.envs.actions import Judgement
from rllib_llm.envs.judges.rewards import UnjudgedError
from rllib_llm.rollouts.errors import Faults
from rllib_llm.rollouts.ledger import Ledger
from rllib_llm.rollouts.policy import ModulePolicy
from rllib_llm.rollouts.sample_loop import SampleLoop, SamplerLedger
from rllib_llm.rollouts.sampler import Sampler
from rllib_llm.rollouts.schedule import ServingSettings, StreamRules
from rllib_llm.rollouts.source import RolloutSource
from rllib_llm.rollouts.workers import PulledLeases
from rllib_llm.shared import columns
from rllib_llm.weights.published import PublishedWeights
from tests.rollouts.simulated import Clock

N = 2  # completions of a prompt
PARAMS = SamplingParams(pad_token_id=0, max_new_tokens=64)
MOST_EVENTS = 6000  # for a batch
SECONDS_OF_AN_EVENT = 0.1
LIMIT = 10.0  # seconds of a lease
MOST_JUDGED = 20_000  # some 60 MB


def length(position: int, i: int) -> int:
    """Tokens of a completion; some are there through several updates."""
    is_long = position % 5 == 2 and i == 0
    return 1 + (position * 5 + i * 3) % 7 + 30 * is_long


def judge_seconds(position: int) -> float:
    """Seconds that a group's judge takes: for some prompts longer than a lease."""
    return 1.5 * LIMIT if position % 13 == 4 else 0.0


def fate(position: int) -> str:
    """What becomes of a prompt's group, whoever samples it."""
    return {3: "unjudged", 5: "dull"}.get(position % 11, "trained")


def is_not_dull(group):
    return fate(group.position) != "dull", "dull"


class ScriptedEngine:
    """An engine that samples a token a row and step, stamped with its version."""

    def __init__(self, load_weights):
        self._load_weights, self.version, self.rows = load_weights, None, {}

    @property
    def num_running(self):
        return len(self.rows)

    num_sampling = num_running

    def add(self, rows):
        assert self.version is not None
        for row in rows:
            assert row.id not in self.rows
            self.rows[row.id] = (row, [])

    def step(self):
        done = []
        for row_id, (row, versions) in self.rows.items():
            versions.append(self.version)
            if row.num_sampled + len(versions) == length(*row_id):
                done.append(row_id)
        return [self._ended(i, "stop") for i in done]

    def _ended(self, row_id, finish):
        tokens = self._tokens(row_id)
        del self.rows[row_id]
        return Ended(row_id, tokens.token_ids, tokens.logprobs, tokens.versions, finish)

    def _tokens(self, row_id):
        row, versions = self.rows[row_id]
        ids = [row.num_sampled + k for k in range(len(versions))]
        return Tokens(ids, [0.0] * len(ids), list(versions), [])

    def abort(self, ids):
        return [self._ended(i, "aborted") for i in ids if i in self.rows]

    def sampled(self, ids, starts):
        return [self._tokens(i) for i in ids]

    def holds(self, row_id):
        return row_id in self.rows

    def load(self, weights, version, in_flight="finish"):
        assert in_flight != "finish" or not self.rows
        self._load_weights(weights)
        self.version = version

    def close(self):
        self.rows.clear()


class ScriptedPolicy(ModulePolicy):
    """A policy with an engine of its own."""

    pad_token_id, has_weights = 0, True

    def __init__(self):
        """Without a module."""

    def open_engine(self, version, *, load_weights=None):
        return ScriptedEngine(load_weights)

    def load(self, weights):
        """Nothing to be done."""

    def generate(self, prompts, asked):
        return dict(completions_of(tuple(asked.row_ids.tolist())))


@functools.cache
def completions_of(row_ids):
    """Columns of these rows' completions; nobody writes into them."""
    lengths = [length(row // N, row % N) for row in row_ids]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    return {
        columns.COMPLETION_IDS: mask.long(),
        columns.COMPLETION_MASK: mask,
        columns.SAMPLER_LOGPROBS: mask.float(),
        columns.FINISHED: torch.ones(len(lengths), dtype=torch.bool),
    }


@functools.cache
def prompts_of(positions):
    """Columns of the prompts, each N times; nobody writes into them."""
    rows = [p for p in positions for _ in range(N)]
    ones = torch.ones(len(rows), 1, dtype=torch.int64)
    return {
        columns.PROMPT_IDS: ones,
        columns.PROMPT_MASK: ones.bool(),
        columns.ROW_ID: torch.tensor([p * N + i for p in positions for i in range(N)]),
        columns.GROUP: torch.tensor(rows),
    }


class Receiver:
    """Notes which weights are in use."""

    version = 0

    def receive(self, published, load):
        self.version = published.version

    def metrics(self):
        return {}


class Calm:
    """Judges raise nothing by themselves."""

    def judge(self, position):
        """May raise."""

    def fate(self, position):
        """See `fate`."""
        return fate(position)


class ScriptedEnvironment:
    """A `SamplingEnvironment`; its judge raises, as that of an environment does, where it can score
    no row."""

    def __init__(self, judges, request=None):
        self._judges, self._request = judges, request

    def prompts(self, request):
        return dict(prompts_of(tuple(request.positions)))

    @contextlib.contextmanager
    def judging(self, request):
        yield ScriptedEnvironment(self._judges, request)

    def judge(self, completions, global_step):
        positions = self.prompts(self._request)[columns.GROUP].tolist()
        for position in positions[::N]:
            self._judges.judge(position)
        valid = torch.tensor([self._judges.fate(position) != "unjudged" for position in positions])
        if not valid.any():
            raise UnjudgedError("scripted", "scripted")
        return Judgement(valid.float(), {columns.SCORES: valid.float(), columns.VALID: valid})


class ScriptedSampler(Sampler):
    """A sampler whose environment and policy are scripted; it samples rows, and batches."""

    def __init__(self, judges=None):
        super().__init__(
            ScriptedEnvironment(judges or Calm()),
            ScriptedPolicy(),
            params=lambda explore: PARAMS,
            seed=0,
        )
        self.older_policy, self.weights = ScriptedPolicy(), Receiver()


class LateLoop(SampleLoop):
    """A loop whose judges end when the world says so, and may raise what passes by itself.

    What becomes of completions follows from them alone: those that came before, in any world, are
    not judged, filtered and packed again, since that costs more than all else in a schedule.
    """

    judged: dict = {}  # groups by all that they follow from, the last of them

    def __init__(self, world, end, sampler, settings):
        super().__init__(end, sampler, settings)
        self._world, self._threads = world, LateCalls(world.judged_at)

    def _judged(self, generated):
        request, columns_of = generated.request, generated.completions
        self._world.judge(request)
        for position in request.positions:
            self._world.fates.together.setdefault(position, set()).add(tuple(request.positions))
        versions = columns_of.get(columns.WEIGHTS_VERSION)
        key = (
            request, generated.continues, columns_of[columns.COMPLETION_MASK].numpy().tobytes(),
            generated.version if versions is None else versions.numpy().tobytes(),
        )  # fmt: skip
        if key not in self.judged:
            if len(self.judged) == MOST_JUDGED:
                self.judged.clear()
            self.judged[key] = super()._judged(generated)
        return list(self.judged[key])


class Call:
    """A `Future` of one thread: it needs no locks."""

    def __init__(self):
        self._is_done, self._result, self._error = False, None, None

    def set_result(self, result):
        self._is_done, self._result = True, result

    def set_exception(self, error):
        self._is_done, self._error = True, error

    def done(self):
        return self._is_done

    def exception(self):
        assert self._is_done, "nobody would ever end it"
        return self._error

    def result(self):
        if self.exception() is not None:
            raise self._error
        return self._result


class LateCalls:
    """An executor whose calls end when the world says so.

    Args:
        due: the second before which a call does not end, given its arguments.
    """

    def __init__(self, due=lambda *args: 0.0):
        self.waiting, self._due = [], due

    def submit(self, function, *args):
        call = Call()
        self.waiting.append((self._due(*args), call, function, args))
        return call

    def end(self, i, now):
        """Ends a call, unless it is not due."""
        if self.waiting[i][0] > now:
            return False
        _, call, function, args = self.waiting.pop(i)
        try:
            call.set_result(function(*args))
        except (OSError, UnjudgedError) as error:
            call.set_exception(error)
        return True

    def shutdown(self, **_):
        self.waiting.clear()


class SamplerEnd(SamplerLedger):
    """`SamplerLedger` whose calls come to the ledger at once, or when the world says so."""

    def __init__(self, world, name):
        self._world, self.sampler = world, name
        self.late = LateCalls()

    def lease(self, num_groups, holding, wait_s):
        return self.late.submit(self._call, "lease", self.sampler, num_groups, list(holding))

    def call(self, name, *args):
        if name != "give_back":
            return self.late.submit(self._call, name, *args)
        done = Call()
        done.set_result(self._call(name, *args))
        return done

    def _call(self, name, *args):
        answer = self._world.ledger.call(name, *args)
        if name == "lease":
            opened = self._world.rules.envs_of(self.sampler)
            for place in (place for lease in answer for place in lease.places):
                assert opened is None or place.env in opened, f"{self.sampler} does not open it"
        return answer


class SimulatedLedger(Ledger):
    """On the world's clock; while the driver waits, things happen.

    Args:
        raised: positions of the groups for which a judge raised so far.
    """

    def __init__(self, rules, clock, raised):
        super().__init__(rules, keeps_rejected=True, clock=clock)
        self._raised = raised

    actor = None

    def call(self, name, *args):
        held = self._not_concerned(args[0]) if name == "fail" else {}
        answer = super().call(name, *args)
        for entry, lease in held.items():
            assert entry.lease == lease, f"group {entry.position} fails with its neighbour"
        return answer

    def _not_concerned(self, lease):
        """Groups of a lease that no judge raised for, which a failure leaves in it."""
        return {
            entry: lease for entry in self.table
            if entry.lease == lease and entry.state == "leased"
            and entry.position not in self._raised
        }  # fmt: skip


class NeverStarved:
    """Processes that always have a core."""

    def __init__(self, pids):
        """Nothing to be done."""

    def take(self):
        return 0.0


class ScriptedPool:
    """`SamplerPool` and `SamplerActors` of samplers that die when the world says so; a call to one
    that is not hung is answered at once."""

    start_limit = float("inf")
    lock = threading.RLock()

    def __init__(self, world, num_samplers):
        self._world, self.faults, self.actors = world, Faults(), self
        self.workers = list(range(1, num_samplers + 1))
        self.names = [str(worker) for worker in self.workers]
        self.num_samplers = 10**6  # so many deaths in a row end no run
        self.marked = set(self.workers)  # as healthy
        self._back = {}  # seconds at which those that died are back, by worker
        self._deaths = Counter()

    def die(self, name, *, away):
        self._deaths[int(name)] += 1
        self._back[int(name)] = self._world.clock.now + away

    def healthy(self):
        for worker, back in list(self._back.items()):
            if back <= self._world.clock.now and worker not in self.marked:
                self.marked.add(worker)
                del self._back[worker]
        return sorted(self.marked)

    def processes(self, worker):
        return []

    def mark(self, worker, *, healthy):
        assert not healthy
        self.marked.discard(worker)

    def call(self, worker, method, *args):
        if worker not in self._back:
            self._world.order(str(worker))
        return worker, self._deaths[worker]

    def ready(self, calls, timeout_s):
        hung = self._world.hung
        return [
            (worker, deaths) for worker, deaths in calls
            if str(worker) not in hung or deaths < self._deaths[worker]
        ]  # fmt: skip

    def answer(self, call):
        worker, deaths = call
        if deaths < self._deaths[worker] or worker in self._back:
            raise RayError("it died")

    def replace(self, worker, reason):
        self._world.die(str(worker))
        self.marked.discard(worker)


@dataclass
class Fates:
    """What became of every position, over all restores."""

    trained: Counter = field(default_factory=Counter)
    closed: dict = field(default_factory=dict)
    batches: list = field(default_factory=list)  # (positions, versions as stamped)
    together: dict = field(default_factory=dict)  # positions sampled as one request, by each

    def record(self, groups, status, *, iteration, reason=""):
        for position in groups.columns[columns.GROUP].unique().tolist():
            assert position not in self.closed, f"group {position} is closed twice"
            self.closed[position] = (status, reason)


class WorldTime:
    """The module `time` as the driver and samplers need it, on the newest world's clock."""

    clock: Clock

    @classmethod
    def monotonic(cls):
        return cls.clock.now

    @staticmethod
    def sleep(seconds):
        """The driver is at work all the time."""


class World:
    """A run that goes on as `random` says.

    Args:
        random: decides what happens next.
        rules: of the ledger.
        in_flight: of rows, in `free`.
        troubles: of judges and engines that pass, at most.
    """

    def __init__(self, random: Random, rules: StreamRules, *, in_flight="finish", troubles=0,
                 fates=None, num_samplers=2):  # fmt: skip
        self.random, self.rules, self.clock = random, rules, Clock()
        WorldTime.clock = self.clock
        self.fates = fates or Fates()
        self.troubles, self.in_flight = troubles, in_flight
        self.failed_judging: Counter = Counter()
        self.raised: set[int] = set()
        self.ledger = SimulatedLedger(rules, self.clock, self.raised)
        self.source = RolloutSource(
            self.ledger, self, rules, recorder=self.fates, publish_again=None,
            tell=lambda num_groups: None,
        )  # fmt: skip
        # Conversations are sampled a lease at a time, in this schedule, too.
        self.by_row = rules.schedule == "free" and random.random() < 0.7
        self.ends = {}
        self.hung: set[str] = set()
        self.pool = ScriptedPool(self, num_samplers)
        self.works = {name: self._start(name) for name in self.pool.names}
        self.driver = PulledLeases(
            self.pool, self.ledger, None, answer_seconds=5 * LIMIT, starvation=NeverStarved
        )
        self.driver._look()
        self.version = 0
        self.num_events = 0
        # Where much is amiss no row lives long.
        self.share_of_troubles = random.choice([0.0, 0.2, 1.0])

    def _start(self, name):
        settings = ServingSettings(
            N, self.rules.groups_per_lease,
            env_filters=((f"{__name__}.is_not_dull",),) * len(self.rules.env_weights),
            max_groups=3, in_flight=self.in_flight, by_row=self.by_row, judges_beside=True,
        )  # fmt: skip
        self.ends[name] = SamplerEnd(self, name)
        return LateLoop(self, self.ends[name], ScriptedSampler(), settings)

    def judged_at(self, generated):
        """The second before which a judge does not end."""
        request = generated.request
        return self.clock.now + max(map(judge_seconds, request.positions))

    def judge(self, request):
        """May raise what passes by itself, twice for a prompt at most."""
        # In lockstep a lease that fails three times ends the run.
        num_asked = request.num_prompts if self.rules.schedule == "free" else 1
        for position in request.positions[:num_asked]:
            if self.troubles and self.failed_judging[position] < 2 and self.random.random() < 0.2:
                self.troubles -= 1
                self.failed_judging[position] += 1
                self.raised |= {*request.positions}
                raise OSError("no network")

    # --- workers, as the source sees them --------------------------------------------------

    def work(self):
        self.num_events += 1
        assert self.num_events < MOST_EVENTS, f"it hangs: {self.ledger.look()['waits_for']}"
        self.clock.now += SECONDS_OF_AN_EVENT
        happens = self.random.random()
        if happens < 0.1 and self.random.random() > self.share_of_troubles:
            happens = 0.5
        if happens < 0.02:
            self.die(self.random.choice(self.pool.names))
        elif happens < 0.04:
            self.hung.add(self.random.choice(self.pool.names))
        elif happens < 0.1:
            self.clock.now += self.random.choice([0.1, 1.0, LIMIT * 1.5])
        elif at_work := [name for name in self.works if name not in self.hung]:
            self._turn(self.random.choice(at_work))
        else:  # nothing happens before the driver has seen to it
            self.clock.now += 1.0
        self.driver.work()
        self.require_account()
        self.require_patience()
        self.require_work_for_the_living()

    def _turn(self, name):
        calls = self.ends[name].late
        judges = self.works[name]._threads
        for late in (calls, judges):
            while late.waiting and self.random.random() < 0.7:
                # A sampler's calls are made in their order; judges end in any.
                which = 0 if late is calls else self.random.randrange(len(late.waiting))
                if not late.end(which, self.clock.now):
                    break
        self.works[name].turn()

    def die(self, name):
        """The driver hears of it when it looks, and asks the one that is started in its place to
        work once it is back."""
        self.hung.discard(name)
        self.works.pop(name, None)
        self.pool.die(name, away=self.random.choice([0.0, 1.0, 3 * LIMIT]))

    def order(self, name):
        """The driver asks a sampler to be at work."""
        if name not in self.works:
            self.works[name] = self._start(name)

    def replace(self, sampler, reason):
        self.driver.replace(sampler, reason)

    def require_work_for_the_living(self):
        """Asserts that one that is known to be dead holds no lease."""
        known_dead = {name for name in self.pool.names if int(name) not in self.pool.marked}
        if known_dead:
            holding = {e.sampler for e in self.ledger.table if e.state == "leased"}
            assert not known_dead & holding, known_dead & holding

    def require_patience(self):
        """Asserts that a judge who takes one and a half leases costs one of them: the next is twice
        as long, and stays so when it is renewed."""
        if not self.share_of_troubles:
            for entry in self.ledger.table:
                assert entry.num_expired <= 1, f"group {entry.position} never ends"

    def note_progress(self):
        self.num_events = 0
        self.driver.note_progress()

    def forget(self):
        """Nothing to be done."""

    def stop(self):
        """Nothing to be done."""

    # --- the loop --------------------------------------------------------------------------

    def begin(self):
        self.source.publish(PublishedWeights(self.version))
        return self

    def update(self, num_batches=1, before_publication=None):
        """Takes batches, learns from them, publishes."""
        for _ in range(num_batches):
            held = self.source.next().columns
            positions = held[columns.GROUP].unique_consecutive().tolist()
            versions = held[columns.WEIGHTS_VERSION]
            stamped = versions[held[columns.COMPLETION_MASK]]
            age = self.version - int(stamped.min())
            assert 0 <= age <= self.rules.largest_age, f"{age=} of {positions}"
            self.fates.trained.update(positions)
            oldest = [int(row[row >= 0].min()) for row in versions[::N]]
            self.fates.batches.append((positions, oldest))
        if before_publication is not None:
            before_publication()
        for _ in range(self.random.randint(0, 30)):  # samplers work while the learner learns
            self.work()
        self.version += 1
        self.source.publish(PublishedWeights(self.version))
        self.num_events = 0

    def require_account(self):
        """Asserts that every token is accounted for. Not by `source.metrics`, of which this is the
        least part: it is asked at every event."""
        ledger = self.ledger
        ledger.account.check(ledger.table.num_tokens)

    def restored(self, rules) -> World:
        """Another run that goes on where this one is, under these rules."""
        state = self.source.state()
        for work in self.works.values():
            work.close()
        other = World(
            self.random, rules, in_flight=self.in_flight, troubles=self.troubles,
            fates=self.fates, num_samplers=len(self.pool.names),
        )  # fmt: skip
        other.version = self.version
        other.source.set_state(state | {"weights_version": self.version})
        return other.begin()

    def check(self):
        """Every group before the first open one was trained once, or closed with its reason."""
        self.source._take()  # the driver hears of the last ones
        fates = self.fates
        assert set(fates.trained.values()) <= {1}, "a group was trained twice"
        assert not fates.trained.keys() & fates.closed.keys()
        for position in range(self.ledger.look()["position"]):
            if position not in fates.trained:
                assert position in fates.closed, f"nobody knows what became of group {position}"
            expected = {"trained": None, "dull": "dull", "unjudged": "unjudged"}[fate(position)]
            reason = fates.closed.get(position, ("", None))[1]
            assert reason == expected or reason == "stale"
