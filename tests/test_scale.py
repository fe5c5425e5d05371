"""What the scaling page says of the simulated and counted benchmarks holds of the code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.learning.learners import balance
from benchmarks.loop.cost_model import gpu_of, predict
from benchmarks.sampling.fleet import Fleet, waits
from rllib_llm.rollouts import workers
from scripts.scale import Job, Model

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text("utf-8").splitlines()]


@pytest.fixture(autouse=True)
def own_clock(monkeypatch):
    """A fleet gives the driver its simulated clock."""
    monkeypatch.setattr(workers, "time", workers.time)


def test_groups_of_equal_length_wait_as_little_with_ten_samplers_as_with_one():
    found = []
    for num_samplers in (1, 10):
        fleet = Fleet(num_samplers, 64, "lockstep", sigma=0.0)
        fleet.run(20)
        found.append(sorted(fleet.waits)[len(fleet.waits) // 2])
    assert found == [0.0, 0.0]


def test_the_recorded_waits_are_those_of_this_code():
    recorded = [line for line in lines("fleet_waits.jsonl") if line["samplers"] == 1]
    assert waits(1, argparse.Namespace(slots=64, updates=20)) == recorded


def test_the_longer_runs_have_the_same_waits():
    """Both files were written by the same simulation, of up to 1,000 samplers."""
    known = {(line["schedule"], line["samplers"]): line for line in lines("fleet.jsonl")}
    compared = 0
    for line in lines("fleet_waits.jsonl"):
        other = known.get((line["schedule"], line["samplers"]))
        if line["lengths"] == "log-normal" and other is not None:
            assert line["wait_s"] == other["wait_s"]
            compared += 1
    assert compared == 8


@pytest.mark.parametrize("num_learners", [2, 4])
def test_no_learner_waits_for_more_than_five_per_cent_of_the_tokens(num_learners):
    recorded = [line for line in lines("learners_tokens.jsonl") if line["rows"] == 64]
    found = balance(num_learners, 64)
    assert found in recorded
    assert float(found["ddp"].rstrip("%")) <= 5.0
    assert float(found["fsdp"].rstrip("%")) <= 5.0


def test_recorded_predictions_are_those_of_the_cost_model():
    for line in lines("cost_model.jsonl"):
        model = Model(
            *(line[key] for key in ("model", "params", "layers", "kv_width", "number_bytes"))
        )
        gpu = gpu_of(line["constants"])
        found = predict(line["what"], model, Job(**line["job"]), gpu, line["nodes"])
        assert (line["what"], round(found, 3)) == (line["what"], line["predicted"])
