"""How a judge's scores agree with labels, against values worked out by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.envs.judges.calibration import calibrate, compare
from rllib_llm.envs.judges.rewards import Invalid
from rllib_llm.shared.errors import Problems

ROWS = [
    {"prompt": "p", "completion": text, "label": label}
    for text, label in [("a", 0), ("bb", 0), ("ccc", 1), ("bb", 1), ("?", 1)]
]


def length(completions):
    return [Invalid("it is a riddle") if text == "?" else len(text) for text in completions]


def test_a_judge_against_two_labels():
    with pytest.warns(UserWarning, match="it is a riddle"):
        found = calibrate(length, ROWS, num_bins=2)
    assert (found.num_rows, found.num_invalid) == (5, 1)
    assert found.reasons == (("length: it is a riddle", 1),)
    # Scores 1, 2 (label 0) and 3, 2 (label 1): of four pairs three are in order, one is a tie.
    assert found.concordance == pytest.approx((3 + 0.5) / 4)
    # From 2 on "1": three of four are right; so they are from 3 on, which is the later threshold.
    assert found.accuracy == 0.75 and found.threshold in (2.0, 3.0)
    # At 2: it says "1" to 3/4, half are: chance is 3/8 + 1/8 = 1/2, kappa (3/4 - 1/2) / (1/2).
    assert found.kappa == pytest.approx(0.5)
    assert [(b.low, b.high, b.num_rows, b.mean_label) for b in found.bins] == [
        (1.0, 2.0, 2, 0.0), (2.0, 3.0, 2, 1.0),
    ]  # fmt: skip


def test_a_judge_against_graded_labels():
    scores, labels = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 40.0, 30.0])
    found = compare(scores, labels, torch.ones(4, dtype=torch.bool))
    # Spearman without ties: 1 - 6 * (0 + 0 + 1 + 1) / (4 * 15).
    assert found.rank_correlation == pytest.approx(0.8)
    assert found.concordance == pytest.approx(5 / 6)
    assert math.isnan(found.threshold) and math.isnan(found.kappa)


def test_nothing_to_compare():
    alike = compare(torch.ones(3), torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert math.isnan(alike.concordance) and math.isnan(alike.rank_correlation)
    none = compare(torch.ones(2), torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.bool))
    assert none.num_invalid == 2 and none.bins == () and none.lines()
    with pytest.raises(ValueError, match=r"there is no \['label'\]"):
        calibrate(length, [{"prompt": "p", "completion": "a"}])


def test_the_command_prints_and_writes_the_report(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_judge.py").write_text(
        "def judge(completions, factor=1):\n    return [factor * len(text) for text in completions]"
    )
    out = tmp_path / "report.json"
    spec = "{function: own_judge.judge, kwargs: {factor: 2}}"
    result = CliRunner().invoke(app, ["judge", str(rows), "-f", spec, "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["num_rows"] == 5 and report["num_invalid"] == 0
    assert report["bins"][-1]["high"] == 6.0
    assert "concordance" in result.output
    missing = CliRunner().invoke(app, ["judge", str(rows), "-f", "own_judge.judge", "--label", "x"])
    assert missing.exit_code == 2 and "must have the columns" in missing.output
    assert "--label" in missing.output


def test_a_reward_server_wants_a_token(monkeypatch):
    monkeypatch.delenv("RLLIB_REWARD_TOKEN", raising=False)
    result = CliRunner().invoke(app, ["reward-server", "-f", f"{__name__}.length"])
    assert result.exit_code == 2 and "RLLIB_REWARD_TOKEN must hold the token" in result.output


@pytest.mark.parametrize("label", [None, "1", float("nan")])
def test_labels_that_are_no_numbers_are_named(label):
    rows = [{"prompt": "p", "completion": "c", "label": one} for one in (1, label)]
    with pytest.raises(Problems) as caught:
        calibrate(lambda completions: [1.0, 2.0], rows)
    assert caught.value.problem.name == "label in row 1"
