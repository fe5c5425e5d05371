"""Judged batches as rows of the store: every list by hand."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json

import pandas as pd
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.data.rollout_store import IMAGES, ROLLOUTS, RolloutStore, conform
from rllib_llm.data.rollouts import load_rollouts, open_rollouts
from rllib_llm.examples import squares
from rllib_llm.modules.images import image_bytes, read_image, thumbnail
from rllib_llm.rollouts.judged_batch import JudgedBatch, concatenate
from rllib_llm.rollouts.recorder import AboutRun, RolloutRecorder, rows_of
from rllib_llm.runs.report_page import write_page
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.tiny_models import byte_tokenizer

ENDED = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)


def about(**changes):
    settings = {
        "run": "trial_7", "env": "rllib_llm/RLHF-v0", "num_completions": 2,
        "num_held_out_completions": 1, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "seed": 5,
        "vocabulary": "abc",
    }  # fmt: skip
    return AboutRun(**{**settings, **changes})


def batch(**changes) -> JudgedBatch:
    """Two completions of prompt 3: four tokens, the third a tool's; and two, of two versions."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    sampled = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]).bool()
    settings = {
        "columns": {
            columns.PROMPT_IDS: torch.tensor([[0, 11, 12], [0, 11, 12]]),
            columns.PROMPT_MASK: torch.tensor([[0, 1, 1], [0, 1, 1]]).bool(),
            columns.COMPLETION_IDS: torch.tensor([[21, 22, 23, 24], [31, 32, 0, 0]]),
            columns.COMPLETION_MASK: mask,
            columns.LOSS_MASK: sampled,
            columns.SAMPLER_LOGPROBS: torch.tensor([[-1.0, -2, 0, -4], [-5, -6, 9, 9]]),
            columns.WEIGHTS_VERSION: torch.tensor([[7, 7, -1, 7], [7, 8, -1, -1]]).int(),
            columns.SCORES: torch.tensor([1.0, 0.0]),
            columns.VALID: torch.tensor([True, True]),
            columns.FINISHED: torch.tensor([True, False]),
            columns.GROUP: torch.tensor([3, 3]),
            columns.ROW_ID: torch.tensor([6, 7]),
            columns.PROMPT_INDEX: torch.tensor([40, 40]),
            columns.REPLICA: torch.tensor([2, 2]).int(),
            columns.ADVANTAGES: torch.tensor([[0.5], [-0.5]]),
        },
        "rewards": torch.tensor([0.75, 0.0]),
        "components": {"right": torch.tensor([1.0, 0.0]), "short": torch.tensor([torch.nan, 2.0])},
        "timings": {"generate_seconds": 2.0, "judge_seconds": 1.0},
        **changes,
    }
    return JudgedBatch(**settings)


def rows(made: JudgedBatch, settings: AboutRun | None = None, **changes):
    options = {"status": "trained", "reason": "", "ended": ENDED, **changes}
    return conform(rows_of(made, settings or about(), **options), 1).to_pylist()


def test_tokens_are_without_padding():
    first, second = rows(batch())
    assert first["prompt_ids"] == second["prompt_ids"] == [11, 12]
    assert first["completion_ids"] == [21, 22, 23, 24] and second["completion_ids"] == [31, 32]
    assert first["loss_mask"] == [True, True, False, True]
    assert first["logprobs"] == [-1, -2, 0, -4] and second["logprobs"] == [-5, -6]
    assert first["advantages"] == [0.5] * 4 and second["advantages"] == [-0.5] * 2
    assert [first["tokens"], second["tokens"]] == [3, 2]
    assert first["ref_logprobs"] is None


def test_versions_are_spans_between_what_nobody_sampled():
    first, second = rows(batch())
    assert first["version_spans"] == [
        {"version": 7, "start": 0, "end": 2}, {"version": 7, "start": 3, "end": 4}
    ]  # fmt: skip
    assert second["version_spans"] == [
        {"version": 7, "start": 0, "end": 1}, {"version": 8, "start": 1, "end": 2}
    ]  # fmt: skip


def test_tokens_that_are_not_learnt_from_were_sampled_all_the_same():
    """`mask_stale_prefix` leaves token 1 of the second row to be learnt from; both were sampled."""
    made = batch()
    made.columns[columns.LOSS_MASK][1, 0] = False
    assert rows(made) == rows(batch())


def test_who_and_why():
    first, second = rows(batch(), status="rejected", reason="spread")
    assert (first["position"], first["group"], first["sample"]) == (3, 3, 0)
    assert (second["sample"], second["prompt_index"], second["replica"]) == (1, 40, 2)
    assert first["status"] == "rejected" and first["reason"] == "spread"
    assert first["score"] == 1.0 and first["reward"] == 0.75 and first["valid"]
    assert first["rewards"] == '{"right": 1.0}'  # nobody said how short it is
    assert second["rewards"] == '{"right": 0.0, "short": 2.0}'
    assert [first["finish_reason"], second["finish_reason"]] == ["stop", "length"]
    assert first["run"] == "trial_7" and first["seed"] == 5
    assert first["ended"] == ENDED and (first["ended"] - first["started"]).seconds == 3


