from __future__ import annotations

import json

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from rllib_llm.runs.report_page import PANELS, _draw, _running_mean, part_panels, plot_stage


def write_results(folder, rows):
    folder.mkdir()
    (folder / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rl_rows(num: int, scale: float = 1.0) -> list[dict]:
    return [
        {
            "training_iteration": i,
            "episode": 96 * i,
            "objective": {"scores": scale * i / num, "kl": 0.1 * i},
            "policy": {"entropy_avg": 2.0 - i / num},
            "loss": {"ptx_avg": 3.0},
            "env": {"gold_score": 0.5},
            "eval": {"scores": scale * i / num, "iteration": i - i % 5},
        }
        for i in range(1, num + 1)
    ]


def test_two_trials_give_one_picture_with_ink_of_two_colours(tmp_path):
    folders = [write_results(tmp_path / n, rl_rows(25, s)) for n, s in [("a", 1.0), ("b", 2.0)]]
    file = plot_stage("ppo · PPOPtx", folders, ["lr=1", "lr=2"], tmp_path / "curves.png")
    image = matplotlib.image.imread(file)[..., :3]
    height, width, _ = image.shape
    assert width > 1200 and height > 600
    for red, green, blue in [(0x0B, 0x6E, 0x99), (0xC4, 0x54, 0x0A)]:
        near = np.abs(image * 255 - (red, green, blue)).max(axis=-1) < 3
        assert near.sum() > 200


def test_each_part_of_a_reward_has_a_plot_of_its_own(tmp_path):
    flat = [{"train/correct_rewards": 0.5, "train/format_rewards": 0.9}]
    assert [panel.title for panel in part_panels(flat)] == ["Reward: correct", "Reward: format"]
    assert part_panels(flat)[0].eval_key == "eval/correct_rewards"  # as evaluations report it
    assert part_panels([{"train/correct_rewards": 0.5}]) == ()  # it is the reward itself
    rows = rl_rows(8)
    without = plot_stage("a", [write_results(tmp_path / "a", rows)], ["a"], tmp_path / "a.png")
    for row in rows:
        row["train"] = {"correct_rewards": 0.5, "format_rewards": 0.9}
    parts = plot_stage("b", [write_results(tmp_path / "b", rows)], ["b"], tmp_path / "b.png")
    # 5 plots take two rows of three, 7 take three.
    before, after = (matplotlib.image.imread(file).shape[0] for file in (without, parts))
    assert after - before == round(2.5 * 150)


def test_nothing_to_draw_gives_no_file(tmp_path):
    folder = write_results(tmp_path / "a", rl_rows(1))  # one point is no curve
    assert plot_stage("a", [folder], ["a"], tmp_path / "curves.png") is None
    assert not (tmp_path / "curves.png").exists()


def test_the_report_shows_what_the_job_is_judged_by():
    keys = {panel.key for panel in PANELS}
    assert {"objective/scores", "env/gold_score", "objective/kl", "loss/ptx_avg"} <= keys
    assert "policy/entropy_avg" in keys


def test_the_running_mean_of_a_line_is_the_line():
    values = [float(i) for i in range(30)]
    assert _running_mean(values, 4) == values  # at both ends as well


def test_a_long_legend_is_whole(tmp_path):
    """What is cut off at the edges of a picture has ink there."""
    folders = [write_results(tmp_path / name, rl_rows(3)) for name in "abcd"]
    labels = [f"clip_param=0.3267, lr=0.0004002, ptx_coeff=0.4273, beta={i}" for i in range(4)]
    file = plot_stage("pbt · PPOPtx", folders, labels, tmp_path / "curves.png")
    edge = matplotlib.image.imread(file)[:, -3:, :3]
    assert (edge > 0.99).all()


@pytest.mark.parametrize(("num", "marker"), [(2, "o"), (7, None)])
def test_a_curve_of_few_points_shows_where_they_are(num, marker):
    axis = matplotlib.figure.Figure().add_subplot()
    rows = [{"episode": 8 * i, "objective/kl": 0.1 * i} for i in range(num)]
    kl = next(panel for panel in PANELS if panel.key == "objective/kl")
    _draw(axis, rows, kl, "episode", "black", "")
    assert axis.lines[0].get_marker() == (marker or "None")
