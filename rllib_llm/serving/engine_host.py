"""The engine behind a server, in a thread of this process; `engine_process.py` has the same in a
process of its own."""

from __future__ import annotations

import copy
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rllib_llm.engines.engine_loop import EngineLoop, settle
from rllib_llm.engines.hot_swap import HotSwapEngine, HotSwapLoader
from rllib_llm.engines.protocol import Ended, Row
from rllib_llm.engines.torch_engine import TRUNK, TorchEngine, named_as
from rllib_llm.modules.lora import is_adapter_folder
from rllib_llm.modules.model_source import DOTTED, is_multimodal, source_kind, text_config
from rllib_llm.modules.precision import faster_library, use_onednn
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.modules.text_scores import TextScores
from rllib_llm.modules.tokenizer import eos_token_ids, load_tokenizer
from rllib_llm.serving.guides import Grammars
from rllib_llm.serving.jobs import Limits
from rllib_llm.serving.settings import ServeSettings
from rllib_llm.shared.errors import Problems, SettingWarning, require

if TYPE_CHECKING:
    from rllib_llm.engines.vllm_engine import VLLMEngine

_MANY_POSITIONS = 2**20  # of a model that says no number
# Of several prompts in one step, during which all other requests wait: on a GPU, on a processor.
_PREFILL_TOKENS, _PREFILL_TOKENS_OF_CPU = 2**13, 2**10
# A thread of the engine, or one that reads a large request, hardly lets go of the interpreter: with
# Python's 5 ms whatever else its process does, such as taking a request in, would wait so long
# behind each of its own waits.
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class Counts:
    """Completions in an engine."""

    sampling: int
    waiting: int
    by_version: dict[int, int]


