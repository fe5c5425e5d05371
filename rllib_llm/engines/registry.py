"""The names of engines. Each class says itself what it can, and which configs it can serve.

    engine: torch | vllm | openai | a dotted path     (the setting)
       │ engine_class
       ▼
    class of `Engine`:  takes_weights, takes_rows, knows_versions, has_logprobs;  rules(config)
       │ of(config), in the sampler
       ▼
    add(rows), step() -> ended, load(weights, version) ...
"""

from __future__ import annotations

from typing import Any

from rllib_llm.engines.protocol import Engine
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import require

_HERE = "rllib_llm.engines"
ENGINES = {
    "torch": f"{_HERE}.torch_engine.TorchEngine",  # of the sampler's module
    "vllm": f"{_HERE}.vllm_engine.VLLMEngine",
    "openai": f"{_HERE}.servers.ServerEngine",
}


def engine_class(name: str) -> type[Engine]:
    """The class of an engine, by its name or its own dotted path; importing it may take seconds.

    Raises:
        Problems: there is no such class.
    """
    found: Any = import_dotted(ENGINES.get(name, name), name="engine")
    is_engine = isinstance(found, type) and issubclass(found, Engine)
    require(is_engine, "engine", name, "be a class derived from rllib_llm.engines.protocol.Engine")
    return found
