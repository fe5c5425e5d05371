"""A run that was saved and restored is the run that never stopped, bit for bit."""

from __future__ import annotations

import resource
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllib_llm.algorithms.ppo_ptx import PPOPtx
from rllib_llm.checkpoints import folder as checkpoint_folder
from rllib_llm.checkpoints.folder import MANIFEST, MODEL_IN_CHECKPOINT, CheckpointError, check
from rllib_llm.modules.sequence_scores import read_score_normalization
from rllib_llm.weights.loading import can_map_read_only
from tests.algorithms import tiny_runs as tiny
from tests.rollouts.tiny_samplers import Counted, how_it_got_weights

pytestmark = pytest.mark.usefixtures("ray_session")

DECAY = {"lr_schedule": "linear", "lr_num_updates": 40, "lr_num_warmup_updates": 3}


def ppo():
    return tiny.ppo(ref_kl_target=2.0, ref_kl_horizon=50.0, scale_scores=True, ptx_coeff=0.1,
                    ptx_data=tiny.TEXTS, ptx_batch_size=3, **DECAY)  # fmt: skip


def uninterrupted(config):
    with tiny.built(config) as algorithm:
        return tiny.train(algorithm, 5), tiny.weights(algorithm)


def save_after(config, num_iterations, folder):
    with tiny.built(config) as algorithm:
        metrics = tiny.train(algorithm, num_iterations)
        return metrics, algorithm.save_to_path(str(folder))


def test_a_separate_critic_goes_on_as_if_nothing_had_happened(tmp_path):
    """5 iterations are 3, a checkpoint, a new algorithm, and 2 more; for the other algorithms, and
    in another process, see test_exact_resumption.py."""
    metrics, weights = uninterrupted(tiny.ppo(critic="separate"))
    first, path = save_after(tiny.ppo(critic="separate"), 3, tmp_path / "checkpoint")
    with tiny.built(tiny.ppo(critic="separate")) as algorithm:
        algorithm.restore_from_path(path)
        assert first + tiny.train(algorithm, 2) == metrics
        tiny.assert_same_weights(tiny.weights(algorithm), weights)


def test_a_checkpoint_alone_is_enough(tmp_path):
    metrics, weights = uninterrupted(ppo())
    _, path = save_after(ppo(), 3, tmp_path / "checkpoint")
    algorithm = Algorithm.from_checkpoint(path)
    try:
        assert tiny.train(algorithm, 2) == metrics[3:]
        tiny.assert_same_weights(tiny.weights(algorithm), weights)
    finally:
        algorithm.stop()


def test_a_live_algorithm_goes_back_to_an_older_checkpoint(tmp_path):
    with tiny.built(ppo()) as algorithm:
        tiny.train(algorithm, 2)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        early, position = tiny.weights(algorithm), algorithm.position
        later = tiny.train(algorithm, 3)
        latest = tiny.weights(algorithm)
        key = algorithm.weights.published.key

        algorithm.restore_from_path(path)

        tiny.assert_same_weights(tiny.weights(algorithm), early)
        assert algorithm.position == position == 24
        assert algorithm.weights_version == algorithm.weights.published.version == 2
        assert algorithm.weights.published.key != key  # every sampler loads again
        assert tiny.train(algorithm, 3) == later
        tiny.assert_same_weights(tiny.weights(algorithm), latest)


@pytest.mark.slow  # a sampler in a process of its own
def test_samplers_get_restored_weights_with_a_request_alone(tmp_path):
    config = tiny.grpo().env_runners(num_env_runners=1, env_runner_cls=Counted)
    with tiny.built(config) as algorithm:
        tiny.train(algorithm, 1)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        later = tiny.train(algorithm, 1)
        algorithm.restore_from_path(path)
        assert tiny.train(algorithm, 1) == later
        group = algorithm.env_runner_group
        (found,) = group.foreach_env_runner(how_it_got_weights, local_env_runner=False)
    assert found == (0, can_map_read_only(), 1)


def test_everything_that_counts_is_restored(tmp_path):
    with tiny.built(ppo()) as algorithm:
        tiny.train(algorithm, 2)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        old = algorithm.learner_group._learner
        with tiny.built(ppo()) as other:
            other.restore_from_path(path)
            new = other.learner_group._learner
            assert (other.position, other.weights_version) == (24, 2)
            # 12 rows in mini-batches of 6, 2 epochs, 2 iterations; 3 texts a step.
            assert new.num_updates == old.num_updates == 8
            assert new.num_ptx_texts == old.num_ptx_texts == 24
            assert new.ref_kl.value == old.ref_kl.value != 0.05
            assert new.score_scales[0].state_dict() == old.score_scales[0].state_dict()
            assert new.learning_rate == old.learning_rate < 1e-3


