"""Routers of a mixture of experts: their auxiliary loss, and the experts of another pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row, pad_completions, uniform_noise
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.modules.logprobs import score_completions, text_logprobs
from rllib_llm.modules.packing import completion_rows
from rllib_llm.modules.routers import Routing, routed, routed_again, routers_of
from rllib_llm.modules.trunk import wanted_tokens
from rllib_llm.numerics.losses import load_balancing_loss
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.modules.tiny_models import VOCAB, tiny_model

EXPERTS = 6
MIXTURES = {
    "qwen3_moe": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 16, "norm_topk_prob": True,
    },
    "qwen3_moe (sums kept)": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "head_dim": 16, "norm_topk_prob": False,
    },
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": 2},
}  # fmt: skip


def mixture(family: str = "qwen3_moe", seed: int = 0, tie: float | None = None, **settings):
    """A tiny mixture in float64. tie: routers like the first three experts alike, and the others,
    but for so much: of the two that are chosen of three it decides one."""
    model = tiny_model(family, seed, **{**MIXTURES[family], **settings}).double()
    model.set_experts_implementation("eager")  # grouped products know no float64
    if tie is not None:
        with torch.no_grad():
            for router in routers_of(model).modules:
                router.weight.copy_(router.weight[::3].repeat_interleave(3, dim=0))
                router.weight += torch.randn_like(router.weight) * tie
    return model


def test_the_loss_of_uniform_routers_is_the_number_of_chosen_experts():
    """f_e = k / E and p_e = 1 / E: E Σ k / E² = k. All tokens to one expert: E, if all like it."""
    logits = torch.zeros(4, 4)
    experts = torch.stack([torch.arange(4), (torch.arange(4) + 1) % 4], dim=1)
    assert load_balancing_loss([logits], [experts], torch.ones(4)) == pytest.approx(2.0)
    logits[:, 0] = 50.0
    alone = torch.zeros(4, 1, dtype=torch.int64)
    assert load_balancing_loss([logits], [alone], torch.ones(4)) == pytest.approx(4.0)


def some_rows(num_rows: int = 6, prompt_len: int = 5, longest: int = 7):
    """Left-padded prompts, each twice, and right-padded completions."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCAB, (num_rows // 2, prompt_len), generator=generator)
    mask = torch.arange(prompt_len) >= torch.arange(num_rows // 2).unsqueeze(1)
    completions = torch.randint(3, VOCAB, (num_rows, longest), generator=generator)
    lengths = torch.tensor([7, 1, 4, 6, 2, 7])[:num_rows]
    return (
        ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0), completions,
        torch.arange(longest) < lengths.unsqueeze(1),
    )  # fmt: skip


def of_transformers(model, prompt_ids, prompt_mask, ids, mask):
    """Their loss on the router logits of padded rows, over what the pass reads: all real tokens but
    each row's last, after which nothing is predicted."""
    whole, real = torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1)
    positions = (real.long().cumsum(1) - 1).clamp(min=0)
    logits = model(
        input_ids=whole, attention_mask=real.long(), position_ids=positions,
        output_router_logits=True,
    ).router_logits  # fmt: skip
    ends = torch.nn.functional.pad(real, (0, 1))[:, 1:] & real
    return load_balancing_loss_func(tuple(logits), EXPERTS, 2, ends)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_auxiliary_loss_is_that_of_transformers(family):
    """Of rows that share prompts, concatenated, and of the padded form: loss and gradient."""
    model, rows = mixture(family), some_rows()
    expected = of_transformers(model, *rows)
    expected.backward()
    routers = routers_of(model).modules
    gradients = [router.weight.grad.clone() for router in routers]
    model.zero_grad()
    routing = Routing()
    score_completions(model, *rows, routing=routing)
    torch.testing.assert_close(routing.aux_loss.double(), expected.double(), rtol=1e-5, atol=0)
    routing.aux_loss.backward()
    for router, gradient in zip(routers, gradients, strict=True):
        torch.testing.assert_close(router.weight.grad, gradient, rtol=1e-4, atol=1e-6)


def test_texts_have_the_same_loss():
    model = mixture()
    _, _, ids, mask = some_rows()
    nothing = torch.zeros(len(ids), 0, dtype=torch.int64)
    expected = of_transformers(model, nothing, nothing.bool(), ids, mask)
    routing = Routing()
    text_logprobs(model, ids, mask, routing=routing)
    torch.testing.assert_close(routing.aux_loss.double(), expected.double(), rtol=1e-5, atol=0)


