"""GRPO whose completions all have full length: a framework's cost without luck in the lengths."""

from __future__ import annotations

from rllib_llm import GRPOConfig

PROMPT_LEN = 16


def judge(completions: list[str], **columns) -> list[float]:
    """A number that depends on the text, at no price."""
    return [float(len(text) % 7) for text in completions]


def full_length(config: GRPOConfig, num_rows: int, num_tokens: int) -> GRPOConfig:
    """`config` with a small Llama, `num_rows` completions of `num_tokens` tokens an iteration."""
    prompts = [{"prompt": "the food was " + "very " * (i % 5) + "good"} for i in range(64)]
    return (
        config.language_model(model="rllib_llm.examples.reviews_model.build_model")
        .environment(
            "rllib_llm/RLHF-v0",
            env_config={
                "prompts": prompts,
                "reward_functions": [{"function": judge, "name": "length"}],
                "max_prompt_len": PROMPT_LEN,
                "max_completion_len": num_tokens,
            },
        )
        .sampling(num_completions=8, max_new_tokens=num_tokens, min_new_tokens=num_tokens)
        .training(train_batch_size_per_learner=num_rows, ref_kl_coeff=0.0)
    )
