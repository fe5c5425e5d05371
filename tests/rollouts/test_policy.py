"""What a sampler asks of an engine, and what it makes of the answer."""

from __future__ import annotations

import pytest
import torch

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import ENGINES, Ended, Engine, Noise, Row, Tokens, engine_class
from rllib_llm.rollouts.policy import EnginePolicy, Generation
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny


class Scripted(Engine):
    """Repeats a row's number as often as its prompt has tokens, the last row first."""

    version = 5

    def __init__(self, *, knows_versions: bool = False) -> None:
        self.knows_versions = knows_versions
        self.asked: list[Row] = []
        self.running: list[Row] = []

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, rows):
        self.asked += rows
        self.running += rows

    def step(self):
        row = self.running.pop()
        n = len(row.token_ids)
        finish = "stop" if n == 1 else "length"
        return [Ended(row.id, [row.noise.row] * n, [-0.5] * n, [self.version] * n, finish)]

    def sampled(self, ids, starts):
        return [Tokens([], [], []) for _ in ids]

    def abort(self, ids):
        out = [row.id for row in self.running if row.id in ids]
        self.running = [row for row in self.running if row.id not in ids]
        return [Ended(row_id, [], [], [], "aborted") for row_id in out]

    def load(self, weights, version, in_flight="finish"):
        self.version, self.loaded = version, (weights, in_flight)

    def close(self):
        self.version = None


class OfBatches(Scripted):
    """It says that it is asked for whole batches."""

    takes_rows = False


@pytest.mark.parametrize("knows_versions", [False, True])
def test_an_engine_is_asked_for_every_completion_of_a_batch(knows_versions):
    engine, params = Scripted(knows_versions=knows_versions), SamplingParams(0, max_new_tokens=4)
    prompts = {
        columns.PROMPT_IDS: torch.tensor([[0, 0, 5], [6, 7, 8]]),
        columns.PROMPT_MASK: torch.tensor([[False, False, True], [True, True, True]]),
    }
    asked = Generation(params, 2, 9, torch.tensor([40, 41, 42, 43]), weights=(3, 12))
    made = EnginePolicy(engine, tiny.MODEL).generate(prompts, asked)
    rows = engine.asked
    # Two completions of each prompt, without its padding, those of a prompt adjacent.
    assert [list(row.token_ids) for row in rows] == [[5], [5], [6, 7, 8], [6, 7, 8]]
    assert [row.noise for row in rows] == [Noise(9, row) for row in (40, 41, 42, 43)]
    assert len({row.id for row in rows}) == 4 and all(row.params == params for row in rows)
    assert {row.published for row in rows} == {(3, 12)}
    ids = [[40, 0, 0], [41, 0, 0], [42] * 3, [43] * 3]
    assert made[columns.COMPLETION_IDS].tolist() == ids
    assert made[columns.COMPLETION_MASK].sum(dim=1).tolist() == [1, 1, 3, 3]
    assert made[columns.FINISHED].tolist() == [True, True, False, False]
    # Of an engine that does not know them the sampler's own are stamped.
    assert (columns.WEIGHTS_VERSION in made) == knows_versions
    if knows_versions:
        versions = made[columns.WEIGHTS_VERSION][made[columns.COMPLETION_MASK]]
        assert versions.tolist() == [5] * 8


ROW = Row("a", [1, 2], SamplingParams(0, max_new_tokens=4))


def test_an_engine_is_borrowed_and_stays_open():
    engine = Scripted()
    policy = EnginePolicy(engine, tiny.MODEL)
    loan = policy.open_engine(9)
    loan.add([ROW])
    assert [each.versions for each in loan.step()] == [[9, 9]]  # of the weights that it was lent by
    loan.add([ROW])
    loan.close()
    assert engine.num_running == 0 and policy.has_weights


def test_weights_of_a_loan_come_by_its_own_way():
    engine = Scripted()
    policy = EnginePolicy(engine, tiny.MODEL)
    loan = policy.open_engine(None, load_weights=lambda _: policy.set_state({"w": 1}))
    loan.load({}, 8, "recompute")
    assert engine.loaded == ({"w": 1}, "recompute")
    loan.add([ROW])
    assert [each.versions for each in loan.step()] == [[8, 8]] and loan.version == 8
    policy.set_state({"w": 2})  # of a batch: what samples now is stamped by who asks
    assert engine.loaded == ({"w": 2}, "keep") and engine.version == 8


def test_an_engine_of_batches_is_not_borrowed():
    with pytest.raises(Problems) as caught:
        EnginePolicy(OfBatches(), tiny.MODEL).open_engine(0)
    assert caught.value.problem.name == "engine"


def test_names_of_engines_are_those_of_their_classes():
    for name in set(ENGINES) | {"tests.rollouts.test_policy.OfBatches"}:
        assert issubclass(engine_class(name), Engine)
    with pytest.raises(Problems) as caught:
        engine_class("tests.rollouts.test_policy.ROW")
    assert caught.value.problem.name == "engine"
