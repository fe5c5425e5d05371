"""Stored completions of a tiny run, sampled anew: as they are, and changed by hand."""

from __future__ import annotations

import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.data.rollouts import NoRolloutsError
from rllib_llm.runs.verify import ROUND_OFF, _named, pieces, verify
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny
from tests.cli.said import said


@pytest.fixture(scope="module")
def kept(tmp_path_factory, ray_session):
    """The folder of a run of three iterations of 12 completions whose checkpoint is that after the
    second; three held-out ones, two each of two prompts, before and after."""
    sampled = {"explore": True, "num_completions": 2}
    config = tiny.grpo().evaluation(
        evaluation_interval=2, evaluation_duration=4, evaluation_config=sampled
    )
    folder = tmp_path_factory.mktemp("kept") / "trial"
    with tiny.built(config) as algorithm:
        for iteration in range(3):
            if iteration == 2:
                algorithm.save_to_path(f"{algorithm.logdir}/checkpoint_000001")
            algorithm.train()
        algorithm.recorder.state()  # all that was recorded is written
        shutil.copytree(algorithm.logdir, folder)
    return folder


@pytest.fixture
def run(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "trial")


def changed(run, iteration: int, column: str, change) -> None:
    """Has `change` make other values of a column of all rows of an iteration."""
    for file in run.glob("rollouts/*.parquet"):
        table = pq.read_table(file)
        if set(table.column("iteration").to_pylist()) != {iteration}:
            continue
        place = table.schema.get_field_index(column)
        values = [change(value) for value in table.column(column).to_pylist()]
        field = table.schema.field(place)
        pq.write_table(table.set_column(place, field, pa.array(values, field.type)), file)


def test_what_was_sampled_agrees_and_what_cannot_be_asked_is_said(run):
    (found,) = verify(run, num_samples=1000)
    # Iterations 1 and 3 were sampled by versions 0 and 2, evaluations before 1 and after 2.
    assert found.versions == [0, 2]
    assert found.num_stored == 3 * 12 + 2 * 4
    assert found.num_askable == len(found.completions) == 2 * 12 + 2 * 4
    assert found.missing == {1: 12}
    assert {each.status for each in found.completions} == {"trained", "evaluated"}
    assert found.agrees and all(each.has_same_tokens for each in found.completions)
    assert all(each.num_unknown == 0 for each in found.completions)
    assert all(len(each.logprob_errors) == each.num_tokens for each in found.completions)
    median, worst = found.bits()
    assert median >= worst >= -math.log2(max(ROUND_OFF.values())) > 0
    text = str(found)
    assert "32 of 44 completions sampled anew from the weights of versions 0, 2" in text
    assert "32 of 32 completions agree token for token; half of the log-probs agree to" in text
    assert "cannot be checked: 12 completions; no checkpoint holds version 1" in text


def test_a_changed_token_is_found(run):
    def other(ids):
        return [ids[0], (ids[1] + 1) % 16, *ids[2:]] if len(ids) > 1 else ids

    changed(run, 3, "completion_ids", other)
    (found,) = verify(run, num_samples=1000)
    assert not found.agrees
    for each in found.completions:
        is_changed = each.iteration == 3 and each.num_tokens > 1
        assert each.agrees != is_changed
        assert each.has_same_tokens != is_changed
        if is_changed:
            (difference,) = each.differences
            assert difference.token == 1 and difference.miss > 0
            assert (difference.sampled_id + 1) % 16 == difference.stored_id
            assert f"token 1: {difference.stored!r}" in str(found)


def test_a_changed_log_prob_is_found(run):
    changed(run, 1, "logprobs", lambda values: [*values[:-1], values[-1] - 0.01])
    (found,) = verify(run, num_samples=1000)
    for each in found.completions:
        assert each.has_same_tokens
        assert each.agrees == (each.iteration != 1)
        if each.iteration == 1:
            assert each.differences[0].token == each.num_tokens - 1
            assert max(each.logprob_errors) == pytest.approx(0.01, abs=1e-3)
    assert found.bits()[1] == pytest.approx(-math.log2(0.01), abs=0.1)


def test_other_weights_are_found(run):
    """Rows that say they are of version 2 and are of version 0."""
    changed(run, 1, "version_spans", lambda spans: [{**span, "version": 2} for span in spans])
    (found,) = verify(run, num_samples=1000)
    wrong = [each for each in found.completions if each.iteration == 1]
    assert len(wrong) == 12 and not any(each.agrees for each in wrong)


def test_the_command_draws_a_few_and_exits_with_1_where_they_differ(run):
    def command(*arguments):
        return CliRunner().invoke(app, ["verify", str(run), *arguments])

    good = command("--samples", "3", "--seed", "5")
    assert good.exit_code == 0, good.output
    assert "3 of 3 completions agree token for token" in said(good.output)
    for iteration in (1, 3):
        changed(run, iteration, "logprobs", lambda values: [value - 1 for value in values])
    bad = command("--samples", "1000")
    assert bad.exit_code == 1 and "more than round-off" in said(bad.output)


def test_a_run_without_checkpoints_or_rollouts_says_so(run):
    shutil.rmtree(run / "checkpoint_000001")
    with pytest.raises(Problems, match="must hold a checkpoint"):
        verify(run)
    shutil.rmtree(run / "rollouts")
    with pytest.raises(NoRolloutsError):
        verify(run)


def stored(spans, *, mask=None, messages=None):
    length = spans[-1]["end"]
    return {"completion_ids": list(range(length)), "loss_mask": mask or [True] * length,
            "messages": messages, "version_spans": spans}  # fmt: skip


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def places(rows, **settings):
    settings = {"keeps_cache": False, **settings}
    return [(p.version, p.turn, p.first, p.start, p.end) for p in pieces(rows, **settings)]


def test_a_completion_of_two_versions_is_resumed_where_the_second_began():
    row = stored([span(4, 0, 3), span(5, 3, 7)])
    assert places([row]) == [(4, 0, 0, 0, 3), (5, 0, 0, 3, 7)]
    # With the cache of the old weights nobody samples the rest again.
    assert places([row], keeps_cache=True) == [(4, 0, 0, 0, 3)]


def test_turns_are_counted_over_the_paths_of_a_conversation():
    """Two turns with a tool's words between them; then a path of its own, whose first turn was
    learnt from already."""
    first = stored([span(1, 0, 2), span(1, 4, 6)], mask=[True, True, False, False, True, True],
                   messages="[]")  # fmt: skip
    second = stored([span(1, 3, 5)], mask=[False] * 3 + [True, True], messages="[]")
    assert places([first, second]) == [(1, 0, 0, 0, 2), (1, 1, 4, 4, 6), (1, 2, 3, 3, 5)]


def test_versions_in_a_row_are_told_as_a_range():
    assert _named({1: 3, 2: 3, 3: 3, 7: 1, 9: 1, 10: 1}) == "versions 1-3, 7, 9-10"
