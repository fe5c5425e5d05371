"""vLLM behind the protocol of engines, by a fake package that counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Noise, Row
from rllib_llm.engines.vllm_engine import VLLMEngine
from rllib_llm.envs import rlhf
from rllib_llm.examples import squares
from rllib_llm.modules.images import image_rows
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.rollouts.policy import EnginePolicy, Generation
from rllib_llm.shared import columns
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny
from tests.engines import fake_vllm
from tests.engines.tiny_generations import continued, sampled_by
from tests.rollouts.test_policy import Scripted

PARAMS = SamplingParams(0, (14,), max_new_tokens=6)


@pytest.fixture
def engine(monkeypatch):
    fake_vllm.install(monkeypatch)
    engine = VLLMEngine(tiny.MODEL)
    yield engine
    engine.close()


def weights(offset: int) -> dict[str, torch.Tensor]:
    return {"model.offset": torch.tensor(offset)}


def opened(engine, offset: int = 0):
    engine.load(weights(offset), version=3)
    return engine


def until_empty(rows) -> dict:
    found = {}
    while rows.num_running:
        found |= {ended.id: ended for ended in rows.step()}
    return found


def test_generating_without_weights_is_refused(engine):
    prompt = torch.ones(1, 3, dtype=torch.int64)
    ask = {"num_completions": 1, "noises": [Noise()]}
    with pytest.raises(RuntimeError, match="weights must be loaded"):
        sampled_by(engine, prompt, prompt.bool(), PARAMS, **ask)
    with pytest.raises(RuntimeError, match="weights must be loaded"):
        engine.add([Row("a", [1], PARAMS)])
    engine.load(weights(8), version=0)
    out = sampled_by(engine, prompt, prompt.bool(), PARAMS, **ask)
    # Three tokens and an offset of eight: 11, 12, 13 and the stop token.
    assert out.completion_ids.tolist() == [[11, 12, 13, 14]] and out.finished.tolist() == [True]


def test_rows_come_and_go_with_their_versions(engine):
    rows = opened(engine)
    rows.add([Row("a", [1] * 12, PARAMS), Row("b", [1] * 20, PARAMS, noise=Noise(7, 2, 1))])
    rows.step()
    rows.add([Row("c", [1] * 10, replace(PARAMS, max_new_tokens=2))])
    assert [t.token_ids for t in rows.sampled(["b", "c"], [0, 0])] == [[20], []]
    found = until_empty(rows)
    assert {i: ended.token_ids for i, ended in found.items()} == {
        "a": [12, 13, 14], "b": [20, 21, 22, 23, 24, 25], "c": [10, 11],
    }  # fmt: skip
    assert [found[i].finish for i in "abc"] == ["stop", "length", "length"]
    assert found["b"].versions == [3] * 6 and found["b"].logprobs == [-0.5] * 6
    asked = engine._llm.llm_engine.added[1][2]
    assert asked.seed == Noise(7, 2, 1).one_seed


def test_an_aborted_row_goes_on_behind_its_tokens(engine):
    rows = opened(engine)
    row = Row("a", [1] * 20, PARAMS)
    rows.add([row])
    rows.step(), rows.step()
    (part,) = rows.abort(["a", "unknown"])
    assert (part.token_ids, part.finish) == ([20, 21], "aborted")
    assert rows.num_running == 0 and not engine._llm.llm_engine.requests
    rows.add([continued(row, part)])
    assert until_empty(rows)["a"].token_ids == [22, 23, 24, 25]
    assert engine._llm.llm_engine.added[1][1]["prompt_token_ids"] == [1] * 20 + [20, 21]


def test_rows_finish_on_their_weights_and_others_wait(engine):
    rows = opened(engine)
    rows.add([Row("old", [1] * 20, PARAMS)])
    rows.step()
    rows.load(weights(100), version=4)
    rows.add([Row("new", [1] * 20, PARAMS)])
    found = until_empty(rows)
    assert found["old"].token_ids == [20, 21, 22, 23, 24, 25]
    assert found["old"].versions == [3] * 6
    assert found["new"].token_ids == [120, 121, 122, 123, 124, 125]
    assert found["new"].versions == [4] * 6


def test_rows_computed_anew_change_weights_in_the_middle(engine):
    rows = opened(engine)
    rows.add([Row("a", [1] * 20, PARAMS)])
    rows.step(), rows.step()
    rows.load(weights(100), 4, in_flight="recompute")
    rows.step()
    rows.load(weights(200), 5, in_flight="recompute")
    assert [t.token_ids for t in rows.sampled(["a"], [1])] == [[21, 122]]
    ended = until_empty(rows)["a"]
    assert ended.token_ids == [20, 21, 122, 223, 224, 225]
    assert ended.versions == [3, 3, 4, 5, 5, 5]


def test_what_vllm_cannot_do_is_said(engine):
    rows = opened(engine)
    rows.add([Row("a", [1], PARAMS)])
    for wrong, name in [
        (Row("a", [1], PARAMS), "row.id"),
        (Row("b", [1], replace(PARAMS, temperature=0.5)), "temperature"),
        (Row("b", [1], replace(PARAMS, top_logprobs=2)), "guide and top_logprobs"),
    ]:
        with pytest.raises(Problems) as caught:
            rows.add([wrong])
        assert caught.value.problem.name == name


def test_rows_may_keep_their_cache_and_new_ones_never_see_it(engine):
    rows = opened(engine)
    rows.add([Row("a", [1] * 20, PARAMS)])
    rows.step(), rows.step()
    rows.load(weights(100), 4, in_flight="keep")
    rows.add([Row("b", [1] * 20, PARAMS)])
    found = until_empty(rows)
    assert found["a"].token_ids == [20, 21, 122, 123, 124, 125]
    assert found["a"].versions == [3, 3, 4, 4, 4, 4]
    first, second = (prompt for _, prompt, _ in engine._llm.llm_engine.added)
    assert first["cache_salt"] != second["cache_salt"]


def test_penalties_are_asked_for_where_the_log_probs_see_them(monkeypatch):
    fake_vllm.install(monkeypatch)
    cool = VLLMEngine(tiny.MODEL, temperature=0.5)
    rows = opened(cool)
    settings = {"frequency_penalty": 0.5, "logit_bias": {3: 1.0}}
    rows.add([Row("a", [1], replace(PARAMS, temperature=0.5, **settings))])
    rows.step()
    ((_, _, asked),) = cool._llm.llm_engine.added
    assert (asked.frequency_penalty, asked.logit_bias) == (0.5, {3: 1.0})
    with pytest.raises(Problems) as caught:
        rows.add([Row("b", [1], replace(PARAMS, temperature=0.5, min_p=0.1))])
    assert (caught.value.problem.name, caught.value.problem.value) == ("min_p", 0.1)
    warm = opened(VLLMEngine(tiny.MODEL))
    with pytest.raises(Problems) as caught:
        warm.add([Row("b", [1], replace(PARAMS, **settings))])
    assert caught.value.problem.name == "frequency_penalty, logit_bias"


@pytest.mark.parametrize("logprob", [float("nan"), float("inf"), float("-inf")])
def test_log_probs_that_are_not_finite_are_an_error(engine, logprob):
    """As of our own engine: what a broken model samples is nothing to learn from."""
    rows = opened(engine)
    engine._llm.llm_engine.logprob = logprob
    rows.add([Row("a", [1] * 3, PARAMS)])
    assert until_empty(rows)["a"].finish == "error"
    prompt = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(FloatingPointError, match="logits must be finite"):
        sampled_by(engine, prompt, prompt.bool(), PARAMS, num_completions=1, noises=[Noise()])


# --- adapters ------------------------------------------------------------------------------------


@pytest.fixture
def adapted(monkeypatch):
    fake_vllm.install(monkeypatch)
    engine = VLLMEngine(tiny.MODEL, lora={"r": 4, "rank_pattern": {"q_proj": 9}}, max_loras=3)
    yield engine
    engine.close()


def adapters(offset: int) -> dict[str, torch.Tensor]:
    return {"model.offset.lora_A.default.weight": torch.tensor(offset)}


def folders(engine) -> list[str]:
    return sorted(each.name for each in Path(engine._folder.name).glob("weights*"))


def test_vllm_has_the_trunk_and_room_for_adapters(adapted):
    settings = adapted._llm.settings
    assert "load_format" not in settings and settings["enable_lora"] is True
    assert (settings["max_loras"], settings["max_lora_rank"]) == (3, 16)
    assert (Path(settings["model"]) / "model.safetensors").is_file()


def test_rows_finish_on_their_adapters_while_others_begin(adapted):
    for version in (3, 4):
        adapted.load(adapters(100 * version), version)
        adapted.add([Row(version, [1] * 20, PARAMS)])
        adapted.step()
    assert folders(adapted) == ["weights 1", "weights 2"]
    found = until_empty(adapted)
    assert found[3].token_ids == [320, 321, 322, 323, 324, 325] and found[3].versions == [3] * 6
    assert found[4].token_ids == [420, 421, 422, 423, 424, 425] and found[4].versions == [4] * 6
    adapted.load(adapters(500), 5)  # which ends those that no row uses
    assert [*adapted._llm.llm_engine.loras] == [3] and folders(adapted) == ["weights 3"]


@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_rows_go_on_with_new_adapters(adapted, in_flight):
    adapted.load(adapters(0), 3)
    adapted.add([Row("a", [1] * 20, PARAMS)])
    adapted.step(), adapted.step()
    adapted.load(adapters(100), 4, in_flight)
    adapted.add([Row("b", [1] * 20, PARAMS)])
    found = until_empty(adapted)
    assert found["a"].token_ids == [20, 21, 122, 123, 124, 125]
    assert found["a"].versions == [3, 3, 4, 4, 4, 4] and found["b"].versions == [4] * 6
    assert len(adapted._llm.llm_engine.loras) == 1 and folders(adapted) == ["weights 2"]
    first, second = (prompt for _, prompt, _ in adapted._llm.llm_engine.added)
    assert first["cache_salt"] != second["cache_salt"]


def test_adapters_that_vllm_does_not_take_are_said_by_name(adapted):
    with pytest.raises(Problems) as caught:
        adapted.load({"model.other.lora_A.default.weight": torch.tensor(1)}, 1)
    assert caught.value.problem.name == "lora"


def test_images_come_as_files_with_the_tokens_before_they_are_read(monkeypatch):
    fake_vllm.install(monkeypatch)
    model = "rllib_llm.examples.squares.build_model"
    engine = VLLMEngine(model)
    # The towers of a policy are never published, and vLLM's processor needs a tokenizer.
    assert engine._llm.settings["load_format"] == "auto"
    assert engine._llm.settings["skip_tokenizer_init"] is False
    assert AutoProcessor.from_pretrained(engine._llm.settings["model"]).image_token == "<image>"

    shown, words = squares.rows(1)[0]["image"], [{"role": "user", "content": "red?"}]
    env = rlhf.create({
        "model": model, "max_prompt_len": 48, "shuffle": False,
        "prompts": [{"image": image, "prompt": words, "answer": "red"} for image in (shown, None)],
        "reward_functions": ["rllib_llm.examples.squares.correct"],
    })  # fmt: skip
    prompts, _ = env.reset(options={"position": 0, "num_prompts": 2})
    opened(engine, 5)
    asked = Generation(SamplingParams(0, max_new_tokens=2), 2, 9, torch.arange(4))
    made = EnginePolicy(engine, model).generate(prompts, asked)
    added = [prompt for _, prompt, _ in engine._llm.llm_engine.added]
    tokenizer = load_tokenizer(model)
    text = "<user>{}red?<eos><assistant>"
    with_image, without = (tokenizer(text.format(mark))["input_ids"] for mark in ("<image>", ""))
    assert [prompt["prompt_token_ids"] for prompt in added] == [with_image] * 2 + [without] * 2
    for prompt in added[:2]:
        (image,) = prompt["multi_modal_data"]["image"]
        assert image.tobytes() == shown.tobytes()
    assert not any("multi_modal_data" in prompt for prompt in added[2:])
    # The fake counts from the number of tokens that it is given.
    lengths = [len(with_image)] * 2 + [len(without)] * 2
    assert made["completion_ids"][:, 0].tolist() == [length + 5 for length in lengths]

    rows = opened(engine)
    seen = image_rows(prompts)[0]
    rows.add([Row("a", [*prompts["prompt_ids"][0].tolist(), 7], PARAMS, 1, images=seen)])
    rows.step()
    _, prompt, _ = engine._llm.llm_engine.added[-1]
    assert prompt["prompt_token_ids"] == [*with_image, 7]  # what was sampled before stays
    engine.close()


def test_an_engine_that_reads_no_images_refuses_them():
    prompts = {columns.IMAGE_ROW: torch.zeros(1, dtype=torch.int64)}
    asked = Generation(PARAMS, 1, 0, torch.arange(1))
    with pytest.raises(Problems) as error:
        EnginePolicy(Scripted(), tiny.MODEL).generate(prompts, asked)
    assert error.value.problem.name == "image"