def test_traced_tokens_are_those_of_their_rows():
    model, rows = mixture(), completion_rows(*some_rows())
    for dense in (False, True):
        wanted = wanted_tokens(model.model, replace(rows, is_traced=True), dense=dense)
        read, ids = wanted.num_readers > 0, wanted.input_ids.flatten()
        assert torch.equal(rows.ids.flatten()[wanted.sources][read], ids[read])
        # All that is attended but the last tokens of rows, shared prompts as often as rows have
        # them.
        assert wanted.num_readers.sum() == int(rows.attended.sum()) - len(rows.ids)


def test_a_dense_model_is_refused_by_name():
    with pytest.raises(Problems) as refused:
        routers_of(tiny_model("llama"))
    assert [(p.name, p.value) for p in refused.value.found] == [("model", "LlamaForCausalLM")]


def test_routers_that_choose_by_something_else_are_refused():
    """DeepSeek-V3 chooses within groups, by a sigmoid with a bias."""
    model = tiny_model(
        "deepseek_v3", n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, first_k_dense_replace=0, kv_lora_rank=8, q_lora_rank=8,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1,
        num_key_value_heads=2,
    )  # fmt: skip
    with pytest.raises(Problems) as refused:
        routers_of(model)
    assert refused.value.found[0].name == "model"


# --- the sampler's experts in another pass


def sampled(model, num_completions: int = 2, **settings):
    """Prompts, and the columns of completions that a model samples by our decode loop."""
    ids, mask = (each[::2] for each in some_rows()[:2])
    params = SamplingParams(
        pad_token_id=0, **{"max_new_tokens": 12, "stop_token_ids": tuple(range(2, 9))} | settings
    )
    noise = uniform_noise(1, range(len(ids) * num_completions), params.max_new_tokens)
    made = generate(
        model, ids, mask, params, num_completions=num_completions, noise=noise,
        plan=DecodePlan.of(model, keeps_experts=True), max_rows=2,
    ).columns()  # fmt: skip
    n = num_completions
    prompts = ids.repeat_interleave(n, dim=0), mask.repeat_interleave(n, dim=0)
    return *prompts, made


def experts_of(made) -> torch.Tensor:
    return torch.cat([made[columns.PROMPT_EXPERTS], made[columns.COMPLETION_EXPERTS]], dim=1)


def scored(model, ids, mask, made, routing=None):
    with torch.no_grad():
        return score_completions(
            model, ids, mask, made[columns.COMPLETION_IDS], made[columns.COMPLETION_MASK],
            routing=routing,
        ).logprobs  # fmt: skip


def test_the_experts_of_every_token_but_the_last_are_kept():
    """They are those of the model's own pass over prompt and completion, each row alone."""
    model = mixture()
    ids, mask, made = sampled(model)
    experts = experts_of(made)
    kept = torch.cat([mask, made[columns.COMPLETION_MASK]], dim=1)
    for row, is_real, held in zip(
        torch.cat([ids, made[columns.COMPLETION_IDS]], 1), kept, experts, strict=True
    ):
        with routed(model) as chosen, torch.no_grad():
            model(input_ids=row[is_real].unsqueeze(0))
        assert torch.equal(held[is_real][:-1], chosen.by_token()[:-1])
        assert bool((held[is_real][-1] == columns.UNKNOWN_EXPERT).all())
        assert bool((held[~is_real] == columns.UNKNOWN_EXPERT).all())


@pytest.mark.parametrize("family", MIXTURES)
def test_without_replay_the_ratio_is_off_and_with_it_it_is_1(family):
    """Of three experts that routers like alike the sampler takes two, the learner another two, as
    roundings would decide. Their routers differ by 1e-5, and log-probs by some hundred times that
    once both use the same experts; else by nats."""
    sampler, learner = mixture(family, tie=1e-5), mixture(family, tie=-1e-5)
    ids, mask, made = sampled(sampler)
    written = made[columns.COMPLETION_MASK]
    said = made[columns.SAMPLER_LOGPROBS][written]
    own, replayed = (
        float((scored(learner, ids, mask, made, routing)[written] - said).exp().sub(1).abs().max())
        for routing in (None, Routing(experts_of(made)))
    )
    assert own > 1 and replayed < 0.005