def test_held_out_rows_have_a_group_of_their_own_size():
    found = rows(batch(), status="evaluated")
    assert [row["sample"] for row in found] == [0, 0]


def test_texts_are_the_environments_or_decoded():
    texts = {"prompt": ["p", "p"], "completion": ["a", "b"], "messages": ["[1]", "[2]"]}
    found = rows(batch(texts=texts))
    assert [row["completion"] for row in found] == ["a", "b"]
    assert [row["messages"] for row in found] == ["[1]", "[2]"]
    assert rows(batch())[0]["completion"] is None  # no tokenizer to decode with
    tokenizer = byte_tokenizer()
    made = batch()
    for name, texts in (
        (columns.PROMPT_IDS, [b"hi"] * 2),
        (columns.COMPLETION_IDS, [b"yes!", b"no"]),
    ):
        for row, text in enumerate(texts):
            ids = tokenizer(text.decode(), add_special_tokens=False)["input_ids"]
            width = made.columns[name].shape[1]
            at = width - len(ids) if name == columns.PROMPT_IDS else 0
            made.columns[name][row, at : at + len(ids)] = torch.tensor(ids)
    first, second = rows(made, about(tokenizer=tokenizer))
    assert first["prompt"] == "hi" and first["completion"] == "yes!"
    assert second["completion"] == "no"


def test_a_failed_group_has_no_more_than_its_prompt():
    mask = torch.ones(1, 2).bool()
    made = JudgedBatch(
        columns={
            columns.PROMPT_IDS: torch.tensor([[4, 5]]), columns.PROMPT_MASK: mask,
            columns.GROUP: torch.tensor([9]),
        },
        rewards=torch.tensor([torch.nan]),
    )  # fmt: skip
    (row,) = rows(made, status="failed", reason="timeout")
    assert row["position"] == 9 and row["prompt_ids"] == [4, 5] and row["completion_ids"] is None


def test_rows_of_a_forked_rollout_are_numbered():
    made = batch()
    made.columns[columns.ROW_ID] = torch.tensor([6, 6])
    assert [row["row"] for row in rows(made)] == [0, 0]  # each row for itself, without weights
    made.columns[columns.ROW_WEIGHT] = torch.tensor([0.5, 0.5])
    assert [(row["sample"], row["row"]) for row in rows(made)] == [(0, 0), (0, 1)]


def test_what_prompts_show_is_kept_once_and_named(tmp_path):
    files = [squares.rows(2)[i]["image"] for i in range(2)]
    first, second = map(image_bytes, files)
    shown = [base64.b64encode(first).decode(), ""]
    shown[1] = f"{shown[0]} {base64.b64encode(second).decode()}"
    names = [hashlib.sha256(data).hexdigest()[:32] for data in (first, second)]
    trial = tmp_path / "trial"
    for _ in range(2):  # a run that begins again keeps what is there
        store = RolloutStore(trial / ROLLOUTS)
        recorder = RolloutRecorder(store, about())
        for iteration in (1, 2):
            recorder.record(
                batch(texts={columns.IMAGES: shown}), "trained", iteration=iteration
            )  # fmt: skip
        recorder.record(batch(), "trained", iteration=3)
        recorder.stop()
    folder = trial / ROLLOUTS
    kept = {file.name: file.read_bytes() for file in (folder / IMAGES).iterdir()}
    assert kept == dict(zip(names, (first, second), strict=True))
    expected = [names[:1], names] * 2 + [None] * 2
    assert open_rollouts([folder]).to_table()["images"].to_pylist() == expected
    assert len(pd.read_parquet(folder)) == 6  # other readers pass over the images
    told = CliRunner().invoke(app, ["rollouts", str(folder), "--show", "6"])
    assert told.exit_code == 0 and names[1] in told.output
    with pytest.raises(Problems) as error:  # the words alone would be learnt from
        load_rollouts(str(folder))
    assert error.value.problem.name == "data"

    (trial / "result.json").write_text(json.dumps({"training_iteration": 1}) + "\n")
    file = write_page({"run": [("trial", trial)]}, tmp_path / "page.html")
    data = file.read_text().partition('id="data">')[2].partition("</script>")[0]
    (page,) = json.loads(data)["trials"]
    assert [row["images"] for row in page["rows"]] == [each or [] for each in expected]
    for name, image in zip(names, files, strict=True):
        assert read_image(page["thumbnails"][name]).tobytes() == image.tobytes()  # it is small


def test_a_thumbnail_is_small_and_what_is_none_has_none():
    large = image_bytes(Image.new("RGB", (640, 320)))
    assert read_image(thumbnail(large, 64)).size == (64, 32)
    assert thumbnail(b"no image", 64) is None


def test_batches_of_text_are_joined_with_those_that_show_something():
    shows = batch(texts={columns.IMAGES: ["YQ==", "YQ=="]})
    joined = concatenate([batch(), shows])
    assert joined.texts == {columns.IMAGES: ["", "", "YQ==", "YQ=="]}
