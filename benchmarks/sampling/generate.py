"""Tokens per second of the decode loop against transformers.generate and others, in one process.

    python -m benchmarks.sampling.generate --cases 5m_full 5m_mixed 80m_full --rounds 5 --threads 1
    .venv-vllm/bin/python -m benchmarks.sampling.generate --engines ours vllm \\
        --cases 5m_full 5m_mixed
    python -m benchmarks.sampling.generate --engines ours chunks --cases 5m_places

All get the same random model, the same prompts and threads, and take turns; each line is one JSON
object with the medians and the ratios of the others' time per token to ours, in CPU seconds (which
hold on a shared machine; those of all threads and child processes) and in wall seconds. `chunks` is
ours, one part of the prompts after the other instead of prompts let in as rows end; `no_graphs`,
for CUDA, is ours with every operation launched by itself; `one_block` is ours with one cache for
rows of all lengths, which `5m_unlike` is about; `onednn`, for float32, is ours with
`float32_products: onednn`; `transformers_float32`, for
`--dtype bfloat16`, is transformers in the other precision, of which its better one counts. vLLM
wants an environment of its own (`make test-vllm` makes it) and OMP_NUM_THREADS set, and takes no
bias that would end completions early: in cases of mixed lengths each of its rows is told when to
end.
Of ours a line has the most bytes of keys and values that were held after a step, too.
`--profile` prints where our time goes instead.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import copy
import functools
import gc
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks.common import CASES, PAD, STOP, Case, build_model, build_prompts
from rllib_llm.engines.engine import generate
from rllib_llm.engines.kv_cache import SharedPromptLayer
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import uniform_noise
from rllib_llm.modules.precision import use_onednn

ENGINES = (
    "ours", "no_graphs", "one_block", "transformers", "transformers_float32", "chunks", "onednn",
    "vllm",
)  # fmt: skip
# Without those for a GPU, and the one where transformers pays for the longest prompt in every row.
DEFAULT_CASES = [name for name in CASES if not name.startswith("500m") and name != "5m_unlike"]
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
VLLM_CACHE_BYTES = 512 * 1024**2  # on a CPU, for all rows of the largest case


def contestants(
    case: Case, model: nn.Module, device: str, engines: Sequence[str], vllm: dict[str, Any]
) -> dict[str, Callable[..., int]]:
    """Name to a function of the round number that generates once and returns tokens made."""
    ids, mask = build_prompts(case, device)
    rows = case.groups * case.num_completions
    stops = (STOP,) if case.mean_len is not None else ()
    params = SamplingParams(
        pad_token_id=PAD, stop_token_ids=stops, max_new_tokens=case.completion_len
    )

    def ours(round_number: int, model: nn.Module = model, **settings: Any) -> int:
        noise = uniform_noise(round_number, range(rows), case.completion_len)
        out = generate(
            model, ids, mask, params, num_completions=case.num_completions, noise=noise,
            max_rows=case.max_rows, **settings,
        )  # fmt: skip
        return int(out.completion_mask.sum())

    def chunks(round_number: int) -> int:
        noise = uniform_noise(round_number, range(rows), case.completion_len)
        size = (case.max_rows or rows) // case.num_completions
        tokens = 0
        for start in range(0, case.groups, size):
            part = slice(start, start + size)
            part_noise = noise[start * case.num_completions :]
            out = generate(
                model, ids[part], mask[part], params, num_completions=case.num_completions,
                noise=part_noise[: size * case.num_completions],
            )  # fmt: skip
            tokens += int(out.completion_mask.sum())
        return tokens

    def transformers(round_number: int, model: nn.Module = model) -> int:
        torch.manual_seed(round_number)
        out = model.generate(
            input_ids=ids.repeat_interleave(case.num_completions, dim=0),
            attention_mask=mask.long().repeat_interleave(case.num_completions, dim=0),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=case.completion_len,
            eos_token_id=list(stops) or None,
            pad_token_id=PAD,
        )[:, ids.shape[1] :]
        ended = (out == STOP).long().cumsum(dim=1) - (out == STOP).long() if stops else out * 0
        return int((ended == 0).sum())

    exact = model
    if "transformers_float32" in engines:
        exact = build_model(case, device, torch.float32)
    by_onednn = model
    if "onednn" in engines:
        by_onednn = copy.deepcopy(model)
        use_onednn(by_onednn)
    no_graphs = functools.partial(ours, cuda_graphs=False)
    known = {
        "ours": ours, "no_graphs": no_graphs, "transformers": transformers, "chunks": chunks,
        "onednn": functools.partial(ours, model=by_onednn),
        "one_block": functools.partial(ours, row_blocks=False),
        "transformers_float32": functools.partial(transformers, model=exact),
    }  # fmt: skip
    return {
        name: known[name] if name in known else vllm_contestant(case, model, ids, mask, vllm)
        for name in engines
    }


def cpu_seconds() -> float:
    """CPU time of this process, its threads and the processes it started."""
    me = psutil.Process()
    total = time.process_time()
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def measure(run: Callable[[int], int], round_number: int, device: str) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds of all threads, tokens) of one call."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    tokens = run(round_number)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, cpu_seconds() - cpu, tokens


class CacheBytes:
    """Most bytes of keys and values that were held, looked at after each step."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self) -> None:
        layers = [each for each in gc.get_objects() if type(each) is SharedPromptLayer]
        buffers = [b for each in layers if each.is_initialized for b in (each.keys, each.values)]
        self.most = max(self.most, sum(b.numel() * b.element_size() for b in buffers))