def test_unknown_experts_are_chosen_by_the_router():
    model = mixture()
    ids, mask, made = sampled(model)
    unknown = torch.full_like(experts_of(made), columns.UNKNOWN_EXPERT)
    routing = Routing(unknown)
    assert torch.equal(
        scored(model, ids, mask, made, routing), scored(model, ids, mask, made, Routing())
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_flow_through_the_weights_of_replayed_experts(checkpointing):
    """They are those of a router that sees the logits of these experts alone, which gives the same
    normalised weights; with layers that are computed again in the backward pass, too."""
    sampler, learner = mixture(tie=1e-5), mixture(tie=-1e-5)
    ids, mask, made = sampled(sampler)
    rows = (ids, mask, made[columns.COMPLETION_IDS], made[columns.COMPLETION_MASK])
    experts = experts_of(made)
    other = copy.deepcopy(learner)
    if checkpointing:
        other.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": lambda: routed_again(other)}
        )
        other.train()
    routing = Routing(experts)
    score_completions(other, *rows, routing=routing).logprobs.sum().backward()
    expected = by_masked_logits(learner, *rows, experts)
    expected.sum().backward()
    for (name, one), two in zip(other.named_parameters(), learner.parameters(), strict=True):
        # Routers' softmax is float32 in any model.
        most = float(two.grad.abs().max())
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-5 * most, msg=name)
    gates = [router.weight.grad for router in routers_of(other).modules]
    assert all(float(gradient.abs().max()) > 0 for gradient in gates)


def by_masked_logits(model, prompt_ids, prompt_mask, ids, mask, experts):
    """Log-probs of completions where each router sees its own logits at the experts alone, by the
    model's own forward on one row after the other."""
    rows = []
    for row in range(len(ids)):
        real = torch.cat([prompt_mask[row], mask[row]])
        text = torch.cat([prompt_ids[row], ids[row]])[real]
        told = experts[row][real].long().unflatten(1, (-1, 2))

        def only(router, args, layer, told=told):
            state = args[0].reshape(-1, router.hidden_dim)
            logits = torch.nn.functional.linear(state, router.weight)
            chosen = told[:, layer].where(told[:, layer] >= 0, logits.topk(2).indices)
            kept = torch.zeros_like(logits).scatter(1, chosen, 1.0) > 0
            scores = logits.masked_fill(~kept, -torch.inf).softmax(-1, dtype=torch.float)
            return logits, scores.gather(1, chosen).to(logits.dtype), chosen

        handles = [
            router.register_forward_hook(lambda m, a, _, i=i, only=only: only(m, a, i))
            for i, router in enumerate(routers_of(model).modules)
        ]
        logits = model(input_ids=text.unsqueeze(0)).logits[0].log_softmax(-1)
        for handle in handles:
            handle.remove()
        start = int(prompt_mask[row].sum())
        rows.append(logits[start - 1 : -1].gather(1, text[start:].unsqueeze(1)).squeeze(1))
    return torch.cat(rows)


def test_rows_of_an_engine_keep_theirs_too():
    """Rows that come one by one, share a prompt, and are recomputed on the way."""
    model = mixture()
    ids, mask, made = sampled(model)
    plan = DecodePlan.of(model, keeps_experts=True)
    engine = TorchEngine(model, version=0, plan=plan)
    params = SamplingParams(pad_token_id=0, max_new_tokens=12, stop_token_ids=tuple(range(2, 9)))
    engine.add([
        Row(i, ids[i][mask[i]].tolist(), params, noise=Noise(1, i), group=i // 2)
        for i in range(len(ids))
    ])  # fmt: skip
    ended = {}
    for step in range(20):
        if step == 3:
            engine.load(model.state_dict(), 1, "recompute")
        ended |= {each.id: each for each in engine.step()}
    rows = [ended[i] for i in range(len(ids))]
    again = pad_completions(rows, 0, prompt_len=ids.shape[1]).columns()
    for name in (columns.COMPLETION_IDS, columns.PROMPT_EXPERTS, columns.COMPLETION_EXPERTS):
        assert torch.equal(again[name], made[name])


def test_a_cache_without_room_for_experts_is_refused():
    model = tiny_model(
        "qwen3_next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_value_heads=2, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(Problems) as refused:
        DecodePlan.of(model, keeps_experts=True)
    assert refused.value.found[0].name == "routing_replay"
