"""Tokens per second of conversations with tools, against the same tokens in one turn without.

    python benchmarks/conversations.py --conversations 64 --turns 4 --tool-ms 50

A random Llama samples turns of a fixed length. "turns": between two of them a tool takes its time
and its result is appended. "one turn": as many tokens per conversation at once, from the same
prompt. Both run in turns on the same engine settings; a table has each round and the ratio.
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
) -> int:
    """One conversation: its turns' lengths are given; how many tokens it sampled."""
    token_ids, sampled = list(prompt), 0
    for turn, length in enumerate(turns):
        params = SamplingParams(pad_token_id=0, max_new_tokens=length)
        ended = await loop.complete_async(token_ids, params, row=row, turn=turn)
        token_ids += ended.token_ids
        sampled += ended.num_tokens
        if turn + 1 < len(turns):
            await asyncio.sleep(tool_s)
            token_ids += result
    return sampled


async def rate(loop: EngineLoop, args: argparse.Namespace, turns: Sequence[int]) -> float:
    """Sampled tokens per second of all conversations."""
    generator = torch.Generator().manual_seed(1)
    size = (args.conversations, args.prompt_tokens)
    prompts = torch.randint(1, VOCABULARY, size, generator=generator).tolist()
    result = list(range(1, 1 + args.result_tokens))
    start = time.perf_counter()
    sampled = await asyncio.gather(
        *(
            converse(loop, row, prompt, turns, args.tool_ms / 1000, result)
            for row, prompt in enumerate(prompts)
        )
    )
    return sum(sampled) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--result-tokens", type=int, default=16)
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = build_model(args.hidden_size, args.layers)
    ratios = []
    for number in range(args.rounds):
        rates = []
        for turns in ([args.turn_tokens] * args.turns, [args.turn_tokens * args.turns]):
            loop = EngineLoop(TorchEngine(model, version=0))
            try:
                rates.append(asyncio.run(rate(loop, args, turns)))
            finally:
                loop.close()
        ratios.append(rates[0] / rates[1])
        print(
            f"round {number}: {args.turns} turns {rates[0]:.0f} tokens/s, one turn "
            f"{rates[1]:.0f}, ratio {ratios[-1]:.3f}"
        )
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
