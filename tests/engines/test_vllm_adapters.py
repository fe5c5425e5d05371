"""vLLM is given adapters alone: each version is kept while rows of it are in flight."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM has an environment of its own: `make test-vllm` installs and tests it"
)

from rllib_llm.engines.engine import generate  # noqa: E402
from rllib_llm.engines.vllm_engine import VLLMEngine  # noqa: E402
from rllib_llm.modules.logprobs import score_completions  # noqa: E402
from rllib_llm.modules.lora import add_adapters, is_adapter  # noqa: E402
from rllib_llm.shared.errors import Problems, problems_of  # noqa: E402
from tests.algorithms import tiny_runs as tiny  # noqa: E402
from tests.engines.test_vllm_engine import (  # noqa: E402
    MODEL,
    SETTINGS,
    STOPS,
    build_model,
    completions,
    greedily,
    greedy_row,
    params,
    prompts,
    run_with_it,
    texts,
    until_empty,
)

pytestmark = pytest.mark.vllm

# Scale and rank differ between layers: 3 / sqrt(4), 3 / sqrt(2) and 6 / sqrt(4).
LORA = {
    "r": 4, "alpha": 3, "use_rslora": True, "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"down_proj": 6},
}  # fmt: skip


def adapted(seed: int, lora=LORA, dtype=torch.float32):
    """The model with adapters that change what it says."""
    model = build_model()[0].to(dtype)
    add_adapters(model, lora)
    with torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def published(model) -> dict[str, torch.Tensor]:
    """What a run publishes of it."""
    return {f"model.{n}": p for n, p in model.named_parameters() if is_adapter(n)}


@pytest.fixture(scope="module")
def models():
    return [adapted(seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def engine():
    engine = VLLMEngine(MODEL, lora=LORA, max_loras=3, **SETTINGS)
    yield engine
    engine.close()


def test_completions_and_log_probs_equal_our_own(engine, models):
    plain = generate(build_model()[0], *prompts(), params(greedy=True))
    for version, model in enumerate(models):
        engine.load(published(model), version)
        out = completions(engine, n=1, greedy=True)
        ours = generate(model, *prompts(), params(greedy=True))
        assert torch.equal(out.completion_ids, ours.completion_ids)
        torch.testing.assert_close(out.logprobs, ours.logprobs, rtol=0, atol=1e-4)
        assert out.completion_ids.tolist() != plain.completion_ids.tolist()


def test_rows_finish_on_their_version_beside_those_of_newer_ones(engine, models):
    first, second, _ = texts()
    for version, model in enumerate(models):
        engine.load(published(model), version)
        engine.add([greedy_row(version, first), greedy_row((version, 2), second)])
        engine.step(), engine.step()
    assert len(engine._llm.llm_engine.list_loras()) == 3  # no row has ended
    found = until_empty(engine)
    for version, model in enumerate(models):
        for name, text in ((version, first), ((version, 2), second)):
            assert found[name].token_ids == greedily(model, text, 12)
            assert found[name].versions == [version] * 12
    engine.load(published(models[0]), 3)
    assert len(engine._llm.llm_engine.list_loras()) == 1


def test_more_versions_than_places_wait_for_one(engine, models):
    """Five versions in flight in an engine of three."""
    first, _, _ = texts()
    for version in range(5):
        engine.load(published(models[version % 3]), version)
        engine.add([greedy_row(version, first)])
        engine.step()
    found = until_empty(engine)
    for version in range(5):
        assert found[version].token_ids == greedily(models[version % 3], first, 12)
        assert found[version].versions == [version] * 12


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_rows_go_on_with_new_adapters(engine, models, in_flight):
    first, _, _ = texts()
    engine.load(published(models[0]), 0)
    engine.add([greedy_row("old", first)])
    for _ in range(4):
        engine.step()
    engine.load(published(models[1]), 1, in_flight)
    assert len(engine._llm.llm_engine.list_loras()) == 1
    engine.add([greedy_row("new", first)])
    found = until_empty(engine)
    assert found["new"].token_ids == greedily(models[1], first, 12)
    old = found["old"]
    count = old.versions.count(0)
    assert old.versions == [0] * count + [1] * (12 - count) and 0 < count < 12
    begun = old.token_ids[:count]
    assert begun == greedily(models[0], first, count)
    if in_flight == "recompute":
        assert old.token_ids[count:] == greedily(models[1], [*first, *begun], 12 - count)


def test_layers_that_vllm_cannot_adapt_are_refused_by_name(engine):
    with pytest.raises(Problems) as raised:
        engine.load({"model.layers.0.other.lora_A.default.weight": torch.zeros(4, 4)}, 9)
    (problem,) = problems_of(raised.value)
    assert problem.name == "lora"


def test_log_probs_equal_the_learner_s_within_bfloat16():
    model = adapted(1, dtype=torch.bfloat16)
    engine = VLLMEngine(MODEL, dtype="bfloat16", lora=LORA, max_loras=2, **SETTINGS)
    try:
        engine.load(published(model), 0)
        out = completions(engine, n=4)
    finally:
        engine.close()
    ids, mask = (t.repeat_interleave(4, dim=0) for t in prompts())
    with torch.no_grad():
        own = score_completions(model, ids, mask, out.completion_ids, out.completion_mask)
    gap = (out.logprobs - own.logprobs).abs()
    # Logits here are around 8, where bfloat16's places are 2 ** -5 apart.
    assert float(gap.mean()) < 2**-5 and float(gap.max()) < 2**-2


@pytest.mark.parametrize("in_flight", ["finish", "keep"])
def test_a_run_trains_adapters_with_it(ray_session, in_flight):
    lora = {"r": 1, "target_modules": ["q_proj"]}
    config = run_with_it(tiny.grpo(off_policy="decoupled")).language_model(model=MODEL, lora=lora)
    config.sampling(stop_token_ids=list(STOPS), max_new_tokens=24)
    config.streaming(max_staleness=1, schedule="free", in_flight=in_flight)
    with tiny.built(config) as algorithm:
        results = [algorithm.train() for _ in range(3)]
    model = adapted(1, lora)
    sent = sum(p.nbytes for n, p in model.named_parameters() if is_adapter(n))
    whole = sum(p.nbytes for p in model.parameters()) - sent
    for result in results:
        assert result["weights"]["bytes"] == sent < whole / 50
    assert results[0]["sampler"]["logprob_gap"] < 1e-4
