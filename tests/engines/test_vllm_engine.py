"""vLLM as an engine: the tokens and log-probs of the weights it was last given."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip(
    "vllm", reason="vLLM has an environment of its own: `make test-vllm` installs and tests it"
)

from rllib_llm.algorithms.grpo import GRPOConfig  # noqa: E402
from rllib_llm.engines.engine import generate  # noqa: E402
from rllib_llm.engines.params import SamplingParams  # noqa: E402
from rllib_llm.engines.protocol import Noise, Row  # noqa: E402
from rllib_llm.engines.vllm_engine import VLLMEngine  # noqa: E402
from rllib_llm.modules.logprobs import score_completions  # noqa: E402
from rllib_llm.rollouts.in_flight import Batches, SingleRows  # noqa: E402
from rllib_llm.shared import columns  # noqa: E402
from rllib_llm.shared.errors import SettingWarning  # noqa: E402
from tests.algorithms import tiny_runs as tiny  # noqa: E402
from tests.engines.tiny_generations import continued, sampled_by

pytestmark = pytest.mark.vllm

MODEL = f"{__name__}.build_model"
SETTINGS = {"kv_cache_memory_bytes": 64 * 1024**2, "enforce_eager": True, "max_model_len": 128}
TALKER = f"{__name__}.build_talker"
VOCAB, PAD, STOPS = 64, 0, (2, 3, 4, 5)


def build_model(seed: int = 3):
    """A Llama whose heads are as wide as vLLM's kernels want, and a tokenizer for it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _, tokenizer = tiny.build_model()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
            initializer_range=0.3, tie_word_embeddings=False, pad_token_id=PAD, eos_token_id=2,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval(), tokenizer


def build_talker():
    """A model that can call the calculator, with heads as wide as vLLM's kernels want."""
    from rllib_llm.examples import calculator

    return calculator.build_model(num_heads=2)


def weights_of(model):
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def engine():
    engine = VLLMEngine(MODEL, **SETTINGS)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def models():
    return build_model(3)[0], build_model(4)[0]


@pytest.fixture
def model(engine, models):
    """What the engine samples from in this test."""
    engine.load(weights_of(models[0]), 0)
    return models[0]


def prompts():
    """Three prompts of 70, 3 and 11 tokens: one is longer than a block of vLLM's cache."""
    torch.manual_seed(5)
    lengths = torch.tensor([70, 3, 11])
    mask = torch.arange(70) >= 70 - lengths[:, None]
    return torch.randint(6, VOCAB, (3, 70)).masked_fill(~mask, PAD), mask


def params(**settings) -> SamplingParams:
    return SamplingParams(PAD, STOPS, **{"max_new_tokens": 20, **settings})


def completions(engine, n=4, seed=1, **settings):
    noises = [Noise(seed, i) for i in range(3 * n)]
    return sampled_by(engine, *prompts(), params(**settings), num_completions=n, noises=noises)


def assert_equals_ours(engine, model):
    out = completions(engine, n=1, greedy=True)
    ours = generate(model, *prompts(), params(greedy=True))
    assert torch.equal(out.completion_ids, ours.completion_ids)
    assert torch.equal(out.completion_mask, ours.completion_mask)
    assert torch.equal(out.finished, ours.finished)
    torch.testing.assert_close(out.logprobs, ours.logprobs, rtol=0, atol=1e-4)


def test_greedy_completions_equal_our_own(engine, model):
    assert_equals_ours(engine, model)


def test_new_weights_are_in_use_at_once(engine, model, models):
    """Also for prompts whose keys and values the old weights have left in the cache."""
    before = completions(engine, n=1, greedy=True)
    engine.load(weights_of(models[1]), 0)
    assert_equals_ours(engine, models[1])
    engine.load(weights_of(models[0]), 0)
    again = completions(engine, n=1, greedy=True)
    assert torch.equal(again.completion_ids, before.completion_ids)


