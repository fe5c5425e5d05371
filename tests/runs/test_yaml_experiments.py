from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rllib_llm.runs.experiments import fill, references
from rllib_llm.runs.yaml_loader import load, parse
from rllib_llm.shared.errors import Problems

TWO_STAGES = """
sft:
  run: SFT
  stop: {training_iteration: 3}
  config: {model: some/model}
ppo:
  run: PPOPtx
  env: rllib_llm/Reviews-v0
  config: {model: "${sft.model}", env_config: {path: "${sft.checkpoint}/x"}}
"""


def experiments(text: str, **kwargs: Any):
    return load(parse(text, "x.yaml"), "x.yaml", **kwargs)


def test_experiments_come_in_file_order_with_references_left_open():
    sft, ppo = experiments(TWO_STAGES)
    assert (sft.name, sft.run, sft.stop) == ("sft", "SFT", {"training_iteration": 3})
    assert (ppo.name, ppo.env, ppo.num_samples) == ("ppo", "rllib_llm/Reviews-v0", 1)
    assert ppo.config["model"] == "${sft.model}"
    assert references(vars(ppo)) == {("sft", "model"), ("sft", "checkpoint")}


def test_references_are_filled_inside_and_as_whole_values():
    _, ppo = experiments(TWO_STAGES)
    filled = fill(ppo, lambda ref, where: {"sft.model": "/m", "sft.checkpoint": "/c"}[ref])
    assert filled.config == {"model": "/m", "env_config": {"path": "/c/x"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {run: SFT, confg: {}}", "a.confg must be a known key. Did you mean 'config'?"),
        ("a: {run: SFT, checkpoint_freq: 1}", "It is 'checkpoint_config.checkpoint_frequency'"),
        ("a: {run: SFT, checkpoint_config: {num_too_keep: 1}}", "Did you mean 'num_to_keep'"),
        ("a: {config: {}}", "a.run must be set: it names the algorithm"),
        ("run: GRPO\nconfig: {}", "an experiment must have a name: `run: GRPO` stands at the top"),
        ("a: {run: SFT, stop: 3}", "a.stop=3 must be a dictionary"),
        ("a: {run: SFT, stop: {episode: many}}", "a.stop.episode='many' must be a number"),
        ("a: {run: SFT, num_samples: 0}", "a.num_samples=0 must be a whole number of at least 1"),
        ("a: {run: SFT, num_samples: 1.5}", "a.num_samples=1.5 must be a whole number"),
        ("a: {run: SFT, metric: x, mode: up}", "a.mode='up' must be one of ('max', 'min', None)"),
        (
            "a: {run: SFT, checkpoint_config: {checkpoint_frequency: often}}",
            "a.checkpoint_config.checkpoint_frequency='often' must be a whole number",
        ),
        ("a: {run: SFT, checkpoint_config: {checkpoint_frequency: -2}}", "number of at least 0"),
        ("a: {run: SFT, checkpoint_config: 3}", "a.checkpoint_config=3 must be a dictionary"),
        ("a: {run: SFT, num_samples: true}", "a.num_samples=True must be a whole number"),
        ("a: {run: SFT, num_samples: {3: 4}}", "a.num_samples={3: 4} must be a whole number"),
        (
            "a: {run: SFT, stop: {3: 4}}",
            "must be a dictionary, of names that are texts: it is the results",
        ),
        ("a: {run: SFT, 3: 4}", "a: the name 3 must be text: YAML reads it as int."),
        ("a: {run: SFT, storage_path: 3}", "a.storage_path=3 must be text"),
        ("a: {run: SFT, time_budget_s: 0}", "a.time_budget_s=0 must be a number above 0"),
        ("a: {run: SFT, max_concurrent_trials: -1}", "a.max_concurrent_trials=-1 must be"),
        ("a: {run: 3, confg: {}, metric: 4}", "a.run=3 must be text"),
        ("a: {run: 3, confg: {}, metric: 4}", "a.metric=4 must be text"),
        ("a: {run: 3, confg: {}, metric: 4}", "a.confg must be a known key"),
        ("vars: [1]\na: {run: SFT}", "x.yaml: vars=[1] must be a mapping"),
        ("vars: {x: 1}", "x.yaml must hold experiments: it has nothing but `vars`"),
        ("include: 3", "x.yaml: include=3 must be a file or a list of files"),
        ("include: nowhere.yaml", "must be a YAML file: there is none"),
        ("a: SFT", "a='SFT' must be a mapping"),
        ("1a: {run: SFT}", "'1a' must be at most 200 letters"),
        ("[1, 2]", "x.yaml must hold experiments: it is a list. Write"),
        ("", "x.yaml must hold experiments: it is empty. Write"),
    ],
)
def test_what_cannot_be_an_experiment_is_refused(text: str, message: str):
    with pytest.raises(Problems) as error:
        experiments(text)
    assert message in str(error.value)
    assert "Traceback" not in str(error.value) and "pydantic" not in str(error.value)


