"""`rllib doctor --ray-address` on raylets that have what the guide's cluster files ask for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.cluster_utils import Cluster

from tests.docs.code_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
P5_48XLARGE = {"num_cpus": 192, "num_gpus": 8}  # of AWS, which Ray finds out by itself
M7I_2XLARGE = {"num_cpus": 8, "num_gpus": 0}
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


@pytest.mark.slow  # starts raylets and a process for each file
@pytest.mark.parametrize("kind", ["ray up", "KubeRay"])
def test_the_doctor_passes_what_the_guide_s_cluster_holds_and_refuses_more(kind, tmp_path):
    head, *workers = nodes_of(kind)
    assert sum(node["num_gpus"] for node in workers) == 16
    frugal = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    system = {"prestart_worker_first_driver": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={**head, **frugal, "_system_config": system}
    )
    try:
        for node in workers:
            cluster.add_node(**node, **frugal)
        said = {}
        for samplers in (8, 9):
            file = tmp_path / f"{samplers}.yaml"
            file.write_text(FILE.format(samplers=samplers), encoding="utf-8")
            done = subprocess.run(
                [sys.executable, "-m", "rllib_llm.cli.main", "doctor", str(file), "--ray-address",
                 cluster.address, "--storage-path", str(tmp_path)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
                capture_output=True, text=True,
            )  # fmt: skip
            said[samplers] = (done.returncode, done.stdout)
    finally:
        cluster.shutdown()
    assert said[8][0] < 2, said
    assert said[9][0] == 2, said
    assert "one trial reserves 17 GPUs and must fit into Ray's 16" in said[9][1]