@pytest.mark.parametrize("settings", [{}, {"top_k": 5, "top_p": 0.9, "min_new_tokens": 3}], ids=str)
def test_log_probs_are_the_trainer_s_before_truncation(engine, model, settings):
    n = 4
    out = completions(engine, n=n, **settings)
    ids, mask = (t.repeat_interleave(n, dim=0) for t in prompts())
    with torch.no_grad():
        own = score_completions(model, ids, mask, out.completion_ids, out.completion_mask)
    torch.testing.assert_close(out.logprobs, own.logprobs, rtol=0, atol=1e-4)
    # Stop tokens end completions and are inside the mask.
    last = out.completion_ids.gather(1, out.completion_mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.isin(last, torch.tensor(STOPS)).eq(out.finished).all()
    lengths = out.completion_mask.sum(1)
    assert int(out.finished.sum()) > 0 and len(lengths.unique()) > 1
    assert int(lengths.min()) > settings.get("min_new_tokens", 0)


def test_a_seed_decides_a_completion_whatever_is_beside_it(engine, model):
    everything = completions(engine)
    ids, mask = prompts()
    alone = sampled_by(
        engine, ids[1:2], mask[1:2], params(), num_completions=1, noises=[Noise(1, 5)]
    )
    length = alone.completion_ids.shape[1]
    assert torch.equal(alone.completion_ids[0], everything.completion_ids[5, :length])
    other = completions(engine, seed=2)
    assert other.completion_ids.tolist() != everything.completion_ids.tolist()


def test_sampling_follows_the_model(engine, model):
    """First tokens of one prompt, 600 times, against the model's own distribution."""
    ids, mask = (t[1:2] for t in prompts())
    count = 600
    out = sampled_by(
        engine,
        ids,
        mask,
        params(max_new_tokens=1),
        num_completions=count,
        noises=[Noise(9, i) for i in range(count)],
    )
    with torch.no_grad():
        probabilities = model(ids[mask].unsqueeze(0)).logits[0, -1].softmax(-1)
    found = torch.bincount(out.completion_ids[:, 0], minlength=VOCAB)
    common = probabilities * count >= 5
    expected = torch.cat([probabilities[common], probabilities[~common].sum()[None]]) * count
    observed = torch.cat([found[common], found[~common].sum()[None]])
    chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-3)).sum()
    # Mean = degrees of freedom, variance twice that; five deviations.
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


# --- rows ----------------------------------------------------------------------------------------


def until_empty(rows) -> dict:
    found = {}
    while rows.num_running:
        found |= {ended.id: ended for ended in rows.step()}
    return found


def texts() -> list[list[int]]:
    ids, mask = prompts()
    return [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]


GREEDY = {"greedy": True, "stop_token_ids": (), "max_new_tokens": 12}


def greedy_row(name, text, **settings) -> Row:
    return Row(name, text, SamplingParams(PAD, **{**GREEDY, **settings}))


def greedily(model, text, count: int) -> list[int]:
    """The likeliest tokens, each by a full pass."""
    for _ in range(count):
        with torch.no_grad():
            text = [*text, int(model(torch.tensor([text])).logits[0, -1].argmax())]
    return text[len(text) - count :]


def test_rows_come_and_go_at_any_step(engine, model):
    rows = engine
    rows.load(weights_of(model), 7)
    first, second, third = texts()
    rows.add([greedy_row("a", first), greedy_row("b", second)])
    rows.step(), rows.step()
    rows.add([greedy_row("c", third)])
    (told,) = rows.sampled(["a"], [1])
    assert told.token_ids == greedily(model, first, 12)[1 : 1 + len(told.token_ids)]
    (out,) = rows.abort(["b"])
    assert out.finish == "aborted" and out.token_ids == greedily(model, second, len(out.token_ids))
    rows.add([continued(greedy_row("b", second), out)])
    found = until_empty(rows)
    assert found["a"].token_ids == greedily(model, first, 12)
    assert out.token_ids + found["b"].token_ids == greedily(model, second, 12)
    assert found["c"].token_ids == greedily(model, third, 12)
    for row_id in "ac":
        assert found[row_id].versions == [7] * 12 and found[row_id].finish == "length"
        assert len(found[row_id].logprobs) == 12


