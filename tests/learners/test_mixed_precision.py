"""A bfloat16 copy computes, float32 weights are trained: where each number is kept, and what the
copy's rounding may change."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.learners.off_policy import OldLogprobs
from rllib_llm.modules.precision import ComputingCopy, warn_of_emulation
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.shared import columns
from rllib_llm.shared.process import multiplies_bfloat16
from rllib_llm.weights.flat_buffer import unpack
from tests.algorithms import tiny_runs
from tests.learners import tiny_learners as tiny
from tests.rounding import assert_as_near

# bfloat16 has 8 bits of mantissa: a relative step of 2^-8 = 0.004 in every product.
STEP, HALF = 2.0**-8, torch.bfloat16


def ppo(**training):
    settings = {"num_epochs": 1, "minibatch_size": None, "entropy_coeff": 0.01, **training}
    return tiny_runs.ppo(**settings)


def build(config, mixed_precision="bf16", **language_model):
    return tiny.build(config.language_model(mixed_precision=mixed_precision, **language_model))


def copies_of(learner):
    module = tiny.module_of(learner)
    pairs = {name: (t, module.published_tensors()[name]) for name, t in module.own_tensors().items()
             if name in module.published_tensors()}  # fmt: skip
    assert pairs
    return pairs


def off_by(batch, nats: float = 0.25):
    """The batch of a sampler whose log-probs are off at every other token."""
    mask = batch[columns.COMPLETION_MASK]
    noise = nats * (torch.arange(mask.shape[1]) % 2)
    return {**batch, columns.SAMPLER_LOGPROBS: (batch[columns.SAMPLER_LOGPROBS] + noise) * mask}


def test_weights_moments_and_log_probs_stay_float32_and_near():
    exact, half = build(ppo(), None), build(ppo())
    batch = tiny.judged(exact)
    outputs = [learner.forward(batch) for learner in (exact, half)]
    for name in (columns.LOGPROBS, columns.ENTROPY, columns.VALUES):
        assert outputs[1][name].dtype == torch.float32
        torch.testing.assert_close(outputs[1][name], outputs[0][name], rtol=0, atol=20 * STEP)
    assert not torch.equal(outputs[0][columns.LOGPROBS], outputs[1][columns.LOGPROBS])
    for learner in (exact, half):
        tiny.update(learner, batch)
    assert all(tensor.dtype == torch.float32 for tensor in tiny.parameters(half).values())
    gradients = [tiny.first_gradients(learner) for learner in (exact, half)]
    assert all(gradient.dtype == torch.float32 for gradient in gradients[1].values())
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in gradients]
    assert torch.cosine_similarity(*flat, dim=0) > 0.995


def test_the_copy_is_the_rounded_weights_after_steps_and_after_a_restore():
    learner, other = build(tiny_runs.grpo()), build(tiny_runs.grpo())
    tiny.update(learner, tiny.judged(learner))
    other.set_state(learner.get_state())
    for made in (learner, other):
        for weight, twin in copies_of(made).values():
            assert weight.dtype == torch.float32 and twin.dtype == torch.bfloat16
            assert torch.equal(twin, weight.to(torch.bfloat16))
    tiny_runs.assert_same_weights(tiny.parameters(learner), tiny.parameters(other))


def test_small_steps_are_not_lost():
    """Steps of 1e-5 beside weights of 1: bfloat16 would lose each of them (its step is 2^-8)."""
    weights = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(weights.weight)
    made = ComputingCopy(weights, torch.bfloat16)
    for _ in range(1000):
        with torch.no_grad():
            weights.weight.sub_(1e-5)
        made.cast()
    assert weights.weight.item() == pytest.approx(0.99, abs=1e-4)
    assert made.model.weight.item() == pytest.approx(0.99, abs=STEP)


def test_gradients_of_micro_batches_are_added_up_in_float32():
    """1 + 1000 times 2^-9: in bfloat16 each sum would be rounded back to 1."""
    weights = torch.nn.Linear(1, 1, bias=False)
    made = ComputingCopy(weights, torch.bfloat16)
    made.model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    for _ in range(1000):
        made.model(torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)).sum().backward()
    assert float(weights.weight.grad) == 1 + 1000 * 2.0**-9
    assert made.model.weight.grad is None


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit():
    config = tiny_runs.grpo(micro_batch_size=2)
    straight, resumed = build(config), build(config)
    batches = [tiny.judged(straight, seed=seed) for seed in range(2)]
    tiny.update(straight, batches[0])
    resumed.set_state(copy.deepcopy(straight.get_state()))
    for learner in (straight, resumed):
        tiny.update(learner, batches[1])
    tiny_runs.assert_same_weights(tiny.parameters(straight), tiny.parameters(resumed))


def test_layers_that_compute_again_give_the_same_gradients():
    learners = build(ppo(), gradient_checkpointing=True), build(ppo()), build(ppo(), None)
    batch, gradients = tiny.judged(learners[1]), []
    for learner in learners:
        tiny.update(learner, batch)
        gradients.append(tiny.first_gradients(learner))
    again, plain, exact = gradients
    assert again.keys() == plain.keys() == exact.keys()
    for name, gradient in exact.items():  # float32, which is exact enough beside bfloat16
        assert_as_near(again[name], plain[name], gradient.double(), factor=4.0, computed=HALF)


def test_adapters_are_float32_weights_on_a_bfloat16_trunk():
    learner = build(tiny_runs.grpo(), lora={"r": 2})
    module = tiny.module_of(learner)
    start = tiny.parameters(learner)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    shared = {p.data_ptr() for p in module.parameters() if not p.requires_grad}
    computing = {p.data_ptr() for p in module.computing_model.parameters()}
    assert shared and shared <= computing  # one trunk
    tiny.update(learner, tiny.judged(learner))
    changed = {
        name for name, t in tiny.parameters(learner).items() if not torch.equal(t, start[name])
    }
    assert changed and all(".lora_" in name for name in changed)
    for weight, twin in copies_of(learner).values():
        assert torch.equal(twin, weight.to(torch.bfloat16))


def test_the_head_of_a_reward_model_computes_in_float32():
    config = tiny_runs.reward_model().language_model(mixed_precision="bf16")
    learner = tiny.build(config)
    module = tiny.module_of(learner)
    assert module.computing_model.score is module.model.score
    assert module.model.score.weight.dtype == torch.float32
    with torch.no_grad():
        module.model.score.weight.zero_()
        module.model.score.weight[0, 0] = 0.7  # has more digits than bfloat16, and so its products
    batch = {columns.INPUT_IDS: torch.tensor([[4, 5, 6]]),
             columns.ATTENTION_MASK: torch.ones(1, 3, dtype=torch.bool)}  # fmt: skip
    states = module.computing_model.model(input_ids=batch[columns.INPUT_IDS]).last_hidden_state
    score = learner.forward(batch)[columns.SCORES].detach()
    assert states.dtype == torch.bfloat16
    torch.testing.assert_close(score, states[:, -1, 0].float() * 0.7, rtol=3 * STEP, atol=0)
    assert float(score) != float(score.bfloat16())


@pytest.mark.parametrize("config, settings", [
    (tiny_runs.grpo, {}),
    (tiny_runs.grpo, {"policy_loss": "gspo", "clip_param": 3e-4, "clip_param_high": 4e-4}),
    (tiny_runs.grpo, {"off_policy": "decoupled", "off_policy_weights": None}),
    pytest.param(tiny_runs.rloo, {"policy_loss": "rloo"}, marks=pytest.mark.slow),
    (tiny_runs.ppo, {}),
])  # fmt: skip
@pytest.mark.parametrize("precision", [
    {"mixed_precision": "bf16"}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow)
])  # fmt: skip
def test_the_first_mini_batch_is_exactly_on_policy_whatever_the_sampler_says(
    config, settings, precision
):
    config = config(minibatch_size=None, num_epochs=1, micro_batch_size=2, **settings)
    learner = tiny.build(config.language_model(**precision))
    metrics = tiny.update(learner, off_by(tiny.judged(learner)))
    assert metrics["val/ratio"] == metrics["val/ratio_square"] == 1.0
    assert metrics["policy/approxkl_avg"] == metrics["policy/clipfrac_avg"] == 0.0
    # Lengths 3, 5, 1, 4, 2, 5 have 1, 2, 0, 2, 1, 2 odd places among 20 tokens.
    assert metrics["sampler/logprob_gap"] == pytest.approx(0.25 * 8 / 20, rel=0.2)


@pytest.mark.parametrize("settings", [
    {"minibatch_size": 3, "num_epochs": 1},
    {"minibatch_size": None, "num_epochs": 3},
    {"minibatch_size": 3, "num_epochs": 2},
])  # fmt: skip
def test_later_mini_batches_are_compared_with_the_learner_before_the_update(settings):
    """A learning rate of 0: the policy stays what it was, and each row is computed alone, here as
    there, so that all ratios are 1 however far the sampler is off."""
    config = tiny_runs.grpo(lr=0.0, micro_batch_size=1, weight_decay=0.0, **settings)
    learner = build(config)
    metrics = tiny.update(learner, off_by(tiny.judged(learner)))
    assert metrics["val/ratio"] == metrics["val/ratio_square"] == 1.0
    assert metrics["policy/clipfrac_avg"] == 0.0


def test_rows_that_come_again_are_not_scored_before_the_update():
    """With one mini-batch per epoch its own pass says all that later epochs ask."""
    passes = []

    class Counting(tiny_runs.grpo().get_default_learner_class()):
        def evaluate_rows(self, batch, names, **options):
            passes.append(len(batch[columns.COMPLETION_IDS]))
            return super().evaluate_rows(batch, names, **options)

    for settings in ({"minibatch_size": None, "num_epochs": 3}, {"minibatch_size": 4}):
        learner = build(tiny_runs.grpo(**settings).learners(learner_class=Counting))
        tiny.update(learner, tiny.judged(learner))
    assert passes == [2]  # of six rows those that are not among the first four


@pytest.mark.parametrize("minibatch_size, asked", [
    (None, [("values", 6)]),
    (4, [("values", 6), ("logprobs", 2)]),  # of six rows those that are not among the first four
])  # fmt: skip
def test_with_two_trunks_the_policys_is_not_run_for_values_nor_the_critics_for_log_probs(
    minibatch_size, asked
):
    """Also with a KL in the reward, which is that of the sampler's log-probs."""
    asks, trunks = [], []

    class Counting(tiny_runs.ppo().get_default_learner_class()):
        def evaluate_rows(self, batch, names, **options):
            asks.append((*names, len(batch[columns.COMPLETION_IDS])))
            before = len(trunks)
            found = super().evaluate_rows(batch, names, **options)
            wanted = "critic" if names == [columns.VALUES] else "policy"
            assert set(trunks[before:]) == {wanted}
            return found

    config = tiny_runs.ppo(
        critic="separate", ref_kl_coeff=0.1, minibatch_size=minibatch_size, num_epochs=1
    )
    learner = build(config.learners(learner_class=Counting))
    module = tiny.module_of(learner)
    parts = {"policy": module.computing_model.model, "critic": module.computing("critic")}
    for name, part in parts.items():
        part.layers[0].register_forward_hook(lambda *_, name=name: trunks.append(name))
    tiny.update(learner, tiny.judged(learner))
    assert asks == asked


