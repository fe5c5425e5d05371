"""The package as a whole: quick to import, and imports that point one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_importing_loads_nothing_heavy_beyond_ray():
    # Seconds depend on the machine; which modules come along does not.
    code = "import sys, ray.tune; before = set(sys.modules); import rllib_llm; " \
           "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"  # fmt: skip
    assert not set(HEAVY) & loaded_by(code, "rllib_llm")


@pytest.mark.slow
def test_a_star_import_takes_what_needs_no_extra():
    loaded = loaded_by("from rllib_llm import *; import sys; print(*sys.modules)", "rllib_llm")
    assert "rllib_llm.algorithms.grpo" in loaded and "fastapi" not in loaded


def test_configs_load_nothing_heavy_beyond_rllib():
    code = "import sys, torch, ray.rllib, ray.tune; before = set(sys.modules); import rllib_llm; " \
           "[getattr(rllib_llm, n)() for n in dir(rllib_llm) if n.endswith('Config')]; " \
           "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"  # fmt: skip
    assert not set(HEAVY) & loaded_by(code, "rllib_llm")


def test_the_command_line_s_help_loads_nothing_heavy_beyond_ray():
    code = "import sys, ray.tune; before = set(sys.modules); import rllib_llm.cli.main; " \
           "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"  # fmt: skip
    assert not set(HEAVY) & loaded_by(code, "rllib_llm")


def test_a_run_is_checked_without_the_code_that_models_are_made_of(tmp_path):
    """It takes 2 CPU-seconds to import, in the command and in the driver."""
    from tests import tiny_models

    tiny_models.save(tmp_path / "model", tiny_models.llama(), tiny_models.byte_tokenizer())
    (tmp_path / "my_rewards.py").write_text(
        "length = lambda completions: [*map(len, completions)]\n"
    )
    (tmp_path / "prompts.csv").write_text("prompt\nA\nB\n")
    config = {
        "model": "model", "prompts": {"data": "prompts.csv"}, "num_completions": 4,
        "rewards": {"functions": ["my_rewards.length"]}, "train_batch_size_per_learner": 8,
    }  # fmt: skip
    run = {"run": "GRPO", "stop": {"training_iteration": 1}, "config": config}
    (tmp_path / "run.yaml").write_text(json.dumps({"one": run}))
    code = f"import os, sys; from rllib_llm.cli.main import app; os.chdir({str(tmp_path)!r})\n" \
           "sys.argv = ['rllib', 'doctor', '--no-ray', 'run.yaml']\n" \
           "try: app()\nexcept SystemExit as end: assert end.code < 2, end.code\n" \
           "print(*sys.modules)"  # fmt: skip
    late = {"transformers.modeling_utils", "rllib_llm.rollouts.env_runner"}
    assert not late & loaded_by(code, "rllib_llm")


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


def test_a_coordinator_of_weights_and_a_ledger_start_without_torch():
    # A killed one is missed until its new process has imported what it needs.
    code = "import sys, rllib_llm.weights.coordinator, rllib_llm.rollouts.ledger_actor; " \
           "print(*{m.partition('.')[0] for m in sys.modules})"  # fmt: skip
    assert not set(HEAVY) & loaded_by(code, "rllib_llm")


def loaded_by(code: str, expected: str) -> set[str]:
    """Packages that a process prints, `expected` among them."""
    loaded = set(printed_by(code).split())
    assert expected in loaded
    return loaded


def printed_by(code: str) -> str:
    """The output of a process that runs the code, without an error."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_registers_environments_and_trainables():
    # In a process of its own: Ray forgets what is registered when it ends and begins again.
    printed_by("""
import gymnasium
from ray.tune.registry import ENV_CREATOR, TRAINABLE_CLASS, _global_registry

import rllib_llm
from rllib_llm.algorithms.registry import ALGORITHMS
from rllib_llm.envs.registry import ENVIRONMENTS

assert {"PPOPtx", "SFT", "RewardModel"} <= set(ALGORITHMS)
for name in ALGORITHMS:
    assert _global_registry.get(TRAINABLE_CLASS, name).__name__ == name
for name in ENVIRONMENTS:
    assert name in gymnasium.registry
    assert _global_registry.contains(ENV_CREATOR, name)
""")


@pytest.mark.parametrize(("files", "forbidden"), RULES, ids=lambda value: value[0] or "all")
def test_imports_point_one_way(files: tuple[str, ...], forbidden: tuple[str, ...]):
    offences = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)).startswith(files)
        for name in imported_names(path)
        if any(name == root or name.startswith(f"{root}.") for root in forbidden)
    ]
    assert not offences


def imported_names(path: Path) -> set[str]:
    """Return the dotted names of all modules that the file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
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
