"""The package as a whole: quick to import, and imports that point one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.test_house import trees

PACKAGE = Path(__file__).parents[1] / "rllib_llm"
HEAVY = ("torch", "transformers", "datasets", "bitsandbytes", "torchao", "peft", "wandb",
         "matplotlib", "vllm", "httpx", "fastapi")  # fmt: skip

# Numerics know torch and nothing of Ray; what is below the algorithms does not know them; the
# command only calls what Python users can call.
RULES = [
    (("shared/columns.py", "numerics/", "modules/logprobs.py"),
     ("ray", "rllib_llm.envs", "rllib_llm.engines", "rllib_llm.rollouts")),
    (("modules/",),
     ("rllib_llm.engines", "rllib_llm.envs", "rllib_llm.learners", "rllib_llm.rollouts",
      "rllib_llm.weights")),
    (("envs/", "modules/", "engines/", "rollouts/", "weights/", "learners/", "data/"),
     ("rllib_llm.algorithms", "rllib_llm.cli", "rllib_llm.runs")),
    (("algorithms/", "checkpoints/", "overseer/", "config/", "runs/"), ("rllib_llm.cli",)),
    (("engines/", "weights/", "modules/", "algorithms/", "rollouts/", "conversations/"),
     ("fastapi",)),
    (tuple(sorted(f"{folder.name}/" for folder in PACKAGE.iterdir() if folder.name != "examples")),
     ("rllib_llm.examples",)),
]  # fmt: skip


# One process for all of these tests, as each would import Ray, RLlib and torch for some seconds. A
# step notes which modules there are by then.
STEPS = """
import json, os, sys
loaded = {}

def step(name):
    loaded[name] = sorted(sys.modules)

import rllib_llm.weights.coordinator, rllib_llm.rollouts.ledger_actor
step("a coordinator of weights and a ledger")
import ray.tune
step("Ray")

import gymnasium, rllib_llm
from ray.tune.registry import ENV_CREATOR, TRAINABLE_CLASS, _global_registry
from rllib_llm.algorithms.registry import ALGORITHMS
from rllib_llm.envs.registry import ENVIRONMENTS

assert all(_global_registry.contains(TRAINABLE_CLASS, name) for name in ALGORITHMS)
loaded["environments"] = {
    name: name in gymnasium.registry and _global_registry.contains(ENV_CREATOR, name)
    for name in ENVIRONMENTS
}

import rllib_llm.cli.main
step("the command line")
os.chdir(sys.argv[1])
sys.argv = ["rllib", "doctor", "--no-ray", "run.yaml"]
import torch, ray.rllib
step("RLlib")
[getattr(rllib_llm, name)() for name in dir(rllib_llm) if name.endswith("Config")]
step("configs")
try:
    rllib_llm.cli.main.app()
except SystemExit as end:
    loaded["exit code"] = end.code
step("the doctor")

loaded["algorithms"] = {
    name: _global_registry.get(TRAINABLE_CLASS, name).__name__ for name in ALGORITHMS
}
json.dump(loaded, open("loaded.json", "w"))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, Any]:
    """What `STEPS` finds: modules by step, the doctor's exit code, and the two registries."""
    from tests import tiny_models

    folder = tmp_path_factory.mktemp("loaded")
    tiny_models.save(folder / "model", tiny_models.llama(), tiny_models.byte_tokenizer())
    (folder / "my_rewards.py").write_text(
        "length = lambda completions: [*map(len, completions)]\n"
    )
    (folder / "prompts.csv").write_text("prompt\nA\nB\n")
    config = {
        "model": "model", "prompts": {"data": "prompts.csv"}, "num_completions": 4,
        "rewards": {"functions": ["my_rewards.length"]}, "train_batch_size_per_learner": 8,
    }  # fmt: skip
    run = {"run": "GRPO", "stop": {"training_iteration": 1}, "config": config}
    (folder / "run.yaml").write_text(json.dumps({"one": run}))
    result = subprocess.run(
        [sys.executable, "-c", STEPS, str(folder)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "loaded.json").read_text())


