"""vLLM in the process of the measurement."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from generation_cases import Case
from torch import nn

from rllib_llm.engines.protocol import uniform_noise

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CACHE_BYTES = 512 * 1024**2  # on a CPU, for all rows of the largest case


def vllm_contestant(
    case: Case, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]
) -> Callable[[int], int]:
    """vLLM in this process; where completions are mixed, their lengths are drawn beforehand."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm import SamplingParams as VLLMParams

    folder = tempfile.mkdtemp(prefix="bench-vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    defaults = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "disable_log_stats": True,
    }
    if model.device.type == "cpu":
        defaults["kv_cache_memory_bytes"] = CACHE_BYTES
    llm = LLM(folder, **(defaults | settings))
    rows = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    prompts = [{"prompt_token_ids": row} for row in rows for _ in range(case.num_completions)]

    def run(round_number: int) -> int:
        lengths = drawn_lengths(case, round_number)
        params = [
            VLLMParams(
                temperature=1.0, max_tokens=length, ignore_eos=True, seed=round_number * 10_000 + i,
                logprobs=0, flat_logprobs=True, detokenize=False,
            )
            for i, length in enumerate(lengths)
        ]  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def drawn_lengths(case: Case, round_number: int) -> list[int]:
    """How long completions become that end with probability 1 / mean_len at each token."""
    rows = case.groups * case.num_completions
    if case.mean_len is None:
        return [case.completion_len] * rows
    noise = uniform_noise(round_number, range(rows), 1)[:, 0]
    lengths = 1 + torch.log1p(-noise) / math.log1p(-1 / case.mean_len)
    return lengths.long().clamp(1, case.completion_len).tolist()