def test_the_learning_rate_is_the_config_s_after_a_restore(tmp_path):
    """Population-based search restores another trial's checkpoint under settings of its own."""
    _, path = save_after(tiny.ppo(lr=1e-3), 1, tmp_path / "checkpoint")
    with tiny.built(tiny.ppo(lr=2e-4, ref_kl_coeff=0.3)) as algorithm:
        algorithm.restore_from_path(path)
        (metrics,) = tiny.train(algorithm, 1)
    assert metrics["lr"] == pytest.approx(2e-4)
    assert metrics["objective"]["ref_kl_coeff"] == 0.3


def test_the_model_in_a_checkpoint_is_a_hugging_face_folder(tmp_path):
    with tiny.built(tiny.ppo()) as algorithm:
        tiny.train(algorithm, 1)
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        exported = algorithm.export_model(tmp_path / "exported")
        (tmp_path / "any").touch()
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        assert {file.stat().st_mode for file in files} == {(tmp_path / "any").stat().st_mode}
        module = algorithm.learner_group._learner.module["default_policy"].unwrapped()
        for folder in (tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT, exported):
            model = AutoModelForCausalLM.from_pretrained(folder)
            ids = AutoTokenizer.from_pretrained(folder)("12+3=", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                assert torch.equal(model(ids).logits, module.model(ids).logits)
    assert str(tmp_path / "checkpoint") in path


def test_a_saved_reward_model_knows_the_scale_of_its_scores(tmp_path):
    config = tiny.reward_model(eval_data=tiny.PAIRS)
    with tiny.built(config) as algorithm:
        tiny.train(algorithm, 2)
        algorithm.save_checkpoint(str(tmp_path / "checkpoint"))
        evaluation = algorithm.evaluate()
    scale = read_score_normalization(str(tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT))
    assert scale == pytest.approx((evaluation["score_mean"], evaluation["score_std"]))
    assert evaluation["score_std"] > 0


def test_a_checkpoint_holds_weights_as_safetensors_only(tmp_path):
    with tiny.built(tiny.ppo()) as algorithm:
        path = Path(algorithm.save_to_path(tmp_path / "checkpoint"))
    manifest = check(path)
    assert manifest["algorithm"] == "PPOPtx"
    assert manifest["training_iteration"] == 0
    names = {Path(name).suffix for name in manifest["files"]}
    assert names <= {".safetensors", ".json", ".pkl", ""}
    # Adam's moments are RLlib's to pickle, and an optimiser that never stepped has none.
    files = [path / name for name in manifest["files"]]
    assert [file for file in files if b"_rebuild_tensor" in file.read_bytes()] == []


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint(tmp_path):
    """A file may have 14 KB, then writing fails as on a full disk; the model has 16 KB."""
    with tiny.built(tiny.ppo()) as algorithm:
        path = algorithm.save_to_path(str(tmp_path / "checkpoint"))
        before = check(path)
        algorithm.train()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (14_000, hard))
        try:
            with pytest.raises((OSError, SafetensorError), match="File too large"):
                algorithm.save_to_path(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert check(path) == before
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
        algorithm.save_to_path(path)
        assert check(path)["training_iteration"] == 1


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path):
    with tiny.built(tiny.ppo()) as algorithm:
        path = Path(algorithm.save_to_path(tmp_path / "checkpoint_000000"))
        algorithm.train()
        trained = tiny.weights(algorithm)
        model = path / MODEL_IN_CHECKPOINT / "model.safetensors"
        model.write_bytes(model.read_bytes()[:-1])
        for restore in (algorithm.restore_from_path, type(algorithm).from_checkpoint):
            with pytest.raises(CheckpointError, match="bytes of .*model.safetensors"):
                restore(str(path))
        tiny.assert_same_weights(tiny.weights(algorithm), trained)
        assert (algorithm.position, algorithm.training_iteration) == (12, 1)


@pytest.fixture
def sums(monkeypatch):
    """One item for each checksum that was computed; files here are smaller than a chunk."""
    sums = []

    def crc32(data, value):
        sums.append(len(data))
        return zlib.crc32(data, value)

    monkeypatch.setattr(checkpoint_folder, "zlib", SimpleNamespace(crc32=crc32))
    return sums


def test_the_newest_usable_checkpoint_is_found(tmp_path, sums):
    with tiny.built(tiny.ppo()) as algorithm:
        for i in range(3):
            path = Path(algorithm.save_to_path(tmp_path / f"checkpoint_{i:06d}"))
            algorithm.train()
        (path / "algorithm_state.pkl").unlink()
        sums.clear()
        algorithm.restore_from_path(tmp_path)
        assert algorithm.training_iteration == 1
        num_sums = len(sums)
        other = PPOPtx.from_checkpoint(tmp_path)
        other.stop()
        assert other.training_iteration == 1
        assert len(sums) == 2 * num_sums > 20  # each file is read, and once
        # Tune asks for the one it noted last.
        algorithm.train()
        algorithm.load_checkpoint(str(path))
        assert (algorithm.training_iteration, algorithm.position) == (1, 12)
        # It never goes forward: an older one was meant.
        (tmp_path / "checkpoint_000000" / MANIFEST).unlink()
        with pytest.raises(CheckpointError, match="checkpoint_000000"):
            algorithm.load_checkpoint(str(tmp_path / "checkpoint_000000"))