def heavy_since(loaded, before: str, after: str) -> set[str]:
    """The heavy packages that came between two steps."""
    return set(HEAVY) & packages({*loaded[after]} - {*loaded[before]})


def packages(modules) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_a_coordinator_of_weights_and_a_ledger_start_without_torch(loaded):
    # A killed one is missed until its new process has imported what it needs, the package's own
    # first module included.
    found = packages(loaded["a coordinator of weights and a ledger"])
    assert "rllib_llm" in found and not set(HEAVY) & found


# Seconds depend on the machine; which modules come along does not.
def test_the_command_line_s_help_loads_nothing_heavy_beyond_ray(loaded):
    assert "rllib_llm.cli.main" in loaded["the command line"]
    assert not heavy_since(loaded, "Ray", "the command line")


def test_configs_load_nothing_heavy_beyond_rllib(loaded):
    assert not heavy_since(loaded, "RLlib", "configs")


def test_a_config_is_imported_without_the_libraries_that_only_runs_need(loaded):
    """RLlib's own 4 CPU-seconds (torch, pandas, SciPy) are what it costs."""
    heavy = {"transformers", "torchao", "peft", "datasets", "fastapi", "vllm", "duckdb"}
    assert not heavy & packages(loaded["configs"])


def test_a_run_is_checked_without_the_code_that_models_are_made_of(loaded):
    """It takes 2 CPU-seconds to import, in the command and in the driver."""
    assert loaded["exit code"] < 2
    late = {"transformers.modeling_utils", "rllib_llm.rollouts.env_runner"}
    assert not late & {*loaded["the doctor"]} and "transformers" in loaded["the doctor"]


def test_importing_registers_environments_and_trainables(loaded):
    # In a process of its own: Ray forgets what is registered when it ends and begins again.
    assert {"PPOPtx", "SFT", "RewardModel"} <= {*loaded["algorithms"]}
    assert all(name == registered for name, registered in loaded["algorithms"].items())
    assert loaded["environments"] and all(loaded["environments"].values())


@pytest.mark.slow
def test_a_star_import_takes_what_needs_no_extra():
    code = "from rllib_llm import *; import sys; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "rllib_llm.algorithms.grpo" in loaded and "fastapi" not in loaded


def test_what_is_public_is_what_dir_lists():
    import rllib_llm

    assert {"GRPOConfig", "DPOConfig", "default_callbacks"} <= set(dir(rllib_llm))
    assert not {"importlib", "Any", "register_envs"} & set(dir(rllib_llm))


def test_a_wheel_has_the_examples_and_their_environments(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=PACKAGE.parent, check=True, capture_output=True)
    built = tmp_path / "rllib_llm"
    for folder, pattern in ((PACKAGE, "examples/*.py"), (PACKAGE.parent, "tuned_examples/*.yaml")):
        expected = {path.name for path in folder.glob(pattern)}
        assert expected == {path.name for path in built.glob(pattern)} != set()


@pytest.mark.parametrize(("files", "forbidden"), RULES, ids=lambda value: value[0] or "all")
def test_imports_point_one_way(files: tuple[str, ...], forbidden: tuple[str, ...]):
    offences = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in trees()
        if str(path.relative_to(PACKAGE)).startswith(files)
        for name in imported_names(path)
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]
    assert not offences


@cache
def imported_names(path: Path) -> set[str]:
    """Return the dotted names of all modules that the file imports, wherever in it."""
    names = set()
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_optional_packages_are_imported_where_they_are_used():
    # At a module's top they would be imported by everybody who imports that module.
    optional = {"wandb", "bitsandbytes", "torchao", "matplotlib", "vllm", "httpx", "llguidance"}
    # The room of servers needs these, and the server of rewards.
    of_servers = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
    offences = [
        f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}"
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
        if name.partition(".")[0] in optional
        or (
            name.partition(".")[0] in of_servers
            and path.parent.name != "serving"
            and path.name != "reward_server.py"
        )
    ]
    assert not offences