class ThreadHost(EngineLoop):
    """The engine of a server, in a thread of this process. Weights are named by the serial numbers
    that the server gives them; those that it starts with are 0.

    Args:
        model: causal LM of transformers, which this owns.
        eos_token_ids: all ids that end a completion.
        engine: of the model, which this owns then; None: one, or two, are made.
        after_step: see `EngineLoop`.
    """

    def __init__(
        self, model: Any, settings: ServeSettings, eos_token_ids: tuple[int, ...],
        tokenizer: Any, *, engine: TorchEngine | VLLMEngine | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        most = getattr(text_config(model), "max_position_embeddings", None) or _MANY_POSITIONS
        self.limits = Limits(
            max_model_len=min(most, settings.max_model_len or most),
            vocab_size=model.get_input_embeddings().weight.shape[0],
            pad_token_id=tokenizer.pad_token_id, eos_token_ids=eos_token_ids,
            default_max_tokens=settings.default_max_tokens,
            max_prompt_chars=settings.max_prompt_chars,
        )  # fmt: skip
        self.fingerprint = fingerprint(model.state_dict())
        self._in_flight = settings.in_flight
        self._by_name = model if settings.engine == "vllm" else None  # of vLLM's weights
        other = None
        if self._in_flight == "finish" and engine is None:
            other = _engine(copy.deepcopy(model), None, settings)
        self.engine = HotSwapEngine(engine or _engine(model, 0, settings), other)
        self._grammars = Grammars(tokenizer, eos_token_ids[0] if eos_token_ids else None)
        self.compile, self.release = self._grammars.compile, self._grammars.release
        super().__init__(self.engine, after_step)
        self._loader = other and HotSwapLoader(self, self.engine)

    @classmethod
    def open(cls, settings: ServeSettings, source: str, **further: Any) -> Any:
        """One with the model that `source` names, in a process that is a server's. Its float32
        products on a processor are by the library that is faster there."""
        sys.setswitchinterval(SWITCH_SECONDS)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        device = device if settings.device == "auto" else settings.device
        is_vllm = settings.engine == "vllm"
        device = "cpu" if is_vllm else device  # vLLM has a copy of its own
        model = load_causal_lm(source, dtype=settings.dtype, device=device)
        if is_vllm:
            further["engine"] = _vllm_engine(model, settings, source)
        if (kernel := settings.attn_implementation) != "sdpa":
            try:
                model.set_attn_implementation(kernel)
            except (ImportError, ValueError) as error:
                raise Problems("attn_implementation", "be one that model and machine have",
                               str(error), "Write 'sdpa', its default", kernel
                               ) from error  # fmt: skip
        if faster_library() == "onednn":
            use_onednn(model)
        tokenizer = served_tokenizer(source)
        ends = eos_token_ids(model.config, tokenizer, model.generation_config)
        return cls(model, settings, ends, tokenizer, **further)

    async def listen(self) -> None:
        """Called in the server's event loop before any request."""

    async def ready(self) -> None:
        """Waits, in that loop, until the engine has accepted earlier requests: this one does at
        once."""

    def submit_all(self, rows: Sequence[Row], grammar: str | None = None) -> list[Future[Ended]]:
        """As `EngineLoop.submit_all`. All rows keep to the grammar, which has been compiled."""
        if grammar is not None:
            rows = [replace(each, guide=self._grammars.guide(grammar)) for each in rows]
        return super().submit_all(rows)

    def score(
        self, texts: Sequence[Sequence[int]], top: int, version: int | None
    ) -> Future[list[TextScores]]:
        """As `HotSwapEngine.score`. Cancelling the future takes the texts out of the engine."""
        done: Future[list[TextScores]] = Future()

        def pass_on_error(begun: Future[Any]) -> None:  # of a call that could not even start
            if not begun.cancelled() and (error := begun.exception()) is not None:
                settle(done, error)

        begun = self.do(lambda: self.engine.score(texts, top, version, done))
        begun.add_done_callback(pass_on_error)
        return done

    def count(self) -> Future[Counts]:
        """The completions in it; that it answers shows that the engine is alive."""
        of = self.engine
        return self.do(lambda: Counts(of.num_sampling, of.num_waiting, of.rows_by_version))

    def swap(self, weights: Mapping[str, torch.Tensor], serial: int) -> list[int]:
        """Loads weights for new rows; returns the versions held then, the newest first. May take a
        while. Weights of another model are a ValueError, and change nothing."""
        tensors = dict(weights)
        if self._by_name is not None:
            named = named_as(self._by_name, tensors)
            tensors = {TRUNK + name: tensor for name, tensor in named.items()}
        if self._loader is not None:
            self._loader.load(tensors, serial)
        else:
            self.load(tensors, serial, self._in_flight)
        return self.do(lambda: self.engine.versions).result()

    def close(self) -> None:
        """As `EngineLoop.close`."""
        self._grammars.close()
        super().close()


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """CRC-32 of the weights' bytes in the order of their names, eight hexadecimal digits."""
    crc = 0
    for name in sorted(weights, key=lambda name: name.removeprefix("model.")):
        tensor = weights[name].detach().cpu().contiguous()
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return f"{crc:08x}"


def served_tokenizer(source: str, **chats: Any) -> Any:
    """As `load_tokenizer`, without its warning about padding, which is of batches to learn from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingWarning)
        return load_tokenizer(source, **chats)


def _vllm_engine(model: Any, settings: ServeSettings, source: str) -> VLLMEngine:
    """A vLLM with the model's weights, which it reads itself from a folder of whole weights: what
    several processes are handed passes through pickle."""
    from rllib_llm.engines.vllm_engine import VLLMEngine  # few servers need it

    require(not is_multimodal(model.config), "engine", "vllm", "be 'torch' for a model that sees",
            "images come as our towers read them")  # fmt: skip
    kind, folder = source_kind(source)
    is_whole = kind != DOTTED and not is_adapter_folder(folder)
    given: dict[str, Any] = {"max_num_seqs": settings.max_rows}
    if is_whole:
        given["load_format"] = "auto"
    if settings.max_model_len is not None:
        given["max_model_len"] = settings.max_model_len
    given |= settings.engine_settings
    engine = VLLMEngine(source, dtype=settings.dtype, temperature=None, **given)
    if is_whole:
        engine.version = 0
    else:
        engine.load({TRUNK + name: tensor for name, tensor in model.state_dict().items()}, 0)
    return engine


def _engine(model: Any, version: int | None, settings: ServeSettings) -> TorchEngine:
    on_cpu = next(model.parameters()).device.type == "cpu"
    return TorchEngine(
        model, version=version, max_rows=settings.max_rows,
        max_positions=settings.max_model_len or 2048,
        max_prefill=_PREFILL_TOKENS_OF_CPU if on_cpu else _PREFILL_TOKENS,
    )  # fmt: skip
