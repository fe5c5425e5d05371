"""Completions of tiny models, ours and those of transformers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rllib_llm.engines.engine import generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Completions, Ended, Noise, Row, uniform_noise
from rllib_llm.rollouts.policy import EnginePolicy, Generation
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny
from tests.modules.tiny_models import FAMILIES, VOCAB

PAD = 0
STOPS = tuple(range(2, 10))  # about a tenth of the vocabulary: rows end at different lengths
MODELS = {name: (name, {}) for name in FAMILIES} | {
    # A head of its own, since a tied one makes these models repeat a single token.
    "bloom (alibi)": ("bloom (alibi)", {"tie_word_embeddings": False}),
    "gemma2 (soft-cap)": ("gemma2 (soft-cap)", {"tie_word_embeddings": False}),
    # Windows shorter than prompt + completion, in some layers and in all.
    "gemma2 (window)": (
        "gemma2 (soft-cap)",
        {"tie_word_embeddings": False, "sliding_window": 6},
    ),
    "qwen2 (window)": (
        "qwen2 (tied)",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "llama (eager)": ("llama", {"attn_implementation": "eager"}),
}


def ragged_prompts(extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Five prompts of 9, 3, 5, 1 and 7 tokens, left-padded, `extra` columns more than needed."""
    torch.manual_seed(5)
    lengths = torch.tensor([9, 3, 5, 1, 7])
    mask = torch.arange(9 + extra) >= 9 + extra - lengths[:, None]
    ids = torch.randint(3, VOCAB, (5, 9)).masked_fill(~mask[:, extra:], PAD)
    return torch.cat([torch.full((5, extra), PAD), ids], dim=1), mask


def sampled(model, ids, mask, n=1, seed=1, looks=None, **settings) -> Completions:
    params = SamplingParams(pad_token_id=PAD, **{"max_new_tokens": 30, **settings})
    noise = uniform_noise(seed, range(len(ids) * n), params.max_new_tokens)
    return generate(
        model, ids, mask, params, num_completions=n, noise=noise, steps_between_looks=looks
    )


def _exact_scores(model, ids, mask, out, n, temperature=1.0):
    """Of each row: its number, its tokens, and the log-probs [tokens, vocab] of their places, by
    transformers' own layers in float64."""
    double = copy.deepcopy(model).double()
    for row, (tokens, said) in enumerate(zip(out.completion_ids, out.completion_mask, strict=True)):
        prompt, tokens = ids[row // n][mask[row // n]], tokens[said]
        with torch.no_grad():
            logits = double(input_ids=torch.cat([prompt, tokens])[None]).logits[0]
        yield row, tokens, (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def exact_logprobs(model, ids, mask, out, n=1, temperature=1.0) -> torch.Tensor:
    """Log-probs of a completion's tokens by transformers' own layers in float64, each row alone."""
    logprobs = torch.zeros_like(out.logprobs).double()
    for row, tokens, scores in _exact_scores(model, ids, mask, out, n, temperature):
        logprobs[row, out.completion_mask[row]] = scores.gather(1, tokens[:, None])[:, 0]
    return logprobs


def centred(noise, model, ids, mask, out, n=1) -> torch.Tensor:
    """Noise that draws the same tokens, each number in the middle of those that draw its token.

    A number that lies within round-off of the border between two tokens draws one or the other as
    products are cut: in some of a hundred thousand tokens. Here no round-off decides."""
    noise = noise.clone()
    for row, tokens, scores in _exact_scores(model, ids, mask, out, n):
        weights = scores.exp()
        middle = (weights.cumsum(-1) - weights / 2).gather(1, tokens[:, None])[:, 0]
        noise[row, : len(tokens)] = middle.to(noise.dtype)
    return noise


def greedy(model, ids, mask, n=1, looks=None, **settings) -> Completions:
    params = SamplingParams(
        pad_token_id=PAD, greedy=True, **{"max_new_tokens": 30, "stop_token_ids": STOPS} | settings
    )
    return generate(model, ids, mask, params, num_completions=n, steps_between_looks=looks)


def greedy_of_transformers(model, ids, mask, n=1, max_new_tokens=30, stops=STOPS, **settings):
    return model.generate(
        input_ids=ids.repeat_interleave(n, dim=0),
        attention_mask=mask.long().repeat_interleave(n, dim=0),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stops) or None,
        pad_token_id=PAD,
        **settings,
    )[:, ids.shape[1] :]


def seeded(architecture: str, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(architecture, pad_token_id=PAD, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


def sampled_by(
    engine: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    params: SamplingParams,
    *,
    num_completions: int,
    noises: list[Noise],
) -> Completions:
    """What a sampler gets from an engine; all noises are of one seed."""
    prompts = {columns.PROMPT_IDS: ids, columns.PROMPT_MASK: mask}
    (seed,) = {noise.seed for noise in noises}
    asked = Generation(params, num_completions, seed, torch.tensor([n.row for n in noises]))
    made = EnginePolicy(engine, tiny.MODEL).generate(prompts, asked)
    names = (columns.COMPLETION_IDS, columns.COMPLETION_MASK, columns.SAMPLER_LOGPROBS)
    return Completions(*[made[name] for name in (*names, columns.FINISHED)])


def continued(row: Row, ended: Ended) -> Row:
    """The row to add, here or in another engine, to go on where `ended`, an aborted one, ended."""
    return replace(
        row, token_ids=[*row.token_ids, *ended.token_ids],
        num_sampled=row.num_sampled + ended.num_tokens, on_tokens=None,
    )  # fmt: skip
