"""What several benchmarks share: random models and prompts, a run of fixed lengths, a stopwatch."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from rllib_llm import GRPOConfig

PAD, STOP = 0, 2
PROMPT_LEN = 16  # of runs whose completions all have full length


@dataclass(frozen=True)
class Case:
    """A model and a batch; `mean_len` tokens is the mean completion where a stop token ends it, and
    the first `short` prompts have `short_len` tokens."""

    hidden: int
    layers: int
    vocab: int
    groups: int = 8
    num_completions: int = 8
    prompt_len: int = 32
    completion_len: int = 64
    mean_len: int | None = None
    ragged: bool = False
    key_value_heads: int | None = None
    max_rows: int | None = None
    short: int = 0
    short_len: int = 16
    intermediate: int | None = None
    tied: bool = False


CASES = {
    "5m_full": Case(256, 4, 2048),
    "5m_mixed": Case(256, 4, 2048, mean_len=21),
    "5m_ragged": Case(256, 4, 2048, mean_len=21, ragged=True),
    "5m_gqa": Case(256, 4, 2048, key_value_heads=2),
    "5m_places": Case(256, 4, 2048, groups=32, mean_len=21, max_rows=64),
    "5m_unlike": Case(256, 4, 2048, groups=52, num_completions=1, prompt_len=1500, short=48),
    "80m_full": Case(768, 6, 16384, groups=4, completion_len=32),
    "80m_mixed": Case(768, 6, 16384, groups=4, mean_len=21),
    # The shape of SmolLM2-135M.
    "135m_full": Case(
        576, 30, 49_152, key_value_heads=3, intermediate=1536, tied=True, prompt_len=64,
        completion_len=32,
    ),
    "500m_full": Case(
        896, 24, 151_936, groups=32, prompt_len=128, completion_len=256, key_value_heads=2
    ),
    "500m_mixed": Case(
        896, 24, 151_936, groups=32, prompt_len=128, completion_len=256, key_value_heads=2,
        mean_len=85, ragged=True,
    ),
}  # fmt: skip


def build_model(case: Case, device: str, dtype: torch.dtype) -> nn.Module:
    """A random Llama; with `mean_len`, its stop token always has the probability 1 / mean_len."""
    torch.manual_seed(0)
    heads = case.hidden // 64
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate or 4 * case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=heads,
        num_key_value_heads=case.key_value_heads or heads,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=STOP,
        tie_word_embeddings=case.tied,
    )
    model = LlamaForCausalLM(config)
    if case.mean_len is not None:
        bias = torch.zeros(case.vocab)
        bias[STOP] = math.log(case.vocab / (case.mean_len - 1))
        model.lm_head.bias = nn.Parameter(bias)
    return model.to(device=device, dtype=dtype).eval()


def build_prompts(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts and their mask [groups, prompt_len], left-padded where `ragged` or short."""
    generator = torch.Generator().manual_seed(1)
    shape = (case.groups, case.prompt_len)
    ids = torch.randint(3, case.vocab, shape, generator=generator)
    mask = torch.ones(shape, dtype=torch.bool)
    if case.ragged:
        lengths = torch.linspace(case.prompt_len // 2, case.prompt_len, case.groups).long()
        mask = torch.arange(case.prompt_len) >= case.prompt_len - lengths[:, None]
    mask[: case.short, : case.prompt_len - case.short_len] = False
    return ids.masked_fill(~mask, PAD).to(device), mask.to(device)


def judge(completions: list[str], **columns) -> list[float]:
    """A number that depends on the text, at no price."""
    return [float(len(text) % 7) for text in completions]


def full_length(config: GRPOConfig, num_rows: int, num_tokens: int) -> GRPOConfig:
    """`config` with a small Llama, `num_rows` completions of `num_tokens` tokens each.

    It measures a framework's cost, without luck in the lengths.
    """
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


class Stopwatch:
    """Own time of each span, [wall seconds, CPU seconds of all threads], since the last `take`.

    A span inside another takes its time from the outer one: all spans add up to the outermost.
    """

    def __init__(self) -> None:
        self._totals: dict[str, list[float]] = {}
        self._inner: list[list[float]] = []  # of each open span, the time of spans inside it

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self._inner.append([0.0, 0.0])
        started = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = time.perf_counter() - started[0], time.process_time() - started[1]
            inner = self._inner.pop()
            total = self._totals.setdefault(name, [0.0, 0.0])
            for k in (0, 1):
                total[k] += spent[k] - inner[k]
                if self._inner:
                    self._inner[-1][k] += spent[k]

    def take(self) -> dict[str, list[float]]:
        """All totals, which start at zero again."""
        totals, self._totals = self._totals, {}
        return totals

    def timed(self, function: Callable, name: str) -> Callable:
        """`function` as the span `name`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return function(*args, **kwargs)

        return call

    def timed_class(self, cls: type, spans: dict[str, str]) -> type:
        """A subclass of `cls` with timed methods: method name -> span."""

        def override(method: str, name: str) -> Callable:
            def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
                with self.span(name):
                    return getattr(cls, method)(instance, *args, **kwargs)

            return call

        return type(cls.__name__, (cls,), {m: override(m, name) for m, name in spans.items()})

    def timed_runner(self, cls: type) -> type:
        """A sampler class with the spans "generate" and "judge", and "sampler, rest"."""
        watch = self

        class TimedRunner(cls):  # type: ignore[misc, valid-type]
            def make_env(self) -> None:
                super().make_env()
                self.env.step = watch.timed(self.env.step, "judge")

            def _make_policy(self) -> Any:
                policy = super()._make_policy()
                policy.generate = watch.timed(policy.generate, "generate")
                return policy

            def _make_parts(self) -> None:
                super()._make_parts()
                for name in ("generate", "judge"):
                    call = watch.timed(getattr(self.sampler, name), "sampler, rest")
                    setattr(self.sampler, name, call)

        return TimedRunner


def add(*spans: list[float]) -> list[float]:
    """The sum of [wall, CPU] pairs."""
    return [sum(span[k] for span in spans) for k in (0, 1)]


def last_json_line(command: list[str], environ: dict[str, str]) -> dict[str, Any]:
    """The JSON that a process prints last; its words as a RuntimeError where it failed."""
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])