def test_stages_in_the_wrong_order_are_refused_before_anything_runs():
    text = "ppo: {run: PPOPtx, config: {model: '${sft.model}'}}\nsft: {run: SFT}"
    with pytest.raises(Problems, match=r"ppo\.config\.model.* an experiment above it.*Move 'sft'"):
        experiments(text)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("b.model", "refer to an experiment above it: .* Name another."),
        ("sfd.model", r"refer to something above it in this file: known here: a\.model"),
        ("a.weights", r"must be \$\{a\.model\} or \$\{a\.checkpoint\} or \$\{a\.rollouts\}"),
        ("vars.x", r"refer to something above it in this file"),
    ],
)
def test_references_to_nothing_are_refused(reference: str, message: str):
    text = f"a: {{run: SFT}}\nb: {{run: SFT, config: {{model: '${{{reference}}}'}}}}"
    with pytest.raises(Problems, match=message):
        experiments(text)


def test_variables_keep_their_type_and_must_have_a_value():
    text = """
vars: {data: null, n: 3}
a: {run: SFT, config: {data: '${vars.data}', max_length: '${vars.n}', seed: 'x${vars.n}'}}
"""
    (a,) = experiments(text, overrides=("vars.data=d.jsonl",))
    assert a.config == {"data": "d.jsonl", "max_length": 3, "seed": "x3"}
    with pytest.raises(Problems, match=r"a\.config\.data.*must have a value.*--set vars\.data="):
        experiments(text)


def test_here_is_the_folder_of_the_file():
    (a,) = experiments("a: {run: SFT, config: {data: '${here}/d.jsonl'}}", here=Path("/some/where"))
    assert a.config["data"] == "/some/where/d.jsonl"


def test_variables_may_stand_for_numbers_of_the_experiment():
    text = "vars: {n: 3}\na: {run: SFT, num_samples: '${vars.n}', stop: {episode: '${vars.n}'}}"
    (a,) = experiments(text)
    assert (a.num_samples, a.stop) == (3, {"episode": 3})


def test_an_experiment_that_is_changed_is_checked_anew():
    (a,) = experiments("a: {run: SFT, stop: {episode: 3}}")
    assert a.replace(num_samples=2).stop == {"episode": 3}
    with pytest.raises(Problems, match=r"a\.num_samples=0 must be a whole number"):
        a.replace(num_samples=0)


SHARED = """
vars: {n: 3}
sft: {run: SFT, config: {data: "${here}/d.jsonl", lr: {grid_search: [1, 2]}, max_length: 8}}
rm: {run: RewardModel}
"""


def included(tmp_path: Path, text: str, **files: str):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "shared.yaml").write_text(SHARED, encoding="utf-8")
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(content, encoding="utf-8")
    return experiments(text, here=tmp_path)


