"""Tokens per second of conversations with tools, against the same tokens in one turn without.

    python -m benchmarks.sampling.conversations --conversations 64 --turns 4 --tool-ms 50

A random Llama samples turns of given lengths: all alike (all conversations then wait for their
tools at the same time), or, with --spread 0.5, drawn between half and one and a half of it, as
turns that end by themselves are. Between two turns a tool takes its time and its result is
appended. "one turn": the same tokens at once, the results read with the prompt; "and no results":
as many sampled tokens from the prompt alone. All run one after the other on the same engine
settings, with the KV cache kept over turns and without; a table has each round and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.torch_engine import TorchEngine

VOCABULARY = 512


def build_model(hidden_size: int, num_layers: int) -> LlamaForCausalLM:
    """A random model."""
    torch.manual_seed(0)
    heads = max(1, hidden_size // 64)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


async def converse(
    loop: EngineLoop,
    row: int,
    prompt: Sequence[int],
    turns: Sequence[int],
    tool_s: float,
    result: Sequence[int],
    keeps: bool,
    num_read: int,
) -> int:
    """One conversation: its turns' lengths are given, and how many results are read at its start;
    how many tokens it sampled."""
    token_ids, sampled = [*prompt, *result * num_read], 0
    for turn, length in enumerate(turns):
        params = SamplingParams(pad_token_id=0, max_new_tokens=length)
        ended = await loop.complete_async(
            token_ids, params, row=row, turn=turn, conversation=row if keeps else None
        )
        token_ids += ended.token_ids
        sampled += ended.num_tokens
        if turn + 1 < len(turns):
            await asyncio.sleep(tool_s)
            token_ids += result
    return sampled


def turns_of(args: argparse.Namespace) -> list[list[int]]:
    """Tokens of each turn of each conversation."""
    generator = torch.Generator().manual_seed(2)
    shares = torch.rand(args.conversations, args.turns, generator=generator) * 2 - 1
    return (args.turn_tokens * (1 + args.spread * shares)).round().long().tolist()


async def rate(
    loop: EngineLoop,
    args: argparse.Namespace,
    turns: Sequence[Sequence[int]],
    keeps: bool,
    num_read: int = 0,
) -> tuple[float, float]:
    """Sampled tokens of all conversations per second, and per CPU-second of this process."""
    generator = torch.Generator().manual_seed(1)
    size = (args.conversations, args.prompt_tokens)
    prompts = torch.randint(1, VOCABULARY, size, generator=generator).tolist()
    result = list(range(1, 1 + args.result_tokens))
    start, cpu_start = time.perf_counter(), time.process_time()
    sampled = await asyncio.gather(
        *(
            converse(loop, row, prompt, turns[row], args.tool_ms / 1000, result, keeps, num_read)
            for row, prompt in enumerate(prompts)
        )
    )
    total = sum(sampled)
    return total / (time.perf_counter() - start), total / (time.process_time() - cpu_start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=48)
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--result-tokens", type=int, default=16)
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = build_model(args.hidden_size, args.layers)
    many = turns_of(args)
    one = [[sum(turns)] for turns in many]
    ways = {
        "cache kept": (many, True, 0), "cache dropped": (many, False, 0),
        "one turn": (one, False, args.turns - 1), "and no results": (one, False, 0),
    }  # fmt: skip
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    cpu_ratios: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        rates = {}
        for name, way in ways.items():
            loop = EngineLoop(TorchEngine(model, version=0))
            try:
                rates[name] = asyncio.run(rate(loop, args, *way))
            finally:
                loop.close()
        for name, (per_second, per_cpu_second) in rates.items():
            ratios[name].append(per_second / rates["one turn"][0])
            cpu_ratios[name].append(per_cpu_second / rates["one turn"][1])
            print(
                f"round {number}: {name:<14} {per_second:8.0f} tokens/s, {per_cpu_second:8.0f} per "
                f"CPU-second; of one turn's {ratios[name][-1]:.3f} and {cpu_ratios[name][-1]:.3f}"
            )
    for name in ways:
        print(
            f"median {name:<14} {statistics.median(ratios[name]):.3f} of one turn's tokens/s, "
            f"{statistics.median(cpu_ratios[name]):.3f} per CPU-second"
        )


if __name__ == "__main__":
    main()
