"""Whole runs with everything on the pretend GPU, beside the same runs on the processor.

What is sampled is the same, token for token: noise, prompts and weights are. What is learnt agrees
to round-off, since attention and sums of gradients are other operators there.
"""

from __future__ import annotations

import math

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_llm import GRPOConfig
from rllib_llm.algorithms.reinforce_pp import ReinforcePPConfig
from rllib_llm.checkpoints.folder import MODEL_IN_CHECKPOINT
from rllib_llm.learners.metrics import RefusedUpdates
from rllib_llm.modules.pretrained import load_causal_lm
from tests.algorithms import tiny_runs as tiny
from tests.device import pretend

pytestmark = pytest.mark.usefixtures("ray_session")
# Adam divides by the root of a second moment: one step of a weight whose gradient is round-off is
# up to lr, whichever sign the round-off has. Over the two iterations of a run at most this often.
LR, MOST_STEPS = 1e-3, 16
NAMES = ("rewards", "env", "episode", "objective/scores")


def calculator():
    return (
        GRPOConfig()
        .environment("rllib_llm/Calculator-v0", env_config={"max_turns": 2, "num_problems": 40})
        .language_model(model="rllib_llm.examples.calculator.build_model")
        .sampling(num_completions=3, max_new_tokens=8, log_samples_every=0)
        .training(train_batch_size_per_learner=6, minibatch_size=6, lr=LR)
    )


def reinforce_pp(**training):
    return tiny._rlhf(ReinforcePPConfig(), **training).sampling(num_completions=3)


def judged_by_a_model():
    config = tiny.grpo()
    judge = {"model": f"{tiny.HERE}.build_classifier"}
    return config.environment(
        env_config={**config.env_config, "reward_functions": None, "reward_model": judge}
    )


RUNS = {
    "GRPO, reference in the environment": lambda: tiny.grpo(ref_kl_coeff=0.1),
    "conversations": calculator,
}
MORE_RUNS = {
    "GRPO": tiny.grpo,
    "GRPO, full KL, reference in the learner": lambda: tiny.grpo(
        ref_kl_coeff=0.1, ref_kl_estimator="full", reference_in="learner"
    ),
    "RLOO": tiny.rloo,
    "REINFORCE++": reinforce_pp,
    "PPO": tiny.ppo,
    "PPO-ptx": lambda: tiny.ppo(ptx_data=f"{tiny.HERE}.build_texts", ptx_coeff=0.5),
    "SFT": tiny.sft,
    "reward model": lambda: tiny.reward_model().language_model(
        model=f"{tiny.HERE}.build_classifier"
    ),
    "DPO": tiny.dpo,
    "micro-batches": lambda: tiny.grpo(micro_batch_tokens=40),
    "mixed precision": lambda: tiny.grpo().language_model(mixed_precision="bf16"),
    "top-k and top-p": lambda: tiny.grpo().sampling(top_k=8, top_p=0.9),
    "filter": lambda: tiny.grpo(drop_zero_variance_groups=True),
    "replay": lambda: tiny.grpo(off_policy="bypass").replay(groups=1),
    "lockstep streaming": lambda: tiny.grpo(off_policy="bypass").streaming(max_staleness=1),
    "two epochs": lambda: tiny.grpo(num_epochs=2, minibatch_size=6),
    "gradient checkpointing": lambda: tiny.ppo().language_model(gradient_checkpointing=True),
    "streaming, decoupled": lambda: tiny.grpo(off_policy="decoupled").streaming(max_staleness=1),
    "conversations, reference": lambda: calculator().training(ref_kl_coeff=0.1),
    "a reward model judges": judged_by_a_model,
    "evaluation": lambda: tiny.grpo().evaluation(
        evaluation_interval=1, evaluation_num_env_runners=0, evaluation_duration=3
    ),
}


def on_gpu(config):
    return config.learners(num_learners=0, num_gpus_per_learner=1)