def test_what_another_file_says_comes_first_and_is_laid_under(tmp_path):
    sft, ppo = included(
        tmp_path,
        """
include: parts/shared.yaml
vars: {n: 4}
rm: null
sft: {config: {lr: {loguniform: [1, 2]}}, stop: {episode: "${vars.n}"}}
ppo: {run: PPOPtx, config: {model: "${sft.model}"}}
""",
    )
    assert (sft.name, sft.run, sft.stop, ppo.name) == ("sft", "SFT", {"episode": 4}, "ppo")
    # The included file's own folder; a search space is replaced as a whole.
    assert sft.config == {"data": f"{tmp_path}/parts/d.jsonl", "max_length": 8,
                          "lr": {"loguniform": [1, 2]}}  # fmt: skip


def test_files_that_include_each_other_are_refused(tmp_path):
    with pytest.raises(Problems, match="must not lead back to a.yaml"):
        included(tmp_path, "include: a.yaml", a="include: b.yaml", b="include: a.yaml")


def test_an_example_can_be_included_from_anywhere(tmp_path):
    names = [e.name for e in included(tmp_path, "include: arithmetic_grpo.yaml")]
    assert names == ["sft", "grpo"]


@pytest.mark.parametrize("reference", ["${here}", "${ here }"])
def test_here_is_the_folder_of_the_file_that_says_it(tmp_path, reference):
    (tmp_path / "inner").mkdir()
    text = f"a: {{run: SFT, config: {{data: '{reference}/d.jsonl'}}}}"
    (tmp_path / "inner" / "base.yaml").write_text(text)
    (a,) = load({"include": "inner/base.yaml"}, "f", here=tmp_path)
    assert a.config == {"data": f"{tmp_path}/inner/d.jsonl"}


def test_variables_may_refer_to_each_other_and_to_the_folder(tmp_path):
    data = {
        "vars": {
            "data": "${vars.root}/x.jsonl",
            "root": "${here}/data",
            "num": 3,
            "n": "${vars.num}",
        },
        "a": {"run": "SFT", "config": {"data": "${vars.data}", "lr": "${vars.n}"}},
    }
    (experiment,) = load(data, "f", here=tmp_path)
    assert experiment.config == {"data": f"{tmp_path}/data/x.jsonl", "lr": 3}
    for wrong, message in (
        ({"a": "${vars.b}", "b": "${vars.a}"}, r"not refer to itself: vars.a -> vars.b -> vars.a"),
        ({"a": "${vars.c}"}, r"vars.a=.\$\{vars.c\}. must refer to something above it"),
        ({"a": "${sft.model}"}, r"refer to something"),
    ):
        with pytest.raises(Problems, match=message):
            load({**data, "vars": wrong}, "f")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("lr: 1.0e-5", "It is the algorithm's: write it below `config:`."),
        ("model: ./my-model", "It is the algorithm's: write it below `config:`."),
        ("num_samples: many", "Write `num_samples: 4`."),
        ("time_budget_s: 1h", "Write `time_budget_s: 3600`."),
        ("scheduler: [asha]", "Write `scheduler: asha`."),
        ("stop: 3", "Write `stop: {name: value}`."),
        ("stop: {objective: {scores: 0.5}}", "Write `objective/scores: 0.5`."),
        ("mode: maximize", "Did you mean 'max'?"),
        ("stop: {training_iteration: three}", "Write `training_iteration: 100`."),
        ("stop: {training_iteration: '10'}", "Write `training_iteration: 100`."),
        ("pass_criteria: {x: '-1e-5'}", "Write `x: 100`."),
        ("stop: {x: 'nan'}", "Write `x: 100`."),  # YAML's own nan is another
        ("stop {training_iteration: 2}", "Write a colon and a space after 'stop'."),
        ("name: other", "An experiment is called by the key that it is below."),
    ],
)
def test_what_stands_wrong_beside_run_is_told_with_what_to_write(line, remedy):
    with pytest.raises(Problems) as error:
        load(parse(f"my-run:\n  run: GRPO\n  {line}\n", "my.yaml"), "my.yaml")
    assert str(error.value).endswith(remedy)
