"""A package with the few names of vLLM that are used; its model counts: 10, 11, 12 ..."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeLLMEngine:
    """Each request gets, a step, its number of prompt tokens plus those sampled, plus an offset
    that the weights decide; it ends with a stop token or at its limit."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[list[int], Any, list[int]]] = {}
        self.offset = 0
        self.logprob = -0.5
        self.added: list[tuple[str, dict[str, Any], Any]] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, request_id, prompt, params) -> None:
        assert request_id not in self.requests
        self.added.append((request_id, prompt, params))
        self.requests[request_id] = (prompt["prompt_token_ids"], params, [])

    def abort_request(self, request_ids) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, params, tokens) in list(self.requests.items()):
            tokens.append(len(prompt) + len(tokens) + self.offset)
            is_full = len(tokens) == params.max_tokens
            finished = is_full or tokens[-1] in params.stop_token_ids
            if params.output_kind == "delta" or finished:
                new = tokens[-1:] if params.output_kind == "delta" else list(tokens)
                logprobs = SimpleNamespace(logprobs=[self.logprob] * len(new))
                answer = SimpleNamespace(token_ids=new, logprobs=logprobs)
                outputs.append(
                    SimpleNamespace(request_id=name, outputs=[answer], finished=finished)
                )
            if finished:
                del self.requests[name]
        return outputs


class FakeLLM:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.llm_engine = FakeLLMEngine()
        self.num_resets = 0

    def collective_rpc(self, method, kwargs) -> None:
        assert method == "reload_weights"
        self.llm_engine.offset = int(dict(kwargs["weights_iterator"])["offset"])

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        assert reset_running_requests or not self.llm_engine.requests, "they would stay"
        self.num_resets += 1
        return True


def install(monkeypatch) -> None:
    """Puts the package where `import vllm` finds it."""
    package, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    package.LLM, package.SamplingParams = FakeLLM, SimpleNamespace
    package.sampling_params = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    )
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