def sampled(learner, module=None):
    batch = tiny.completions([3, 3, 3, 3])
    params = SamplingParams(max_new_tokens=5, stop_token_ids=(2,), pad_token_id=0)
    made = (module or tiny.module_of(learner)).forward_exploration(
        batch, generate=generate, params=params, noise=uniform_noise(0, torch.arange(4), 5)
    )
    return {**batch, **made}


def test_sampler_and_trainer_use_the_same_arithmetic():
    learner = build(ppo())
    batch = sampled(learner)
    scored = learner.forward(batch)[columns.LOGPROBS]
    torch.testing.assert_close(scored, batch[columns.SAMPLER_LOGPROBS], rtol=0, atol=20 * STEP)


def test_samplers_are_given_what_computes_at_half_the_bytes():
    config = tiny_runs.grpo().language_model(mixed_precision="bf16")
    learner, exact = tiny.build(config), build(tiny_runs.grpo(), None)
    flat, whole = (made.weights_exporter.export("store") for made in (learner, exact))
    # Each tensor begins at a multiple of 64 bytes.
    assert abs(flat.num_bytes - whole.num_bytes / 2) <= 64 * len(flat.slots)
    arrived = unpack(pickle.loads(pickle.dumps(flat)))
    module = tiny.module_of(learner)
    for name, twin in module.published_tensors().items():
        assert torch.equal(arrived[name], twin)
    spec = config.get_multi_rl_module_spec(
        spaces={"default_policy": (tiny.SPACE, tiny.SPACE)}, inference_only=True
    ).rl_module_specs["default_policy"]
    sampler = spec.build()
    sampler.set_state(arrived)
    assert all(p.dtype == torch.bfloat16 for p in sampler.parameters())
    ours, theirs = sampled(learner), sampled(learner, sampler)
    for name in (columns.COMPLETION_IDS, columns.SAMPLER_LOGPROBS):
        assert torch.equal(ours[name], theirs[name])


