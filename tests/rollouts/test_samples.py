from __future__ import annotations

import io
from types import SimpleNamespace

import torch
from rich.console import Console

from rllib_llm.rollouts.recorder import SampleLog
from rllib_llm.rollouts.schedule import texts_are_due
from rllib_llm.runs.report import before_after_table
from rllib_llm.runs.report_page import page_rows
from rllib_llm.runs.results import before_and_after, read_json_lines
from rllib_llm.shared import columns


def batch(completion: str):
    """What is read of a `JudgedBatch` of one row."""
    return SimpleNamespace(
        num_rows=1, texts={"prompt": ["Say"], "completion": [completion]}, components={},
        columns={columns.PROMPT_INDEX: torch.tensor([3]), columns.SCORES: torch.tensor([0.5])},
        metrics={"gold": torch.tensor([1.0]), "absent": torch.tensor([torch.nan])},
    )  # fmt: skip


def test_a_process_that_goes_on_replaces_what_it_samples_again(tmp_path):
    log = SampleLog(tmp_path / "trial")
    for iteration, split in ((0, "eval"), (1, "train"), (5, "eval"), (6, "train")):
        log.write(batch("first"), iteration=iteration, split=split, limit=8)
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"iteration": 7, "sp')  # killed
    log = SampleLog(tmp_path / "trial")
    for split in ("train", "eval"):
        log.write(batch("again"), iteration=5, split=split, limit=8)
    rows = read_json_lines(log.path)
    assert [(row["iteration"], row["split"], row["completion"]) for row in rows] == [
        (0, "eval", "first"), (1, "train", "first"), (5, "train", "again"), (5, "eval", "again"),
    ]  # fmt: skip
    assert rows[0] == {"iteration": 0, "split": "eval", "prompt_index": 3, "prompt": "Say",
                       "completion": "first", "score": 0.5, "gold": 1.0}  # fmt: skip


def test_of_a_chat_its_turns_and_the_user_s_words_are_written(tmp_path):
    chat = batch("2")
    chat.texts |= {"turns": ["[system] Be brief.\n[user] 1+1?"], "question": ["1+1?"]}
    SampleLog(tmp_path).write(chat, iteration=1, split="train", limit=1)
    (row,) = read_json_lines(tmp_path / "samples.jsonl")
    assert (row["prompt"], row["question"]) == (chat.texts["turns"][0], "1+1?")


def test_rows_of_different_prompts_are_written_first(tmp_path):
    """Two prompts of three completions and one of one: a row of each before a second of any."""
    prompts = torch.tensor([7, 7, 7, 9, 9, 9, 8])
    texts = [f"c{i}" for i in range(7)]
    rows = SimpleNamespace(
        num_rows=7, texts={"prompt": ["Say"] * 7, "completion": texts}, components={}, metrics={},
        columns={columns.PROMPT_INDEX: prompts, columns.SCORES: torch.zeros(7)},
    )  # fmt: skip

    def written(limit: int) -> list[str]:
        log = SampleLog(tmp_path / str(limit))
        log.write(rows, iteration=1, split="eval", limit=limit)
        return [row["completion"] for row in read_json_lines(log.path)]

    assert written(3) == ["c0", "c3", "c6"]
    assert written(4) == ["c0", "c1", "c3", "c6"]
    assert written(9) == texts


def test_of_several_environments_each_row_has_the_name(tmp_path):
    """Their prompts of the same index are others."""
    rows = SimpleNamespace(
        num_rows=4, texts={"prompt": [*"aabb"], "completion": [*"wxyz"]}, components={}, metrics={},
        columns={
            columns.PROMPT_INDEX: torch.zeros(4, dtype=torch.int64), columns.SCORES: torch.zeros(4),
            columns.ENVIRONMENT: torch.tensor([1, 1, 0, 0]),
        },
    )  # fmt: skip
    log = SampleLog(tmp_path, ["sums", "chat"])
    for iteration in (0, 5):
        log.write(rows, iteration=iteration, split="eval", limit=2)
    found = read_json_lines(log.path)
    assert [(row["env"], row["completion"]) for row in found] == [("chat", "w"), ("sums", "y")] * 2
    pairs = before_and_after(found)
    assert [(before["env"], after["env"]) for before, after in pairs] == [
        ("chat", "chat"), ("sums", "sums"),
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    console.print(before_after_table(pairs))
    assert "chat" in console.file.getvalue() and "sums" in console.file.getvalue()
    assert [row["split"] for row in page_rows(tmp_path)] == ["eval chat", "eval sums"] * 2


def test_texts_of_short_runs_are_logged_more_than_once():
    due = [version for version in range(31) if texts_are_due(version, 10)]
    assert due == [0, 1, 2, 4, 8, 10, 20, 30]
    assert not any(texts_are_due(version, 0) for version in range(31))
