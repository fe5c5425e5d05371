"""Settings that are "auto": decided once by the hardware, and kept wherever a run goes on."""

from __future__ import annotations

import json
import shutil

import pytest
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.algorithms.language_model_config import decided
from rllib_llm.checkpoints.folder import MANIFEST, read_manifest
from rllib_llm.modules.precision import LIBRARIES, faster_library, multiplies_by_onednn
from rllib_llm.shared.process import multiplies_bfloat16
from tests.algorithms import tiny_runs

needs_bfloat16 = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="the processor has neither AMX nor AVX512-BF16"
)


def auto():
    return tiny_runs.sft().language_model(mixed_precision="auto")


@pytest.fixture
def move(monkeypatch):
    """Takes the process to a machine with or without products of bfloat16, as `decided` sees it."""

    def to(has_it: bool) -> None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "DEFAULT" if has_it else "AVX2")

    return to


@pytest.mark.parametrize("has_it, precision", [(True, "bf16"), (False, None)])
def test_it_is_what_the_processor_has(has_it, precision):
    assert decided(auto(), lambda: has_it) == precision
    # What was chosen is not asked about.
    chosen = tiny_runs.sft().language_model(mixed_precision="bf16")
    assert decided(chosen, lambda: has_it) == "bf16"
    assert decided(tiny_runs.sft(), lambda: has_it) is None


def test_a_gpu_that_is_not_there_has_none():
    assert decided(auto().learners(num_gpus_per_learner=1), lambda: True) is None


@needs_bfloat16
@pytest.mark.parametrize("began_with", [True, False])
@pytest.mark.parametrize("by", ["from_checkpoint", "restore_from_path"])
def test_a_run_goes_on_as_it_began(tmp_path, move, began_with, by):
    precision = "bf16" if began_with else None
    move(began_with)
    said = "'bf16' in this run: the processor multiplies" if began_with else "would emulate"
    with pytest.warns(UserWarning, match=said):
        straight = auto().build_algo()
    straight.train()
    path = straight.save_to_path(str(tmp_path / "checkpoint"))
    assert read_manifest(tmp_path / "checkpoint")["mixed_precision"] == precision

    move(not began_with)
    if by == "from_checkpoint":
        resumed = type(straight).from_checkpoint(path)
    else:
        resumed = auto().build_algo()
        assert resumed.config.mixed_precision != precision
        resumed.restore_from_path(path)

    assert resumed.config.mixed_precision == precision
    results = [tiny_runs.train(algorithm, 1) for algorithm in (straight, resumed)]
    assert results[0] == results[1]
    tiny_runs.assert_same_weights(tiny_runs.weights(straight), tiny_runs.weights(resumed))
    for algorithm in (straight, resumed):
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)


def test_the_library_of_products_goes_on_as_it_began(tmp_path):
    """Another machine would choose another: the checkpoint's manifest says which it was."""
    config = tiny_runs.sft().language_model(float32_products="auto")
    straight = config.build_algo()
    assert straight.config.float32_products == faster_library()
    path = straight.save_to_path(str(tmp_path / "checkpoint"))
    manifest = tmp_path / "checkpoint" / MANIFEST
    about = json.loads(manifest.read_text())
    (other,) = set(LIBRARIES) - {about["float32_products"]}
    manifest.write_text(json.dumps(about | {"float32_products": other}))
    resumed = config.build_algo()
    resumed.restore_from_path(path)
    assert resumed.config.float32_products == other
    (by_onednn,) = resumed.learner_group.foreach_learner(
        lambda learner: multiplies_by_onednn(learner.module[DEFAULT_MODULE_ID].unwrapped())
    )
    assert by_onednn.get() == (other == "onednn")
    for algorithm in (straight, resumed):
        algorithm.stop()
        shutil.rmtree(algorithm.logdir, ignore_errors=True)


def test_the_setting_s_old_name_is_refused_with_the_new_one():
    with pytest.raises(ValueError, match="autocast_dtype must .* It is mixed_precision='bf16' now"):
        tiny_runs.grpo().language_model(autocast_dtype="bfloat16")
    with pytest.raises(ValueError, match="autocast_dtype must .* It is mixed_precision='bf16' now"):
        tiny_runs.grpo().update_from_dict({"autocast_dtype": "bfloat16"})
