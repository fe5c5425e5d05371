"""What can be said about engines without starting one."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec

import pytest
from transformers import LlamaConfig

from rllib_llm.config.sections import no_effect
from rllib_llm.engines.servers import ServerEngine
from rllib_llm.engines.vllm_engine import VLLMEngine, check_heads, truncated
from rllib_llm.shared.errors import Problems
from tests.algorithms import tiny_runs as tiny
from tests.engines import fake_vllm

SERVER = {"base_url": "http://localhost:8000/v1", "served_model": "m"}
without_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here"
)


def test_an_unknown_engine_is_refused():
    for wrong in ("sglang", "tests.algorithms.tiny_runs.PROMPTS", "tests.algorithms.no_such"):
        with pytest.raises(Problems) as caught:
            tiny.grpo().sampling(engine=wrong).validate()
        assert (caught.value.problem.name, caught.value.problem.value) == ("engine", wrong)


def test_settings_of_an_engine_are_a_dictionary():
    with pytest.raises(ValueError, match="engine_settings=3 must be a dictionary or None"):
        tiny.grpo().sampling(engine_settings=3).validate()


def test_training_with_a_server_is_refused_and_evaluating_is_not():
    config = tiny.grpo().sampling(engine="openai", engine_settings=SERVER)
    with pytest.raises(Problems) as caught:
        config.validate()
    assert caught.value.problem.name == "engine" and "endpoint" in caught.value.problem.rule
    config = tiny.grpo().evaluation(
        evaluation_config={"engine": "openai", "engine_settings": SERVER}
    )
    config.validate()
    evaluation = config.get_evaluation_config_object()
    evaluation.validate()
    assert (config.engine, evaluation.engine) == ("torch", "openai")


def test_training_with_a_server_wants_tokens_and_the_run_s_weights():
    server = {**SERVER, "endpoint": "tokens"}
    config = tiny.grpo().sampling(engine="openai", engine_settings=server)
    with pytest.raises(ValueError, match="come with weights_name or weights_push"):
        config.validate()
    config.weights(name="run").validate()
    engine = ServerEngine.of(config)
    engine.close()
    assert engine._follows_run is True
    config.sampling(engine_settings={**server, "follows_run": False})
    with pytest.raises(ValueError, match="come with weights_name or weights_push"):
        config.validate()
    config.sampling(engine_settings=server).streaming(max_staleness=1)
    with pytest.raises(ValueError, match="max_staleness, oversample or schedule"):
        config.validate()


def test_a_server_has_to_be_named():
    config = tiny.grpo().sampling(engine="openai", engine_settings={"base_url": "http://h/v1"})
    config.in_evaluation = True
    with pytest.raises(ValueError, match=r"Add \['served_model'\]"):
        config.validate()


@without_vllm
def test_vllm_that_is_not_installed_is_named_with_what_to_install():
    config = tiny.grpo().sampling(engine="vllm").env_runners(num_env_runners=1)
    with pytest.raises(ValueError, match=r"must find the package vllm.*pip install 'rllib-llm"):
        config.validate()
    with pytest.raises(ImportError, match="must find the package vllm"):
        VLLMEngine(tiny.MODEL)


def test_adapters_that_vllm_could_not_sample_with_are_refused(monkeypatch):
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm"], "__spec__", ModuleSpec("vllm", None))

    def problems(lora, staleness=0, **settings):
        config = tiny.grpo(off_policy="decoupled").sampling(engine="vllm", **settings)
        config.language_model(lora=lora).env_runners(num_env_runners=1)
        config.streaming(max_staleness=staleness)
        return [(each.name, each.value) for each in VLLMEngine.rules(config)]

    assert not problems({}) and not problems({"r": 512})
    assert problems({"rank_pattern": {"q_proj": 600}}) == [("lora.rank_pattern", 600)]
    assert problems({"r": 513}) == [("lora.r", 513)]
    assert not problems({}, 2, engine_settings={"max_loras": 4})
    few = problems({}, 2, engine_settings={"max_loras": 3})
    assert few == [("engine_settings.max_loras", 3)]
    config = tiny.grpo().sampling(engine="vllm").env_runners(num_env_runners=1)
    config.language_model(lora={}, quantization="int8")
    assert [each.name for each in VLLMEngine.rules(config)] == ["quantization"]
    # What vLLM has no kernels for is no setting of ours.
    for wrong in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(Problems) as caught:
            tiny.grpo().language_model(lora=wrong).validate()
        assert caught.value.problem.name == f"lora.{next(iter(wrong))}"


def test_settings_without_effect_are_said():
    with pytest.warns(UserWarning, match="engine='vllm' has no effect with num_env_runners=0"):
        tiny.grpo().sampling(engine="vllm").validate()
    with pytest.warns(UserWarning, match="engine_settings=.* has no effect with engine='torch'"):
        tiny.grpo().sampling(engine_settings={"dtype": "float32"}).validate()
    remote = tiny.grpo().sampling(engine="vllm", cuda_graphs=False).env_runners(num_env_runners=1)
    (idle,) = no_effect(remote)
    assert (idle.name, idle.reason) == ("cuda_graphs", "has no effect with engine='vllm'")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny.grpo().sampling(cuda_graphs=False).validate()


def test_heads_too_narrow_for_vllm_on_a_cpu_are_said_before_it_starts():
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=None)
    check_heads(config, "m")
    check_heads(LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=48), "m")
    narrow = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=None)
    with pytest.raises(ValueError, match="model='m' must have a head_dim of at least 32"):
        check_heads(narrow, "m")


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"top_k": 5}, "top_k=5 must be 0"), ({"top_p": 0.9}, "top_p=0.9 must be 1.0"),
     ({"min_new_tokens": 2}, "min_new_tokens=2 must be 0")],
)  # fmt: skip
def test_vllm_s_log_probs_before_truncation_are_those_at_temperature_1(settings, said):
    off = {"top_k": 0, "top_p": 1.0, "min_new_tokens": 0}
    assert not [*truncated(1.0, **{**off, **settings}), *truncated(0.7, **off)]
    (problem,) = truncated(0.7, **{**off, **settings})
    assert f"{said} with engine='vllm' and temperature=0.7" in str(problem)
