"""The policy: log-probs, entropy and values of completion tokens, from any critic."""

from __future__ import annotations

import pytest
import torch
from gymnasium.spaces import Discrete
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.spaces.repeated import Repeated
from transformers import LlamaForSequenceClassification

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.examples.characters import CHAT_SPECIAL, character_tokenizer
from rllib_llm.modules.rl_modules import CausalLMModule
from rllib_llm.modules.sequence_scores import write_score_normalization
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms.tiny_runs import MODEL, build_classifier
from tests.learners.tiny_learners import completions
from tests.modules.tiny_models import tiny_model
from tests.tiny_models import byte_tokenizer, llama_classifier, save

SPACE = Repeated(Discrete(18), 8)


def build(*, inference_only=False, **settings):
    return RLModuleSpec(
        module_class=CausalLMModule,
        observation_space=SPACE,
        action_space=SPACE,
        inference_only=inference_only,
        model_config={
            "pretrained_model": MODEL, "dtype": "float32", "temperature": 1.0, "critic": "none",
            **settings,
        },
    ).build()  # fmt: skip


def whole_rows(batch):
    """(ids [1, length], number of prompt tokens) of each row without padding."""
    for prompt, prompt_mask, ids, mask in zip(
        *(batch[name] for name in (columns.PROMPT_IDS, columns.PROMPT_MASK,
                                   columns.COMPLETION_IDS, columns.COMPLETION_MASK)),
        strict=True,
    ):  # fmt: skip
        yield torch.cat([prompt[prompt_mask], ids[mask]]).unsqueeze(0), int(prompt_mask.sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_and_entropy_are_those_of_the_plain_model(temperature):
    module = build(temperature=temperature)
    batch = completions()
    outputs = module.forward_train(batch)
    for row, (ids, start) in enumerate(whole_rows(batch)):
        logits = module.model(ids).logits[0, start - 1 : -1] / temperature
        expected = torch.log_softmax(logits, -1)
        tokens = ids[0, start:]
        length = len(tokens)
        torch.testing.assert_close(
            outputs[columns.LOGPROBS][row, :length],
            expected[torch.arange(length), tokens], rtol=1e-4, atol=1e-5,
        )  # fmt: skip
        entropy = -(expected.exp() * expected).sum(-1)
        torch.testing.assert_close(outputs[columns.ENTROPY][row, :length], entropy, rtol=1e-4,
                                   atol=1e-5)  # fmt: skip
        assert not outputs[columns.LOGPROBS][row, length:].any()
    assert columns.VALUES not in outputs


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_values_are_0_before_anything_is_learnt(critic):
    outputs = build(critic=critic).forward_train(completions())
    assert outputs[columns.VALUES].shape == outputs[columns.LOGPROBS].shape
    assert not outputs[columns.VALUES].any()


def test_the_shared_critic_reads_the_state_before_each_token():
    module = build(critic="shared")
    torch.manual_seed(0)
    torch.nn.init.normal_(module.value_head.linear.weight)
    batch = completions()
    values = module.forward_train(batch)[columns.VALUES]
    torch.testing.assert_close(module.compute_values(batch), values)
    for row, (ids, start) in enumerate(whole_rows(batch)):
        hidden = module.model.model(ids).last_hidden_state[0]
        expected = module.value_head.linear(hidden[start - 1 : -1]).squeeze(-1)
        torch.testing.assert_close(values[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_trunk_that_gives_states_of_another_width_than_it_computes_in_has_a_critic(critic):
    """As OPT-350m, whose embeddings are half as wide as its layers: here 16 and 32."""
    module = build(pretrained_model="tests.modules.test_causal_lm.build_opt", critic=critic)
    assert module.value_head.linear.in_features == 16
    torch.nn.init.ones_(module.value_head.linear.weight)
    batch = completions()
    values = module.forward_train(batch)[columns.VALUES]
    trunk = module.model.model if critic == "shared" else module.critic
    for row, (ids, start) in enumerate(whole_rows(batch)):
        expected = trunk(ids).last_hidden_state[0, start - 1 : -1].sum(-1)
        torch.testing.assert_close(values[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)


def build_opt():
    return tiny_model("opt (decoder inside the trunk)"), build_classifier()[1]


class BiasedForSequenceClassification(LlamaForSequenceClassification):
    """A reward model whose head has a bias."""

    def __init__(self, config):
        super().__init__(config)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels)
        torch.nn.init.constant_(self.score.bias, 0.75)


def build_biased():
    plain, tokenizer = build_classifier()
    model = BiasedForSequenceClassification(plain.config).eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    return model, tokenizer


def test_a_critic_from_a_reward_model_keeps_the_bias_of_its_head():
    source = "tests.modules.test_causal_lm.build_biased"
    module = build(critic="separate", critic_model=source)
    batch = completions()
    values = module.forward_train(batch)[columns.VALUES]
    classifier = build_biased()[0]
    for row, (ids, start) in enumerate(whole_rows(batch)):
        with torch.no_grad():
            score = classifier(input_ids=ids[:, :start]).logits[0, 0]
        assert values[row, 0].item() == pytest.approx(score.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("normalization", [None, (0.3, 2.0)])
def test_a_critic_from_a_reward_model_begins_with_its_scores(tmp_path, normalization):
    """V_t is the normalised score of the text up to token t - 1, read at its last token."""
    classifier, tokenizer = build_classifier()
    folder = save(tmp_path / "reward_model", classifier, tokenizer)
    mean, std = normalization or (0.0, 1.0)
    if normalization:
        write_score_normalization(folder, mean, std)
    module = build(critic="separate", critic_model=folder)
    batch = completions()
    values = module.forward_train(batch)[columns.VALUES]
    for row, (ids, start) in enumerate(whole_rows(batch)):
        for t in range(ids.shape[1] - start):
            with torch.no_grad():
                score = classifier(input_ids=ids[:, : start + t]).logits[0, 0]
            expected = (float(score) - mean) / std
            assert values[row, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_critic_with_another_vocabulary_is_refused(tmp_path):
    folder = save(tmp_path / "reward_model", llama_classifier(), byte_tokenizer())
    with pytest.raises(ValueError, match="critic_model=.* must have the vocabulary of model="):
        build(critic="separate", critic_model=folder)


def test_a_separate_critic_leaves_the_policy_alone():
    module = build(critic="separate")
    torch.nn.init.ones_(module.value_head.linear.weight)
    module.forward_train(completions())[columns.VALUES].sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert all(g is None for name, g in grads.items() if name.startswith("model."))
    assert any(g is not None and g.any() for name, g in grads.items() if name.startswith("critic."))


def test_samplers_have_no_critic_and_learners_without_one_no_value_head():
    assert not hasattr(build(critic="shared", inference_only=True), "value_head")
    names = [name for name, _ in build(critic="none").named_parameters()]
    assert all(name.startswith("model.") for name in names)


def test_sampled_logprobs_are_those_of_the_trainer():
    module = build(temperature=0.7)
    batch = completions()
    prompts = {name: batch[name] for name in (columns.PROMPT_IDS, columns.PROMPT_MASK)}
    params = SamplingParams(pad_token_id=0, stop_token_ids=(1,), max_new_tokens=6, temperature=0.7)
    noise = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
    sampled = module.forward_exploration(
        prompts, generate=generate, params=params, num_completions=2, noise=noise
    )
    assert not sampled[columns.SAMPLER_LOGPROBS].requires_grad
    rows = {
        columns.PROMPT_IDS: prompts[columns.PROMPT_IDS].repeat_interleave(2, 0),
        columns.PROMPT_MASK: prompts[columns.PROMPT_MASK].repeat_interleave(2, 0),
        columns.COMPLETION_IDS: sampled[columns.COMPLETION_IDS],
        columns.COMPLETION_MASK: sampled[columns.COMPLETION_MASK],
    }
    torch.testing.assert_close(
        sampled[columns.SAMPLER_LOGPROBS], module.forward_train(rows)[columns.LOGPROBS].detach(),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["forward_inference", "forward_exploration"])
def test_a_forward_pass_that_samples_names_what_samples(name):
    with pytest.raises(Problems) as raised:
        getattr(build(), name)(completions())
    assert raised.value.problem.name == "generate"


def test_text_and_completions_go_in_together():
    module = build()
    ids = torch.randint(3, 13, (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 5, dtype=torch.bool)
    loss_mask = mask.clone()
    loss_mask[:, 0] = False
    texts = {columns.INPUT_IDS: ids, columns.ATTENTION_MASK: mask, columns.LOSS_MASK: loss_mask}
    outputs = module.forward_train({**completions(), **texts})
    expected = torch.log_softmax(module.model(ids).logits[:, :-1], -1)
    expected = expected.gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(outputs[columns.TEXT_LOGPROBS][:, 1:], expected, rtol=1e-4,
                               atol=1e-5)  # fmt: skip
    assert columns.LOGPROBS in outputs


def test_a_model_that_samples_its_routing_in_train_mode_does_not_here(tmp_path):
    """PhiMoE's experts are drawn in train mode; log-probs would be of another policy each time."""
    model = tiny_model("phimoe", num_local_experts=4, num_experts_per_tok=2)
    folder = save(tmp_path / "phimoe", model, character_tokenizer("0123", special=CHAT_SPECIAL))
    module, batch = build(pretrained_model=folder), completions()
    with torch.no_grad():
        expected = module.forward_train(batch)[columns.LOGPROBS]
    for _ in range(2):
        trained = module.forward_train(batch)[columns.LOGPROBS]
        torch.testing.assert_close(trained, expected)
    trained.sum().backward()