def outcome(config, num_iterations=2):
    """What was learnt in each iteration, and the weights on the host."""
    with tiny.built(config) as algorithm:
        learnt = tiny.train(algorithm, num_iterations)
        held = {name: tensor.cpu() for name, tensor in tiny.weights(algorithm).items()}
    return learnt, held


def numbers(tree, path=()):
    """Path and value of every number in a result."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from numbers(value, (*path, name))
        elif isinstance(value, (int, float)):
            yield (*path, name), float(value)


def compare(make):
    there, weights = outcome(on_gpu(make()))
    here, expected = outcome(make())
    one, other = (dict(numbers({str(i): r for i, r in enumerate(x)})) for x in (there, here))
    assert one.keys() == other.keys()
    for path, value in one.items():
        if path[1] in NAMES and "seconds" not in path[-1]:
            assert value == pytest.approx(other[path], rel=1e-4, nan_ok=True), path
        assert math.isfinite(value) == math.isfinite(other[path]), path
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=LR * MOST_STEPS, msg=lambda m, n=name: f"{n}: {m}"
        )


def compare_on_pretend(make, gpu):
    compare(make)
    assert gpu.operators["aten::_fused_adamw_"], "nothing was learnt on the device"


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_the_processor_s(name, gpu):
    compare_on_pretend(RUNS[name], gpu)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_RUNS)
def test_more_runs_are_the_processor_s(name, gpu):
    compare_on_pretend(MORE_RUNS[name], gpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", {**RUNS, **MORE_RUNS})
def test_a_run_on_a_real_gpu_is_the_processor_s(name):
    torch.cuda.reset_peak_memory_stats()
    compare({**RUNS, **MORE_RUNS}[name])
    assert torch.cuda.max_memory_allocated() > 0, "nothing was learnt on the device"


def test_a_refused_mini_batch_is_read_without_a_gpu(tmp_path):
    with pretend.gpu():
        nan = torch.tensor(torch.nan, device="cuda")
        RefusedUpdates(str(tmp_path), rank=0).refuse(nan, nan, {"x": torch.ones(2, device="cuda")})
    (path,) = tmp_path.iterdir()
    assert torch.load(path)["x"].tolist() == [1.0, 1.0]


@pytest.mark.slow
def test_adapters(gpu, tmp_path):
    """The reference is the trunk without them, and what is published are they alone."""
    for part in tiny.build_model():
        part.save_pretrained(tmp_path)

    def make():
        config = tiny.grpo(ref_kl_coeff=0.1)
        return config.language_model(model=str(tmp_path), lora={"r": 4, "alpha": 8})

    compare_on_pretend(make, gpu)


def test_checkpoint_and_export(gpu, tmp_path):
    with tiny.built(on_gpu(tiny.grpo())) as algorithm:
        algorithm.train()
        # The sampler beside the learner, and its environment's frozen models, are where that is.
        assert str(algorithm.env_runner.env.device) == "cuda:0"
        path = algorithm.save_to_path(tmp_path / "checkpoint")
        saved = tiny.weights(algorithm)
        third = tiny.learnt(algorithm.train())
        algorithm.restore_from_path(path)
        tiny.assert_same_weights(tiny.weights(algorithm), saved)
        assert tiny.learnt(algorithm.train()) == third
        folder = algorithm.export_model(tmp_path / "exported")
        module = algorithm.learner_group._learner.module[DEFAULT_MODULE_ID].unwrapped()
        for place in (folder, tmp_path / "checkpoint" / MODEL_IN_CHECKPOINT):
            assert (place / "model.safetensors").is_file()
        for name, tensor in load_causal_lm(folder).named_parameters():
            assert torch.equal(dict(module.model.named_parameters())[name].cpu(), tensor)
    # A processor goes on where the GPU stopped.
    with tiny.built(tiny.grpo()) as algorithm:
        algorithm.restore_from_path(path)
        tiny.assert_same_weights(
            tiny.weights(algorithm), {name: tensor.cpu() for name, tensor in saved.items()}
        )
        assert algorithm.train()["train"]["rewards"] == third["train"]["rewards"]
