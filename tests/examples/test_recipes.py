"""Rows and reward of the recipes, their files under the doctor, and one run from file to report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.examples import recipes
from rllib_llm.runs.plan import check_experiments, check_resources
from rllib_llm.runs.results import before_and_after, read_json_lines, read_results
from rllib_llm.runs.yaml_loader import examples_folder, load, read
from rllib_llm.shared.errors import Problems
from tests.examples.test_example_files import RECIPES, REVIEWS, recipe_overrides

FOLDER = examples_folder()


def sets(*overrides: str) -> list[str]:
    return [word for text in overrides for word in ("--set", text)]


@pytest.mark.parametrize("stem", RECIPES)
def test_the_doctor_finds_no_error_in_a_recipe(stem, tmp_path):
    asked = ["doctor", str(FOLDER / f"{stem}.yaml"), "--json", "--no-ray"]
    made = CliRunner().invoke(app, [*asked, *sets(*recipe_overrides(stem, tmp_path))])
    told = json.loads(made.stdout)
    assert [one for one in told if one["severity"] == "error"] == []


def test_the_cluster_s_recipe_takes_six_gpus(tmp_path):
    overrides = (*recipe_overrides("cluster_grpo", tmp_path), "vars.gpus=1")
    file = FOLDER / "cluster_grpo.yaml"
    (reserved,) = check_experiments(load(read(file), file.name, overrides, FOLDER))
    node = {"CPU": 32, "GPU": 6, "memory": 2**40}
    check_resources(reserved, [node])
    with pytest.raises(Problems, match="reserves 6 GPU"):
        check_resources(reserved, [{**node, "GPU": 5}])


def test_gsm8k_rows_are_chats_with_their_solution_and_answer():
    solution = "He has 48/2 = <<48/2=24>>24 clips.\n#### 1,024"
    (row,) = recipes.gsm8k([{"question": "How many?", "answer": solution}])
    assert row == {
        "prompt": [{"role": "user", "content": "How many?\nEnd with #### and the number."}],
        "completion": "He has 48/2 = 24 clips.\n#### 1,024",
        "answer": "1,024",
    }


def test_openings_are_words_without_line_breaks_of_html():
    rows = [{"text": "One two.<br /><br />Three four"}]
    assert recipes.openings(rows, 3) == [{"prompt": "One two. Three"}]
    assert recipes.openings(rows, 9, column="text") == [{"text": "One two. Three four"}]


def test_fewer_openings_are_at_even_distances():
    rows = [{"text": str(n)} for n in range(10)]
    found = recipes.openings(rows, 1, num_rows=4)
    assert [row["prompt"] for row in found] == ["0", "2", "5", "7"]  # 10 i / 4, rounded down
    assert len(recipes.openings(rows, 1, num_rows=99)) == 10


def test_pairs_hold_a_positive_and_a_negative_opening():
    pairs = recipes.sentiment_pairs(REVIEWS, 4, num_pairs=6)
    assert len(pairs) == 6
    assert all("fine" in pair["chosen"] and "dull" in pair["rejected"] for pair in pairs)


def test_word_problems_are_the_same_for_a_seed_and_have_whole_answers():
    first, again = recipes.word_problems(50, seed=1), recipes.word_problems(50, seed=1)
    assert first == again != recipes.word_problems(50, seed=2)
    assert all(int(row["answer"]) > 0 for row in first)
    known = {"boxes": 0, "bags": 0, "Monday": 0}
    for row in first:
        (message,) = row["prompt"]
        a, b, c = (int(word) for word in message["content"].replace(",", " ").split()
                   if word.isdigit())  # fmt: skip
        kind = next(word for word in known if word in message["content"])
        expected = {"boxes": a * b + c, "bags": a * b - c, "Monday": a + b + c}[kind]
        assert row["answer"] == str(expected)
        known[kind] += 1
    assert all(known.values())


def test_the_last_number_counts():
    chat = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 1,234.0!"}]
    said = [chat, "12 and then 13", "none", "-5"]
    assert recipes.right_number(said, ["1234", "12", "3", "-5"]) == [1.0, 0.0, 0.0, 1.0]


# 8 texts and pairs, 2 iterations of 4 completions of 4 tokens.
SMALL = {
    "sft.train_batch_size_per_learner": 8, "sft.minibatch_size": 4, "vars.sft_iterations": 1,
    "judge.train_batch_size_per_learner": 8, "judge.minibatch_size": 4, "vars.judge_iterations": 1,
    "ppo.minibatch_size": 2, "ppo.ptx_batch_size": 2, "ppo.evaluation_interval": 1,
    "vars.ppo_iterations": 2, "vars.completions": 4, "vars.held_out": 4, "vars.tokens": 4,
}  # fmt: skip


def check_sentiment(folder: Path, overrides: list[str]) -> None:
    """A small run of sentiment_ppo_ptx, and what its stages left behind."""
    words = [*overrides, *(f"{key}={value}" for key, value in SMALL.items())]
    file = str(FOLDER / "sentiment_ppo_ptx.yaml")
    arguments = ["train", "file", file, "--storage-path", str(folder), "-n", "run", *sets(*words)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    judge = json.loads(next(folder.glob("run/judge/*/model/config.json")).read_text())
    assert judge["rllib_llm_score_std"] > 0
    (trial,) = (path for path in folder.glob("run/ppo/*") if path.is_dir())
    rows = read_results(trial)
    assert len(rows) == 2
    assert rows[-1]["eval/ptx_loss"] > 0 and rows[-1]["loss/ptx_avg"] > 0
    pairs = before_and_after(read_json_lines(trial / "samples.jsonl"))
    assert pairs and all(before["iteration"] == 0 for before, _ in pairs)
    assert next(folder.glob("run/ppo/*/model/config.json")).is_file()


@pytest.mark.slow
def test_sentiment_on_a_made_up_model(tmp_path, ray_session):
    check_sentiment(tmp_path, recipe_overrides("sentiment_ppo_ptx", tmp_path))


@pytest.mark.slow
def test_sentiment_on_a_pretrained_model(tmp_path, shared_dir, ray_session):
    model, reviews = shared_dir / "models" / "stories260K", shared_dir / "data" / "imdb"
    overrides = recipe_overrides("sentiment_ppo_ptx", tmp_path, str(model))
    own = [f"vars.{part}={reviews}/{part}_short.jsonl" for part in ("train", "test")]
    check_sentiment(tmp_path, [*overrides, *own, "vars.eos=</s>"])


@pytest.mark.slow
def test_gsm8k_s_answers_can_be_read(shared_dir):
    rows = recipes.gsm8k(shared_dir / "data" / "gsm8k" / "test.jsonl")
    assert len(rows) == 1319
    solutions, answers = ([row[key] for row in rows] for key in ("completion", "answer"))
    assert recipes.right_number(solutions, answers) == [1.0] * 1319
