"""A package with the few names of vLLM that are used; its model counts: 10, 11, 12 ..."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from safetensors.torch import load_file


@dataclass(frozen=True)
class FakeLoRARequest:
    """With the fields of vLLM 0.32's, in their order."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False


class FakeLLMEngine:
    """Each request gets, a step, its number of prompt tokens plus those sampled, plus an offset
    that the weights decide; it ends with a stop token or at its limit."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[list[int], Any, list[int], Any]] = {}
        self.loras: dict[int, int] = {}  # offsets of adapters, by their number
        self.offset = 0
        self.logprob = -0.5
        self.added: list[tuple[str, dict[str, Any], Any]] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, request_id, prompt, params, lora_request=None) -> None:
        assert request_id not in self.requests
        self.added.append((request_id, prompt, params))
        self.requests[request_id] = (prompt["prompt_token_ids"], params, [], lora_request)

    def add_lora(self, asked: FakeLoRARequest) -> bool:
        if asked.lora_int_id not in self.loras or asked.load_inplace:
            tensors = load_file(Path(asked.lora_path) / "adapter_model.safetensors")
            if "base_model.model.offset.lora_A.weight" not in tensors:
                raise ValueError(f"expected target modules in ['offset'], received {[*tensors]}")
            self.loras[asked.lora_int_id] = int(tensors["base_model.model.offset.lora_A.weight"])
        return True

    def remove_lora(self, number: int) -> bool:
        return self.loras.pop(number, None) is not None

    def abort_request(self, request_ids) -> None:
        for request_id in request_ids:
            del self.requests[request_id]

    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, params, tokens, lora) in list(self.requests.items()):
            if lora is not None:
                self.add_lora(lora)
            offset = self.offset if lora is None else self.loras[lora.lora_int_id]
            tokens.append(len(prompt) + len(tokens) + offset)
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
    package, platforms, lora = map(ModuleType, ("vllm", "vllm.platforms", "vllm.lora.request"))
    lora.LoRARequest = FakeLoRARequest
    package.LLM, package.SamplingParams = FakeLLM, SimpleNamespace
    package.sampling_params = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    )
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", lora)
