"""A policy under adapters through the whole loop: sampled, learnt, published, kept, merged."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.modules.lora import add_adapters, is_adapter
from rllib_llm.modules.pretrained import load_causal_lm, merge_folder
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.weights.publisher import export_module
from tests.algorithms import tiny_runs

LORA = {"r": 4, "alpha": 8}
IDS = torch.randint(3, 13, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    """The tiny model on disk, so that peft can find it too."""
    folder = tmp_path_factory.mktemp("base")
    for part in tiny_runs.build_model():
        part.save_pretrained(folder)
    return str(folder)


def module_of(algorithm):
    return algorithm.learner_group._learner.module[DEFAULT_MODULE_ID].unwrapped()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("make", [
    pytest.param(tiny_runs.ppo, marks=pytest.mark.slow), tiny_runs.grpo,
])  # fmt: skip
def test_adapters_through_the_loop(make, base_folder, tmp_path):
    config = make(ref_kl_coeff=0.1, lr=0.01).language_model(model=base_folder, lora=LORA)
    with tiny_runs.built(config) as algorithm:
        first = algorithm.train()
        # The environment owns no reference, and the first policy is the trunk itself.
        assert algorithm.env_runner.env.reference is None
        assert first["objective"]["kl"] == pytest.approx(0, abs=1e-5)
        second = algorithm.train()
        assert abs(second["objective"]["kl"]) > 1e-4
        module = module_of(algorithm)
        trunk = {n: p for n, p in module.model.named_parameters() if not is_adapter(n)}
        for name, tensor in load_causal_lm(base_folder).named_parameters():
            stem, _, leaf = name.rpartition(".")
            kept = trunk.get(name, trunk.get(f"{stem}.base_layer.{leaf}"))
            assert torch.equal(kept, tensor)

        # Published: the adapters, 7 linear layers of A [4, in] and B [out, 4] and nothing else.
        flat = export_module(algorithm.learner_group._learner, transport="store")
        assert len(flat.slots) == 14 and all(is_adapter(name) for name in flat.slots)

        path = algorithm.save_to_path(tmp_path / "checkpoint")
        folder = tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT
        held = {file.name for file in folder.iterdir()}
        assert "adapter_model.safetensors" in held and "model.safetensors" not in held
        assert ("rl_heads.safetensors" in held) == module.has_critic
        assert json.loads((folder / "base_model.json").read_text())["model"] == base_folder
        on = logits(module.model)
        torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), on)
        for plain in (algorithm.export_model(tmp_path / "a"), merge_folder(folder, tmp_path / "b")):
            assert (plain / "model.safetensors").is_file()
            assert not (plain / "adapter_config.json").exists()
            torch.testing.assert_close(logits(load_causal_lm(plain)), on, rtol=1e-4, atol=1e-5)
            assert len(load_tokenizer(plain)) == len(module.tokenizer)

        third = tiny_runs.learnt(algorithm.train())
        algorithm.restore_from_path(path)
        assert tiny_runs.learnt(algorithm.train()) == third


def test_adapters_on_a_quantised_trunk_through_the_loop(base_folder, tmp_path):
    config = tiny_runs.grpo(ref_kl_coeff=0.1, lr=0.01).language_model(
        model=base_folder, lora=LORA, quantization="int8"
    )
    with tiny_runs.built(config) as algorithm:
        first, second = algorithm.train(), algorithm.train()
        # The reference is the quantised trunk itself.
        assert first["objective"]["kl"] == pytest.approx(0, abs=1e-5)
        assert abs(second["objective"]["kl"]) > 1e-4
        assert second["sampler"]["logprob_gap"] < 1e-5
        flat = export_module(algorithm.learner_group._learner, transport="store")
        assert len(flat.slots) == 14 and all(is_adapter(name) for name in flat.slots)
        path = algorithm.save_to_path(tmp_path / "checkpoint")
        held = {file.name for file in (tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT).iterdir()}
        assert "adapter_model.safetensors" in held and "model.safetensors" not in held
        plain = load_causal_lm(algorithm.export_model(tmp_path / "merged"))
        on = logits(module_of(algorithm).model)
        torch.testing.assert_close(logits(plain), on, rtol=1e-4, atol=1e-5)
        third = tiny_runs.learnt(algorithm.train())
        algorithm.restore_from_path(path)
        assert tiny_runs.learnt(algorithm.train()) == third


def test_sft_under_adapters_lowers_the_loss(base_folder):
    config = tiny_runs.sft(lr=0.005).language_model(model=base_folder, lora=LORA)
    with tiny_runs.built(config) as algorithm:
        losses = [algorithm.train()["loss"]["sft"] for _ in range(24)]
    # Adapters reach the trunk only: its states keep a norm of at most 4 under a final norm of ones,
    # and rows of the frozen random head have a standard deviation of 0.02, so logits stay small.
    # Computed for such heads, the least loss is about 2.6, 0.3 below the start: this is a third.
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_two_sharded_learners_and_a_sampler_exchange_adapters_only(
    ray_session, base_folder, tmp_path
):
    config = (
        tiny_runs.grpo(ref_kl_estimator="full", train_batch_size_per_learner=6, minibatch_size=3)
        .language_model(model=base_folder, lora=LORA)
        .learners(num_learners=2, strategy="fsdp")
        .env_runners(num_env_runners=1)
    )
    with tiny_runs.built(config) as algorithm:
        first, second = algorithm.train(), algorithm.train()
        # Every adapter in float32, whose sizes are multiples of 64 bytes.
        sizes = {name: p.numel() for name, p in adapters_of(base_folder).items()}
        assert second["weights"]["bytes"] == 4 * sum(sizes.values())
        assert first["sampler"]["logprob_gap"] < 1e-5 and second["sampler"]["logprob_gap"] < 1e-5
        path = algorithm.save_to_path(tmp_path / "checkpoint")
        merged = load_causal_lm(algorithm.export_model(tmp_path / "merged"))
        third = tiny_runs.learnt(algorithm.train())
        algorithm.restore_from_path(path)
        again = tiny_runs.learnt(algorithm.train())
    for group in ("objective", "loss", "policy"):
        assert again[group] == pytest.approx(third[group], rel=1e-5, abs=1e-7)
    folder = tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(folder)), logits(merged),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def adapters_of(base_folder):
    model = load_causal_lm(base_folder)
    add_adapters(model, LORA)
    return {name: p for name, p in model.named_parameters() if is_adapter(name)}
