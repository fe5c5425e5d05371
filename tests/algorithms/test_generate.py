"""Texts sampled as a stage, from a tiny model."""

from __future__ import annotations

import json

import pytest

from rllib_llm.algorithms.generate import Generate, GenerateConfig, is_held_out, opening
from rllib_llm.algorithms.registry import get_algorithm_class
from rllib_llm.shared.errors import Problems
from tests.algorithms.tiny_runs import build_config

SETTINGS = {
    "model": "tests.tiny_models.build_llama",
    "max_new_tokens": 12,
    "opening_tokens": 4,
    "eval_fraction": 0.5,
    "batch_size": 6,
}


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def run(folder, num_iterations: int, **changes) -> tuple[list[dict], dict]:
    """All rows of a checkpoint after so many iterations, train before eval, and the last result."""
    stage = Generate(SETTINGS | changes)
    result = [stage.step() for _ in range(num_iterations)][-1]
    folder.mkdir()
    stage.save_checkpoint(str(folder))
    return rows(folder, "train.jsonl") + rows(folder, "eval.jsonl"), result


def test_texts_and_their_openings_are_written(tmp_path):
    texts, result = run(tmp_path / "a", 2)
    assert len(texts) == result["episode"] == 12
    assert 0 < result["train"]["output_length"] <= 12
    assert all(set(row) == {"prompt", "text"} for row in texts)
    assert all(row["text"].startswith(row["prompt"]) for row in texts)


def test_special_tokens_inside_a_text_stay():
    row = Generate(SETTINGS)._row([80, 81, 0, 82, 83, 2])  # <unk> in the middle, </s> at the end
    assert row["text"].count("<unk>") == 1 and "</s>" not in row["text"]
    assert "<unk>" in row["prompt"] and row["text"].startswith(row["prompt"])


def test_held_out_openings_are_not_in_training(tmp_path):
    run(tmp_path / "a", 4)
    train, held_out = (
        {row["prompt"] for row in rows(tmp_path / "a", name)}
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert train and held_out
    assert not train & held_out


def test_a_text_does_not_depend_on_the_batch_it_was_sampled_in(tmp_path):
    # 2 iterations of 6 and 4 of 3 are the texts 0 .. 11 of the same seed.
    six, _ = run(tmp_path / "a", 2)
    three, _ = run(tmp_path / "b", 4, batch_size=3)
    other, _ = run(tmp_path / "c", 2, seed=1)
    assert six == three
    assert six != other


def test_a_restored_stage_goes_on(tmp_path):
    whole, _ = run(tmp_path / "a", 2)
    run(tmp_path / "b", 1)
    stage = Generate(SETTINGS)
    stage.load_checkpoint(str(tmp_path / "b"))
    assert stage.step()["episode"] == 12
    stage.save_checkpoint(str(tmp_path / "b"))
    assert rows(tmp_path / "b", "train.jsonl") + rows(tmp_path / "b", "eval.jsonl") == whole


def test_without_openings_there_are_only_texts(tmp_path):
    texts, _ = run(tmp_path / "a", 1, opening_tokens=None, eval_fraction=0.0)
    assert all(set(row) == {"text"} for row in texts)
    assert rows(tmp_path / "a", "eval.jsonl") == []


@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        ("Once upon", "Once upon"),  # ends where a word ends
        ("Once upo", "Once"),  # cuts one
        ("Once upon ", "Once upon"),
        ("On", "On"),  # the first word has no whole one before it
        ("Once upon\ufffd", "Once upon"),  # half a character decodes to a replacement
    ],
)
def test_openings_end_with_a_word(beginning, expected):
    assert opening("Once upon a time", beginning) == expected


def test_the_held_out_share_is_about_the_fraction():
    texts = [f"text {i}" for i in range(2000)]
    # Binomial(2000, 0.25): 500, standard deviation 19.4; 5 of them are 97.
    assert abs(sum(is_held_out(text, 0.25) for text in texts) - 500) < 97
    assert not any(is_held_out(text, 0.0) for text in texts)


def test_it_is_known_by_name_and_its_settings_are_checked():
    assert get_algorithm_class("Generate") is Generate
    assert isinstance(build_config(Generate, SETTINGS), GenerateConfig)
    for name, settings in {
        "temprature": SETTINGS | {"temprature": 0.5},
        "opening_tokens": SETTINGS | {"opening_tokens": 12},
        "eval_fraction": SETTINGS | {"eval_fraction": 1},
        "model": {},
    }.items():
        with pytest.raises(Problems) as caught:
            build_config(Generate, settings)
        assert caught.value.problem.name.rpartition(".")[2] == name