def test_frequencies_of_positions_are_not_rounded():
    """2^-9 of a phase at position 1000 is two radians."""
    learner = build(tiny_runs.grpo())
    rotary = tiny.module_of(learner).computing_model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("features, environ, fast", [
    ({"amx_bf16", "avx512f"}, {}, True),
    ({"avx512_bf16"}, {}, True),
    ({"avx512f", "avx2"}, {}, False),
    ({"amx_bf16"}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, False),
    ({"amx_bf16"}, {"ONEDNN_MAX_CPU_ISA": "avx512_core_amx"}, True),
])  # fmt: skip
def test_a_processor_that_emulates_bfloat16_is_told_of(features, environ, fast):
    assert multiplies_bfloat16(features, environ) == fast
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_emulation(torch.bfloat16, "cpu", lambda: multiplies_bfloat16(features, environ))
        warn_of_emulation(torch.bfloat16, "cuda", lambda: False)
        warn_of_emulation(None, "cpu", lambda: False)
    assert [str(each.message)[:22] for each in said] == ([] if fast else ["mixed_precision='bf16'"])


class EntropyReader(CausalLMModule):
    """A module of a user, who takes what the docstring promises."""

    num_read = 0

    def _forward_train(self, batch, **kwargs):
        outputs = super()._forward_train(batch, **kwargs)
        if columns.REF_LOGPROBS not in outputs:
            assert outputs[columns.ENTROPY].shape == outputs[columns.LOGPROBS].shape
            EntropyReader.num_read += 1
        return outputs