@pytest.mark.parametrize("in_flight", ["finish", "recompute", "keep"])
def test_new_weights_come_between_two_steps(engine, models, in_flight):
    engine.load(weights_of(models[0]), 0)
    rows = engine
    first, second, _ = texts()
    rows.add([greedy_row("old", first)])
    for _ in range(4):
        rows.step()
    rows.load(weights_of(models[1]), 1, in_flight)
    rows.add([greedy_row("new", first), greedy_row("other", second)])
    found = until_empty(rows)
    # The same prompt by the new weights: nothing of the old ones' cache is used.
    assert found["new"].token_ids == greedily(models[1], first, 12)
    assert found["other"].token_ids == greedily(models[1], second, 12)
    assert found["new"].versions == [1] * 12
    old = found["old"]
    if in_flight == "finish":
        assert old.token_ids == greedily(models[0], first, 12) and old.versions == [0] * 12
        return
    num_old = old.versions.count(0)
    assert old.versions == [0] * num_old + [1] * (12 - num_old) and 0 < num_old < 12
    begun = old.token_ids[:num_old]
    assert begun == greedily(models[0], first, num_old)
    if in_flight == "recompute":
        assert old.token_ids[num_old:] == greedily(models[1], [*first, *begun], 12 - num_old)


# --- runs ----------------------------------------------------------------------------------------


def run_with_it(config):
    config.env_runners(num_env_runners=1)
    return config.sampling(engine="vllm", engine_settings=SETTINGS)


@pytest.mark.parametrize(
    "stream",
    [{"schedule": "lockstep"}]
    + [{"schedule": "free", "in_flight": each} for each in ("finish", "recompute", "keep")],
    ids=lambda each: "-".join(each.values()),
)
def test_a_run_streams_with_it(ray_session, stream):
    config = run_with_it(tiny.grpo(off_policy="decoupled")).language_model(model=MODEL)
    # Long enough to be in flight when weights come.
    config.sampling(stop_token_ids=list(STOPS), max_new_tokens=48, min_new_tokens=48)
    config.streaming(max_staleness=1, **stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingWarning)
        config.validate()  # all of these settings have an effect
    has_several = stream.get("in_flight") in ("recompute", "keep")
    num_versions: set[int] = set()  # of a row
    with tiny.built(config) as algorithm:
        for update in range(20):  # how many rows are in flight when weights come, load decides
            if update >= 3 and (not has_several or 2 in num_versions):
                break
            batch = algorithm.next_batch().result()
            for row in batch.columns[columns.WEIGHTS_VERSION]:
                num_versions.add(len(row[row >= 0].unique()))
            algorithm.submit(batch).result()
            told = algorithm.rollouts.metrics()["rollouts"]
            accounted = ("tokens_trained", "tokens_rejected", "tokens_carried")
            assert told["tokens_generated"] == sum(told[name] for name in accounted)
            assert told["tokens_trained"] > 0
        works = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: type(runner.streamer.loop.in_flight).__name__, local_env_runner=False
        )
    kind = SingleRows if stream["schedule"] == "free" else Batches
    assert works == [kind.__name__]
    assert num_versions == {1} if not has_several else 2 in num_versions


def test_a_run_of_conversations_learns_with_it(ray_session):
    config = run_with_it(GRPOConfig()).language_model(model=TALKER)
    config.environment("rllib_llm/Calculator-v0", env_config={"max_turns": 3})
    config.training(train_batch_size_per_learner=12, minibatch_size=6, off_policy="decoupled")
    config.sampling(max_new_tokens=24, num_completions=3)
    with tiny.built(config) as algorithm:
        for version in range(2):
            result = algorithm.train()
            assert result["weights"]["oldest_version"] == version


def test_a_run_learns_with_it(ray_session):
    config = run_with_it(tiny.grpo(off_policy="decoupled")).language_model(model=MODEL)
    config.sampling(stop_token_ids=list(STOPS))
    with tiny.built(config) as algorithm:
        for version in range(2):
            result = algorithm.train()
            # Log-probs of the newest weights: the learner's differ by round-off alone.
            assert result["sampler"]["logprob_gap"] < 1e-4
            assert result["weights"]["oldest_version"] == version
