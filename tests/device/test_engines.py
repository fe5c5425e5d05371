"""Decoding on the pretend GPU: graphs, rows that come and go, and memory that runs out.

Models compute in double precision, so that round-off of other operators decides no token.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Row, uniform_noise
from rllib_llm.engines.row_blocks import bytes_of_row, row_budget
from rllib_llm.engines.torch_engine import TorchEngine
from tests.engines.test_torch_engine import PARAMS, alone, rows, tiny_model
from tests.engines.tiny_generations import MODELS, PAD, STOPS, continued, ragged_prompts
from tests.modules import tiny_models
from tests.modules.tiny_models import VOCAB

N = 3
# Sampled, by nucleus, greedily; without a stop token all rows end together.
WAYS = {
    "sampled": {"stop_token_ids": STOPS},
    "nucleus": {"stop_token_ids": STOPS, "top_k": 20, "top_p": 0.8, "min_new_tokens": 3},
    "greedy": {"greedy": True},
}


def completions(model, device: str, *, max_new_tokens: int = 40, lengths=None, **settings):
    """Three completions of each of five prompts."""
    generate_settings = {
        name: settings.pop(name) for name in ("max_rows", "cuda_graphs") if name in settings
    }
    ids, mask = ragged_prompts() if lengths is None else long_prompts(lengths)
    params = SamplingParams(PAD, max_new_tokens=max_new_tokens, **settings)
    noise = uniform_noise(1, range(len(ids) * N), max_new_tokens)
    return generate(
        model.to(device), ids.to(device), mask.to(device), params, num_completions=N, noise=noise,
        **generate_settings,
    )  # fmt: skip


def long_prompts(lengths) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    torch.manual_seed(5)
    return torch.randint(3, VOCAB, mask.shape).masked_fill(~mask, PAD), mask


def assert_same(there, here) -> None:
    assert there.completion_ids.device.type == "cuda"
    assert torch.equal(there.completion_ids.cpu(), here.completion_ids)
    assert torch.equal(there.completion_mask.cpu(), here.completion_mask)
    # Norms and log-probs are float32 in every model: some ten roundings, of logits below 30.
    bound = 10 * 30 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, rtol=0, atol=bound)


@pytest.mark.parametrize("way", [
    "sampled", "nucleus", pytest.param("greedy", marks=pytest.mark.slow),
])  # fmt: skip
def test_completions_are_the_processor_s(way, gpu):
    model = tiny_model("llama")
    here = completions(model, "cpu", **WAYS[way])
    assert_same(completions(model, "cuda", **WAYS[way]), here)
    assert gpu.calls["capture"] >= 1, "a Llama's steps are recorded"
    assert gpu.calls["replay"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_completions_of_every_family_are_the_processor_s(name, gpu):
    family, settings = MODELS[name]
    model = tiny_models.tiny_model(family, **settings)  # eager attention is not for doubles
    here = completions(model, "cpu", max_new_tokens=24, stop_token_ids=STOPS)
    assert_same(completions(model, "cuda", max_new_tokens=24, stop_token_ids=STOPS), here)


def test_graphs_are_made_anew_at_the_borders_of_the_cache(gpu):
    """Positions 115 to 175: one border, at 128, lies between."""
    model = tiny_model("llama")
    settings = {"greedy": True, "max_new_tokens": 60, "lengths": (115, 3, 61, 1, 107)}
    here = completions(model, "cpu", **settings)
    assert_same(completions(model, "cuda", **settings), here)
    assert gpu.calls["capture"] == 2
    without = completions(model, "cuda", cuda_graphs=False, **settings)
    assert_same(without, here)
    assert gpu.calls["capture"] == 2


@pytest.mark.parametrize("way", [pytest.param("greedy", marks=pytest.mark.slow), "sampled"])
def test_tokens_are_looked_at_every_eighth_step_and_not_between(way, gpu):
    """40 more tokens are five more looks at which rows have ended, each one copy to the host;
    without stop tokens there is none. What leaves is known on the host, and not fetched again."""
    model = tiny_model("llama").to("cuda")
    settings = {"greedy": True} if way == "greedy" else {"stop_token_ids": (VOCAB - 1,)}

    def fetched(max_new_tokens):
        gpu.transfers.clear()
        completions(model, "cuda", max_new_tokens=max_new_tokens, **settings)
        return gpu.sites("to_host")

    fetched(40)  # probes the model
    few, many = fetched(40), fetched(80)
    more = {site: many[site] - few[site] for site in many if many[site] != few[site]}
    assert more == ({} if way == "greedy" else {"engines/decoder.py:drop_ended": 5})


def test_rows_that_come_later_are_let_in(gpu):
    model = tiny_model("llama")
    here = completions(model, "cpu", **WAYS["sampled"])
    assert_same(completions(model, "cuda", max_rows=2 * N, **WAYS["sampled"]), here)


def test_rows_are_as_many_as_free_memory_holds(gpu):
    model = tiny_model("llama").to("cuda")
    itemsize, positions = 8, 100
    row = bytes_of_row(model.config, positions, itemsize)
    gpu.free, gpu.total = 50 * row, 1000 * row
    assert row_budget(model, positions) == 40  # a fifth is for activations
    gpu.reserved, gpu.allocated = 30 * row, 10 * row
    assert row_budget(model, positions) == 56  # 0.8 (50 + 30 - 10)
    torch.cuda.set_per_process_memory_fraction(0.02)
    assert row_budget(model, positions) == 8  # 0.8 (0.02 1000 - 10)
    gpu.free = gpu.reserved = 0
    assert row_budget(model, positions) == 1


def test_half_as_many_rows_where_memory_runs_out(gpu):
    model, told = tiny_model("llama").to("cuda"), []
    n = 12
    ids, mask = ragged_prompts()
    params = SamplingParams(PAD, max_new_tokens=40, **WAYS["sampled"])
    noise = uniform_noise(1, range(len(ids) * n), 40)

    def all_of_them():
        return generate(
            model, ids.cuda(), mask.cuda(), params, num_completions=n, noise=noise,
            on_fewer_rows=told.append,
        )  # fmt: skip

    expected = all_of_them()
    assert told == []
    gpu.largest_tensor = gpu.largest_made - 1
    with pytest.warns(UserWarning, match="completions are decoded at once"):
        made = all_of_them()
    assert told == [2 * n] and gpu.calls["empty_cache"] == 1  # of five prompts two at a time
    assert torch.equal(made.completion_ids.cpu(), expected.completion_ids.cpu())


def ended(engine) -> dict:
    found = {}
    while engine.num_running:
        found |= {each.id: each for each in engine.step()}
    return found


def test_rows_of_an_engine_are_as_alone_on_the_processor(gpu):
    model = tiny_model("llama")
    expected = [alone(model, row) for row in rows()]
    engine = TorchEngine(model.to("cuda"), version=0)
    given = rows()
    engine.add(given[:2])
    engine.step()
    engine.add(given[2:])
    aborted = {each.id: each for each in engine.abort([given[1].id])}
    again = [continued(given[1], each) for each in aborted.values()]
    engine.add(again)
    found = ended(engine)
    for row, (tokens, logprobs) in zip(given, expected, strict=True):
        made = found[row.id]
        sampled = [*(aborted[row.id].token_ids if row.id in aborted else ()), *made.token_ids]
        said = [*(aborted[row.id].logprobs if row.id in aborted else ()), *made.logprobs]
        assert sampled == tokens[: len(sampled)]
        assert said == pytest.approx(logprobs[: len(said)], rel=1e-5)


def test_an_engine_takes_weights_in_flight(gpu):
    second = tiny_model("llama")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.01)
    made = {}
    for device in ("cpu", "cuda"):
        model = tiny_model("llama").to(device)
        engine = TorchEngine(model, version=1)
        params = dataclasses.replace(PARAMS, stop_token_ids=(), max_new_tokens=20)
        engine.add([Row(i, row.token_ids, params, noise=row.noise)
                    for i, row in enumerate(rows())])  # fmt: skip
        for _ in range(5):
            engine.step()
        engine.load(dict(second.named_parameters()), 2, in_flight="recompute")
        made[device] = ended(engine)
    for row in made["cpu"]:
        here, there = made["cpu"][row], made["cuda"][row]
        assert here.token_ids == there.token_ids and set(there.versions) == {1, 2}
