"""A bandit of one token whose best policy under the KL is known: pi ~ pi_ref exp(score / beta).

It maximises E[score] - beta KL(pi || pi_ref) (Ziegler et al. 2019, eq. 2; the policy is that of
Korbak et al. 2022, eq. 3). Of the four tokens two have a score of their own.
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.algorithms.ppo_ptx import PPOPtxConfig
from rllib_llm.algorithms.rloo import RLOOConfig
from tests.algorithms.tiny_runs import built

pytestmark = pytest.mark.usefixtures("ray_session")

VOCABULARY = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
SCORES = torch.tensor([0.0, 0.0, 1.0, -0.5])  # by token id
BETA = 0.7


def build_two_tokens():
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    config = LlamaConfig(
        vocab_size=4, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=8, initializer_range=0.5, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval(), tokenizer


def score_of_token(completions, completion_ids):
    return [float(SCORES[ids[0]]) for ids in completion_ids]


def probabilities(model):
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([[VOCABULARY["a"]]])).logits[0, -1], dim=-1)


def known_answer(score_share=1.0):
    reference = probabilities(build_two_tokens()[0])
    unnormalised = reference * torch.exp(score_share * SCORES / BETA)
    return reference, unnormalised / unnormalised.sum()


CASES = {
    "PPO": (PPOPtxConfig, {"whiten_advantages": False, "vf_clip_param": None, "num_epochs": 2,
                           "minibatch_size": 512, "vf_loss_coeff": 0.5}),
    "RLOO": (RLOOConfig, {}),
    "GRPO, KL in the reward": (
        GRPOConfig, {"ref_kl_in": "reward", "ref_kl_estimator": "k1", "scale_by_std": False}),
    "GRPO, KL in the loss": (
        GRPOConfig, {"ref_kl_in": "loss", "ref_kl_unbiased": True, "scale_by_std": False}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_policy_goes_to_the_known_answer(name):
    config_class, settings = CASES[name]
    num_iterations = 40
    config = (
        config_class()
        .language_model(model=f"{__name__}.build_two_tokens")
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": [{"prompt": "a"}],
                "reward_functions": f"{__name__}.score_of_token",
                "max_prompt_len": 2,
            },
        )
        .sampling(max_new_tokens=1, log_samples_every=0)
        .training(
            train_batch_size_per_learner=1024, ref_kl_coeff=BETA, lr=0.03, lr_schedule="linear",
            lr_num_updates=num_iterations * settings.get("num_epochs", 1) * (
                1024 // settings.get("minibatch_size", 1024)), **settings,
        )
    )  # fmt: skip
    if config.num_completions > 1:
        config.sampling(num_completions=8)
    # A group's mean holds the completion itself: GRPO's advantages are 7/8 of the difference, and
    # only where the KL is in the reward does that shrink both alike.
    reference, answer = known_answer(7 / 8 if config.ref_kl_in == "loss" else 1.0)
    with built(config) as algorithm:
        module = algorithm.learner_group._learner.module["default_policy"].unwrapped()
        torch.testing.assert_close(probabilities(module.model), reference)
        for _ in range(num_iterations):
            result = algorithm.train()
        found = probabilities(module.model)
    # The reference is far from the answer; the standard error of a share of 1024 tokens is 0.016.
    assert float((answer - reference).abs().max()) > 0.15
    assert found.tolist() == pytest.approx(answer.tolist(), abs=0.03)
    kl = float((answer * (answer / reference).log()).sum())
    assert result["objective"]["kl"] == pytest.approx(kl, abs=0.1)
