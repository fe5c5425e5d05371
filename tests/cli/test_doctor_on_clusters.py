"""`rllib doctor --ray-address`, and clusters as the guide's files describe them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml
from typer.testing import CliRunner

from rllib_llm.cli.doctor import _fits_cluster
from rllib_llm.cli.main import app
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.plan import check_experiment, check_resources
from rllib_llm.runs.yaml_loader import load, parse
from rllib_llm.shared.errors import UserError
from tests.docs.code_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
P5_48XLARGE = {"num_cpus": 192, "num_gpus": 8}  # of AWS, which Ray finds out by itself
M7I_2XLARGE = {"num_cpus": 8, "num_gpus": 0}
KEYS = {"CPU": "num_cpus", "GPU": "num_gpus"}
FILE = """
sums:
  run: GRPO
  env: rllib_llm/Arithmetic-v0
  stop: {{training_iteration: 1}}
  config:
    model: rllib_llm.examples.arithmetic.build_model
    max_new_tokens: 4
    num_completions: 4
    train_batch_size_per_learner: 16
    minibatch_size: 16
    learners: {{num_learners: 8, num_gpus_per_learner: 1}}
    env_runners: {{num_env_runners: {samplers}, num_gpus_per_env_runner: 1}}
"""


def nodes_of(kind: str) -> list[dict[str, int]]:
    """The nodes of the guide's file for `ray up` or KubeRay, the head first."""
    blocks = blocks_of(ROOT / "docs" / "guides" / "cluster.md")
    files = [yaml.safe_load(block.code) for block in blocks if block.language == "yaml"]
    if kind == "ray up":
        file = next(file for file in files if "available_node_types" in file)
        types = file["available_node_types"]
        instances = {"m7i.2xlarge": M7I_2XLARGE, "p5.48xlarge": P5_48XLARGE}
        made = {name: instances[one["node_config"]["InstanceType"]] for name, one in types.items()}
        counts = {name: one["min_workers"] for name, one in types.items() if "min_workers" in one}
        workers = [made[name] for name, count in counts.items() for _ in range(count)]
        return [made[file["head_node_type"]], *workers]
    spec = next(file for file in files if file.get("kind") == "RayJob")["spec"]["rayClusterSpec"]

    def node(group: dict) -> dict[str, int]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        return {"num_cpus": int(limits["cpu"]), "num_gpus": int(limits.get("nvidia.com/gpu", 0))}

    workers = [(node(group), group["replicas"]) for group in spec["workerGroupSpecs"]]
    return [node(spec["headGroupSpec"]), *(one for one, count in workers for _ in range(count))]


def experiments(samplers: int) -> list[Experiment]:
    return load(parse(FILE.format(samplers=samplers), "x.yaml"), "x.yaml")


@pytest.mark.parametrize("kind", ["ray up", "KubeRay"])
def test_the_guide_s_clusters_hold_16_gpus_of_learners_and_samplers_and_no_more(kind):
    nodes = nodes_of(kind)
    cluster = {name: sum(node[key] for node in nodes) for name, key in KEYS.items()}
    assert cluster["GPU"] == 16
    check_resources(check_experiment(experiments(8)[0]), cluster)
    with pytest.raises(UserError, match="reserves 17 GPUs and must fit into Ray's 16"):
        check_resources(check_experiment(experiments(9)[0]), cluster)


def test_the_doctor_asks_the_cluster_whether_a_trial_fits(ray_session):
    too_much = [finding.text() for finding in _fits_cluster(experiments(8), "auto")]
    assert len(too_much) == 1 and "sums: one trial reserves" in too_much[0]
    small = FILE.replace("num_learners: 8, num_gpus_per_learner: 1", "num_learners: 0")
    small = small.replace("num_gpus_per_env_runner: 1", "num_gpus_per_env_runner: 0")
    fits = load(parse(small.format(samplers=0), "x.yaml"), "x.yaml")
    assert not list(_fits_cluster(fits, "auto"))


@pytest.mark.parametrize("error", [ConnectionError("none found"), RuntimeError("other version")])
def test_a_cluster_that_cannot_be_joined_is_one_more_finding(monkeypatch, tmp_path, error):
    file = tmp_path / "x.yaml"
    file.write_text(FILE.format(samplers=8))

    def init(**_) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    asked = ["doctor", str(file), "--json", "--ray-address", "auto"]
    made = CliRunner().invoke(app, asked)
    assert made.exit_code == 2, made.output
    found = {finding["id"]: finding for finding in json.loads(made.stdout)}
    assert str(error) in found["cluster.unfit"]["found"]
    alone = json.loads(CliRunner().invoke(app, ["doctor", str(file), "--json", "--no-ray"]).stdout)
    assert {one["id"] for one in alone if one["severity"] == "note"} <= set(found)


# Ray of its own: three raylets on this machine, and the doctor as a driver that joins them.
RAYLETS = """
import json

from rllib_llm.cli.doctor import _fits_cluster
from tests.cli.test_doctor_on_clusters import experiments
from ray.cluster_utils import Cluster

node = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 9, **node})
for _ in range(2):
    cluster.add_node(num_cpus=8, num_gpus=4, **node)
found = [[f.text() for f in _fits_cluster(experiments(n), cluster.address)] for n in (8, 10)]
print(json.dumps(found))
cluster.shutdown()
"""


@pytest.mark.slow
def test_the_doctor_counts_what_real_raylets_have():
    made = subprocess.run([sys.executable, "-c", RAYLETS], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    fits, too_much = json.loads(made.stdout.splitlines()[-1])
    # 8 learners and 8 samplers have 16 of 17 GPUs; its CPUs fit, too.
    assert not fits
    assert len(too_much) == 1 and "reserves 18 GPUs and must fit into Ray's 17" in too_much[0]
