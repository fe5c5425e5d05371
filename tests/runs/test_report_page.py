"""The report page: what is in it, and what a browser makes of it."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rllib_llm.cli.main import app
from rllib_llm.data.rollout_store import conform
from rllib_llm.examples.calculator import build_tokenizer
from rllib_llm.runs.metrics import CURVES
from rllib_llm.runs.report_page import (
    TEMPLATE,
    find_trials,
    page_rows,
    panels,
    write_page,
)
from rllib_llm.runs.run_folder import ENVIRONMENT_FILE, describe_environment, write_environment
from rllib_llm.shared.errors import Problems

NASTY = "</script><script>document.title='stolen'</script><!-- & \u2028 \"'"
NODE = shutil.which("node")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def make_trial(
    stage: Path, name: str = "PPO_a", num: int = 5, lr: float = 1e-3, begun: float = 100
) -> Path:
    """A trial's folder with results, settings and samples."""
    trial = stage / name
    trial.mkdir(parents=True)
    rows = [
        {
            "training_iteration": i, "episode": 8 * i, "time_total_s": 2.0 * i,
            "timestamp": begun + i,
            "objective": {"scores": 0.5 * i, "kl": math.nan if i == 2 else 0.1 * i},
            "train": {"correct_rewards": 0.1 * i, "format_rewards": 1.0,
                      "staleness": 1.0, "num_invalid": 0.0},
            "eval": {"scores": 0.25, "iteration": 0}, "grad_norm": 1.0, "lr": 1e-3,
        }
        for i in range(1, num + 1)
    ]  # fmt: skip
    (trial / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (trial / "params.json").write_text(json.dumps({"lr": lr, "env_config": {"prompts": NASTY}}))
    samples = [
        {"iteration": i, "split": "eval", "prompt_index": 0, "prompt": "1+1=", "score": float(i),
         "completion": NASTY if i else "3", "correct": 1.0}
        for i in (0, 5)
    ]  # fmt: skip
    (trial / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    write_environment(stage)
    return trial


def store(trial: Path, iteration: int, num: int) -> Path:
    """A file of rollouts as the rollout store has it, as far as the page reads it."""
    rows = [
        {"status": "trained", "prompt": "1+1=", "completion": f"{i}", "score": float(i),
         "rewards": '{"correct": 1.0}', "iteration": iteration, "finish_reason": "stop",
         "valid": i != 1, "completion_ids": [7, 8],
         "logprobs": [-0.5, -1.5], "ref_logprobs": [-0.75, -1.0], "advantages": [2.0, -2.0]}
        for i in range(num)
    ]  # fmt: skip
    folder = trial / "rollouts"
    folder.mkdir(exist_ok=True)
    file = folder / f"part-{iteration:08d}.parquet"
    pq.write_table(conform(pa.Table.from_pylist(rows), iteration), file)
    return file


def data_of(page: Path) -> dict:
    text = re.search(r'id="data">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def test_a_page_holds_everything_and_asks_nobody(tmp_path):
    make_trial(tmp_path / "run" / "ppo")
    page = write_page({"run": find_trials(tmp_path / "run")}, tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "http" not in re.sub(r'id="data">.*?</script>', "", text, flags=re.DOTALL).replace(
        "http-equiv", "").replace("http://www.w3.org/2000/svg", "")  # fmt: skip
    without_script = re.search(r"<noscript>(.*?)</noscript>", text, re.DOTALL)
    assert without_script and "result.json and progress.csv" in without_script[1]
    (trial,) = data_of(page)["trials"]
    assert trial["label"] == "ppo"
    assert trial["settings"]["lr"] == "0.001"
    assert trial["environment"]["torch"]
    assert ["reward", "0.500", "2.500"] in trial["summary"]
    assert trial["rows"][1]["completion"] == NASTY
    assert trial["pairs"][0]["before"] == "3"
    curves = {panel["title"]: panel["curves"] for panel in trial["panels"]}
    assert curves["Reward"][0] == {"name": "training", "x": [8, 16, 24, 32, 40],
                                   "y": [0.5, 1.0, 1.5, 2.0, 2.5]}  # fmt: skip
    assert curves["Reward"][1] == {"name": "held out", "x": [0.0], "y": [0.25]}
    assert curves["KL to the reference"][0]["x"] == [8, 24, 32, 40]  # not a number: left out
    assert {"Reward: correct", "Reward: format", "Staleness", "Gradient norm"} <= set(curves)
    assert "Completions without a score" not in curves  # there are none
    # One evaluation, before training: it is no last one.
    assert ["  held out", "0.250", "–"] in trial["summary"]


def test_tokens_come_from_the_rollout_store(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    store(trial, 1, 3)
    store(trial, 10, 3)
    rows = page_rows(trial)
    assert [row["iteration"] for row in rows] == [1, 1, 1, 10, 10, 10]
    # [token, log-prob, advantage, log-prob less the reference's]
    assert rows[0]["tokens"] == [["#7", -0.5, 2.0, 0.25], ["#8", -1.5, -2.0, -0.5]]
    assert rows[0]["parts"] == {"correct": 1.0}
    assert (rows[0]["score"], rows[1]["score"]) == (0.0, None)  # nobody judged it
    assert len(page_rows(trial, limit=4)) == 4


def test_rows_of_several_environments_are_named(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    file = store(trial, 1, 2)
    table = pq.read_table(file)
    place = table.schema.get_field_index("env")
    names = pa.array(["math", "chat"], table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), names), file)
    assert [row["split"] for row in page_rows(trial)] == ["train math", "train chat"]


def test_rows_of_files_that_were_just_merged_stand_once(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    files = [store(trial, iteration, 2) for iteration in (1, 2)]
    merged = pa.concat_tables([pq.read_table(file) for file in files])
    pq.write_table(merged, files[0].with_name("part-00000001-00000002.parquet"))
    assert [row["iteration"] for row in page_rows(trial)] == [1, 1, 2, 2]


def test_rollouts_of_another_version_give_way_to_samples(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    file = store(trial, 1, 2)
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({}), file)
    with pytest.warns(UserWarning, match="schema"):
        assert [row["split"] for row in page_rows(trial)] == ["eval", "eval"]


def test_tokens_are_words_before_there_is_a_checkpoint(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    store(trial, 1, 1)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "policy")
    (trial / "params.json").write_text(json.dumps({"model": str(tmp_path / "policy")}))
    words = [token[0] for token in page_rows(trial)[0]["tokens"]]
    assert words == [tokenizer.decode([7]), tokenizer.decode([8])] != ["#7", "#8"]


def test_trials_are_found_from_any_folder_in_the_order_in_which_they_began(tmp_path):
    run = tmp_path / "run"
    trial = make_trial(run / "sft", begun=1)
    make_trial(run / "ppo", "b", begun=2)
    make_trial(run / "ppo", "a", begun=3)
    assert [label for label, _ in find_trials(run)] == ["sft", "ppo · b", "ppo · a"]
    assert [folder for _, folder in find_trials(trial)] == [trial]
    with pytest.raises(Problems, match=r"must be the folder of a run with results"):
        find_trials(tmp_path / "nowhere")


def test_two_runs_stand_side_by_side(tmp_path):
    for name, lr in (("one", 1e-3), ("two", 1e-4)):
        make_trial(tmp_path / name / "ppo", lr=lr)
    result = CliRunner().invoke(app, ["report", str(tmp_path / "one"), str(tmp_path / "two")])
    assert result.exit_code == 0, result.output
    data = data_of(tmp_path / "one" / "report.html")
    assert [trial["run"] for trial in data["trials"]] == ["one", "two"]
    assert data["several"]


def test_a_run_that_has_not_reported_is_told(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2


def test_the_environment_is_noted_once(tmp_path):
    write_environment(tmp_path)
    first = json.loads((tmp_path / ENVIRONMENT_FILE).read_text())
    assert first["Python"] and first["processor"]
    write_environment(tmp_path)
    assert json.loads((tmp_path / ENVIRONMENT_FILE).read_text()) == first
    assert describe_environment(tmp_path).get("commit") is None  # no repository there


def test_each_part_of_a_reward_has_a_plot_of_its_own():
    rewards = {"train/correct_rewards": 0.5, "train/format_rewards": 0.9}
    flat = {"episode": 1, "training_iteration": 1, **rewards, "eval/correct_rewards": 0.25}
    correct, form = panels([flat])
    assert [correct["title"], form["title"]] == ["Reward: correct", "Reward: format"]
    # As evaluations report it.
    assert [curve["y"] for curve in correct["curves"]] == [[0.5], [0.25]]
    assert panels([{"episode": 1, "train/correct_rewards": 0.5}]) == []  # it is the reward itself


def test_the_report_shows_what_the_job_is_judged_by():
    keys = {one.key for one in CURVES}
    assert {"objective/scores", "env/gold_score", "objective/kl", "loss/ptx_avg"} <= keys
    assert "policy/entropy_avg" in keys


def test_a_report_draws_no_panel_of_zeros_but_those_of_rewards():
    names = ("objective/scores", "policy/clipfrac_avg", "train/staleness", "lr")
    results = [{"episode": i, **dict.fromkeys(names, 0.0), "lr": 1e-5} for i in (1, 2)]
    assert [panel["title"] for panel in panels(results)] == ["Reward", "Learning rate"]


LOSSES = [("sft", "token"), ("reward_model", "pair"), ("dpo", "pair")]


@pytest.mark.parametrize(("kind", "unit"), LOSSES)
def test_a_supervised_stage_has_one_loss_in_its_unit(kind, unit):
    result = {f"loss/{kind}": 1.0, "eval/loss": 1.0}
    results = [{"episode": i, "training_iteration": i, **result} for i in (1, 2)]
    (panel,) = panels(results)
    assert panel["title"] == "Loss" and panel["unit"] == f"nats per {unit}"
    assert [curve["name"] for curve in panel["curves"]] == ["training", "held out"]


def in_node(expression: str) -> object:
    """The value of an expression with the functions of the page, which is given no document."""
    text = (TEMPLATE / "page.js").read_text(encoding="utf-8")
    functions = text[text.index("function ticks") : text.index("function plot")]
    program = f"{functions}\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs")
def test_ticks_end_where_a_curve_spans_one_unit_in_the_last_place():
    assert in_node("ticks(0, 10, 4)") == [0, 5, 10]
    for value in (1e-4, 1.0, -3e7):
        high = math.nextafter(value, math.inf)
        assert len(in_node(f"ticks({value!r}, {high!r}, 4)")) <= 6


@pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs")
def test_searching_computes_no_colours_anew():
    text = (TEMPLATE / "page.js").read_text(encoding="utf-8")
    draw = text[text.index("  function draw()") :]
    assert "spread(" not in draw


def test_before_and_after_shows_the_user_s_words(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    chat = {"split": "eval", "prompt_index": 0, "prompt": "[system] Be brief.\n[user] 1+1?",
            "question": "1+1?", "completion": "2", "score": 1.0}  # fmt: skip
    rows = [json.dumps({"iteration": i, **chat}) for i in (0, 5)]
    (trial / "samples.jsonl").write_text("\n".join(rows) + "\n")
    page = write_page({"run": find_trials(tmp_path / "run")}, tmp_path / "report.html")
    (trial_data,) = data_of(page)["trials"]
    assert trial_data["pairs"][0]["prompt"] == "1+1?"
    assert trial_data["rows"][0]["prompt"] == chat["prompt"]


def test_results_of_rllib_s_own_algorithms_have_curves():
    results = [
        {"num_env_steps_sampled_lifetime": 10.0 * i, "env_runners/episode_return_mean": float(i)}
        for i in (1, 2)
    ]
    assert [panel["title"] for panel in panels(results)] == ["Return"]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize(("view", "expected"), [
    ("Curves", ["<svg", "Reward", "Staleness"]),
    ("Summary", ["first", "last", "2.500"]),
    ("Completions", ["2 of 2", "1+1="]),
    ("Settings", ["lr", "0.001"]),
    ("Environment", ["processor"]),
])  # fmt: skip
def test_a_browser_shows_every_view_and_runs_no_stranger_s_script(tmp_path, view, expected):
    make_trial(tmp_path / "run" / "ppo")
    page = write_page({"run": find_trials(tmp_path / "run")}, tmp_path / "report.html")
    shown = dom(page, view, tmp_path)
    assert "<title>run</title>" in shown
    main = shown.partition("<main")[2].partition("</main>")[0]
    for text in expected:
        assert text in html.unescape(main), main[:2000]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_a_browser_colours_tokens(tmp_path):
    trial = make_trial(tmp_path / "run" / "ppo")
    store(trial, 1, 3)
    page = write_page({"run": find_trials(tmp_path / "run")}, tmp_path / "report.html")
    main = dom(page, "Completions", tmp_path)
    # Log-probs of -0.5 and -1.5; the 95th percentile of sizes is 1.5, which is full strength.
    strengths = re.findall(r'class="token" style="background: rgba\(205, 60, 40, ([\d.]+)', main)
    assert [float(one) for one in strengths[:2]] == pytest.approx([0.65 / 3, 0.65], abs=0.002)


def dom(page: Path, view: str, folder: Path) -> str:
    """What the page is once its script has run."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", f"file://{page}#{view}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_report_of_a_run_at_a_url(tmp_path):
    make_trial(tmp_path / "run" / "ppo")
    url = f"file://{tmp_path}/run"
    done = CliRunner().invoke(app, ["report", url])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == f"{url}/report.html"
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!doctype html>")