@pytest.mark.parametrize("settings, num_passes", [
    ({"critic": "shared"}, 1 + 2),  # before the update, and two mini-batches
    ({"critic": "separate"}, 2 + 2),  # values, and the second mini-batch's log-probs
])  # fmt: skip
def test_a_module_of_one_s_own_reads_every_output_of_every_pass(settings, num_passes):
    spec = RLModuleSpec(module_class=EntropyReader)
    config = tiny_runs.ppo(minibatch_size=4, num_epochs=1, **settings)
    learner = build(config.rl_module(rl_module_spec=spec))
    batch = tiny.judged(learner)
    EntropyReader.num_read = 0
    tiny.update(learner, batch)
    assert EntropyReader.num_read == num_passes


def test_rows_that_were_scored_are_recalled_also_where_a_log_prob_is_0():
    """A token that is certain has log-prob 0, as a row that nobody scored has in the buffer."""
    rows = {columns.OLD_LOGPROBS: torch.tensor([[-0.5, -0.5], [-0.25, -0.25], [-1.0, -1.0]])}
    kept = OldLogprobs(rows, torch.tensor([0, 1]), lambda tensor: tensor)
    first = {name: column[:2] for name, column in rows.items()}
    kept.of_this_pass(first, torch.tensor([[0.0, 0.0], [-0.125, 0.0]]))
    again = dict(rows)
    kept.recall(again)
    assert again[columns.OLD_LOGPROBS].tolist() == [[0.0, 0.0], [-0.125, 0.0], [-1.0, -1.0]]