def compare(
    name: str,
    rounds: int,
    device: str,
    dtype: torch.dtype,
    engines: Sequence[str] = ("ours", "transformers"),
    vllm: dict[str, Any] | None = None,
) -> dict:
    """Medians over interleaved rounds, after one round of warm-up."""
    case = CASES[name]
    model = build_model(case, device, dtype)
    runs = contestants(case, model, device, engines, vllm or {})
    times: dict[str, list[tuple[float, float, int]]] = {key: [] for key in runs}
    for round_number in range(rounds + 1):
        for key, run in runs.items():
            sample = measure(run, round_number, device)
            if round_number:
                times[key].append(sample)
    line = {
        "case": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
    for key, samples in times.items():
        wall, cpu, tokens = (statistics.median(column) for column in zip(*samples, strict=True))
        per_cpu = statistics.median(tokens / cpu for _, cpu, tokens in samples)
        per_wall = statistics.median(tokens / wall for wall, _, tokens in samples)
        line[key] = {
            "wall_s": round(wall, 4),
            "cpu_s": round(cpu, 4),
            "tokens": tokens,
            "tokens_per_cpu_s": round(per_cpu, 1),
            "tokens_per_wall_s": round(per_wall, 1),
        }
        if key in ("ours", "no_graphs", "one_block"):
            held = CacheBytes()
            runs[key](0, on_step=held)
            line[key]["cache_mb"] = round(held.most / 1e6, 1)
    for unit, column in (("cpu", 1), ("wall", 0)):
        for key in list(engines)[1:]:
            # Per token, since each draws other completions; turn by turn, since load changes.
            ratios = [
                (theirs[column] / theirs[2]) / (mine[column] / mine[2])
                for mine, theirs in zip(times[engines[0]], times[key], strict=True)
            ]
            line[f"{key}_over_{engines[0]}_{unit}"] = round(statistics.median(ratios), 2)
    return line


def profile(name: str, device: str, dtype: torch.dtype) -> str:
    """Table of operators by their own time in one call of ours."""
    case = CASES[name]
    model = build_model(case, device, dtype)
    run = contestants(case, model, device, ["ours"], {})["ours"]
    run(0)
    with torch.profiler.profile() as record:
        run(1)
    return record.key_averages().table(sort_by="self_cpu_time_total", row_limit=22)


def vllm_contestant(
    case: Case, model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]
) -> Callable[[int], int]:
    """vLLM in this process; where completions are mixed, their lengths are drawn beforehand."""
    for name, value in VLLM_ENVIRONMENT.items():
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
        defaults["kv_cache_memory_bytes"] = VLLM_CACHE_BYTES
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=DEFAULT_CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["ours", "transformers"],
                        help="the first is what the others are compared with")  # fmt: skip
    parser.add_argument("--vllm", type=json.loads, default={}, help="arguments of vllm.LLM as JSON")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    for name in args.cases:
        if args.profile:
            print(profile(name, args.device, dtype))
        else:
            line = compare(name, args.rounds, args.device, dtype, args.engines, args.vllm)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
