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

from rllib_llm.cli.doctor import fits_cluster
from rllib_llm.cli.main import app
from rllib_llm.runs.experiments import Experiment
from rllib_llm.runs.plan import check_experiments, check_resources, examined
from rllib_llm.runs.yaml_loader import load, parse
from rllib_llm.shared.errors import Problems
from tests.docs.code_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
# Of AWS's data sheets, which `ray up` finds out by itself.
INSTANCES = {
    "m7i.2xlarge": {"CPU": 8, "GPU": 0, "memory": 32 * GIB},
    "p5.48xlarge": {"CPU": 192, "GPU": 8, "memory": 2048 * GIB},
}
KINDS = ("ray up", "KubeRay")
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
    learners: {{num_learners: {learners}, num_gpus_per_learner: {gpus}}}
    env_runners: {{num_env_runners: {samplers}, num_gpus_per_env_runner: 1}}
"""


def nodes_of(kind: str) -> list[dict[str, int]]:
    """The resources of each node of the guide's file for `ray up` or KubeRay, the head first."""
    blocks = blocks_of(ROOT / "docs" / "guides" / "cluster.md")
    files = [yaml.safe_load(block.code) for block in blocks if block.language == "yaml"]
    if kind == "ray up":
        file = next(file for file in files if "available_node_types" in file)
        types = file["available_node_types"]
        made = {name: INSTANCES[one["node_config"]["InstanceType"]] for name, one in types.items()}
        counts = {name: one["min_workers"] for name, one in types.items() if "min_workers" in one}
        workers = [made[name] for name, count in counts.items() for _ in range(count)]
        return [made[file["head_node_type"]], *workers]
    spec = next(file for file in files if file.get("kind") == "RayJob")["spec"]["rayClusterSpec"]

    def node(group: dict) -> dict[str, int]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        memory = int(limits["memory"].removesuffix("Gi")) * GIB
        gpus = int(limits.get("nvidia.com/gpu", 0))
        return {"CPU": int(limits["cpu"]), "GPU": gpus, "memory": memory}

    workers = [(node(group), group["replicas"]) for group in spec["workerGroupSpecs"]]
    return [node(spec["headGroupSpec"]), *(one for one, count in workers for _ in range(count))]


def experiments(samplers: int, learners: int = 8, gpus: int = 1) -> list[Experiment]:
    """`samplers` of a GPU each, and `learners` of `gpus` each."""
    text = FILE.format(samplers=samplers, learners=learners, gpus=gpus)
    return load(parse(text, "x.yaml"), "x.yaml")


# Samplers, learners, GPUs of each learner; and what the doctor says on two nodes of 8 GPUs.
ASKED = {
    (8, 8, 1): None,
    (9, 8, 1): "reserves 17 GPUs and must fit into Ray's 16",
    (1, 1, 9): "the bundle of a learner, 9 GPU, must fit into one node: the largest has 8 GPU",
    # 15 GPUs: a learner of 5 on each node leaves 3 on both.
    (0, 3, 5): "none is left for that of a learner, 5 GPU; the largest node has 8 GPU in all",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ASKED)
def test_the_guide_s_clusters_hold_what_fits_their_nodes_and_no_more(kind, asked):
    nodes, (reservation,) = nodes_of(kind), check_experiments([experiments(*asked)[0]])

    def check() -> None:
        check_resources(reservation, nodes)

    if ASKED[asked] is None:
        check()
    else:
        with pytest.raises(Problems, match=ASKED[asked]):
            check()


def test_the_doctor_asks_the_cluster_whether_a_trial_fits(ray_session):
    too_much = [str(problem) for problem in fits_cluster(map(examined, experiments(8)), "auto")]
    assert len(too_much) == 1 and "sums: one trial reserves" in too_much[0]
    small = FILE.replace("num_gpus_per_learner: {gpus}", "num_gpus_per_learner: 0")
    small = small.replace("num_gpus_per_env_runner: 1", "num_gpus_per_env_runner: 0")
    fits = load(parse(small.format(samplers=0, learners=0), "x.yaml"), "x.yaml")
    assert not list(fits_cluster(map(examined, fits), "auto"))


@pytest.mark.parametrize("error", [ConnectionError("none found"), RuntimeError("other version")])
def test_a_cluster_that_cannot_be_joined_is_one_more_finding(monkeypatch, tmp_path, error):
    file = tmp_path / "x.yaml"
    file.write_text(FILE.format(samplers=8, learners=8, gpus=1))

    def init(**_) -> None:
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    asked = ["doctor", str(file), "--json", "--ray-address", "auto"]
    made = CliRunner().invoke(app, asked)
    assert made.exit_code == 2, made.output
    told = json.loads(made.stdout)
    found = [problem["name"] for problem in told]
    assert any(str(error).split(":")[0] in json.dumps(problem) for problem in told)
    alone = json.loads(CliRunner().invoke(app, ["doctor", str(file), "--json", "--no-ray"]).stdout)
    assert {one["name"] for one in alone if one["severity"] == "note"} <= set(found)


# Ray of its own: a raylet on this machine for each node of the guide's file, of the same shape, and
# the doctor as a driver that joins them.
RAYLETS = """
import json
import sys

import ray
from ray.cluster_utils import Cluster

from rllib_llm.cli.doctor import fits_cluster
from rllib_llm.runs.plan import examined
from tests.cli.test_doctor_on_clusters import ASKED, experiments, nodes_of

cluster = Cluster()
for node in nodes_of(sys.argv[1]):
    cluster.add_node(
        num_cpus=node["CPU"], num_gpus=node["GPU"], memory=node["memory"],
        object_store_memory=80 * 2**20, include_dashboard=False,
    )
ray.init(address=cluster.address)
declared = [{k: n["Resources"].get(k, 0) for k in ("CPU", "GPU", "memory")} for n in ray.nodes()]
ray.shutdown()
asked = [map(examined, experiments(*each)) for each in ASKED]
found = [[str(p) for p in fits_cluster(each, cluster.address)] for each in asked]
print(json.dumps([declared, found]))
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_doctor_counts_what_raylets_of_the_guide_s_shapes_have(kind):
    command = [sys.executable, "-c", RAYLETS, kind]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    declared, found = json.loads(made.stdout.splitlines()[-1])

    def in_order(nodes: list[dict[str, int]]) -> list[dict[str, int]]:
        return sorted(nodes, key=lambda node: tuple(node.values()))

    assert in_order(declared) == in_order(nodes_of(kind))
    for texts, message in zip(found, ASKED.values(), strict=True):
        assert len(texts) == (message is not None)
        assert all(message in text for text in texts)
