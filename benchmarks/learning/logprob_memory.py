"""Peak memory and time of one forward and backward pass over the log-probs of many tokens.

    python -m benchmarks.learning.logprob_memory [--tokens 2048] [--vocab 151936] [--hidden 896]

Three ways over the same head: autograd's plain log_softmax and gather, ours in one piece, ours in
chunks (the default). Each runs in a process of its own; memory is the peak resident set above what
was there before the pass (on CUDA: peak allocated).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time

import torch

from rllib_llm.numerics.token_stats import in_chunks, token_stats

CHUNK_LOGITS = 2**26  # what score_completions chooses by itself


def plain(head, states, targets):
    logits = head(states).float()
    all_logprobs = logits.log_softmax(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


def ours(head, states, targets, chunk_tokens):
    def stats_of(states, targets):
        return token_stats(head(states), targets, entropy=True)

    return in_chunks(stats_of, (states, targets), chunk_tokens)


def measure(way: str, tokens: int, vocab: int, hidden: int, device: str, results) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, vocab, bias=False, device=device)
    head.weight.grad = torch.zeros_like(head.weight)
    states = torch.randn(tokens, hidden, device=device, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=device)
    before = peak_memory(device)
    started = time.process_time()
    if way == "plain":
        logprobs, entropy = plain(head, states, targets)
    else:
        chunk_tokens = tokens if way == "ours, one piece" else max(1, CHUNK_LOGITS // vocab)
        logprobs, entropy = ours(head, states, targets, chunk_tokens)
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.process_time() - started
    results.put((way, peak_memory(device) - before, seconds, logprobs.sum().item()))


def peak_memory(device: str) -> float:
    """GiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = multiprocessing.get_context("spawn")
    one_copy = arguments.tokens * arguments.vocab * 4 / 2**30
    print(f"{device}, {arguments}; float32 logits: {one_copy:.2f} GiB")
    for way in ("plain", "ours, one piece", "ours, chunked"):
        results = context.SimpleQueue()
        process = context.Process(
            target=measure,
            args=(way, arguments.tokens, arguments.vocab, arguments.hidden, device, results),
        )
        process.start()
        process.join()
        name, gib, seconds, checksum = results.get()
        print(f"{name:16} {gib:6.2f} GiB {seconds:7.2f} s   sum of log-probs {checksum:.2f}")


if __name__ == "__main__":
    main()
