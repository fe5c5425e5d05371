"""Settings of a completion in vLLM's terms, and those that it cannot serve."""

from __future__ import annotations

from typing import Any

from rllib_llm.engines.params import SamplingParams

NO_WEIGHTS = (
    "weights=None must be loaded before engine='vllm' generates: it was given none, and would "
    "sample from random ones. Load the policy's weights first."
)


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


def check_params(temperature: float, top_k: int, top_p: float, min_new_tokens: int) -> None:
    """Raises ValueError where vLLM cannot give log_softmax(logits / temperature).

    It gives log-probs before the temperature, or after temperature and all truncation.
    """
    truncates = {"top_k": (top_k, 0), "top_p": (top_p, 1.0), "min_new_tokens": (min_new_tokens, 0)}
    for name, (value, off) in truncates.items():
        if temperature != 1 and value != off:
            raise ValueError(
                f"{name}={value!r} must be {off!r} with engine='vllm' and "
                f"temperature={temperature!r}: vLLM gives log-probs either before the temperature "
                "or after truncation, and the loss needs neither. Use temperature=1, or "
                "engine='torch'."
            )
