"""A frozen judge in fewer bits beside float32: CPU-seconds and bytes, turn by turn in one process.

    python -m benchmarks.sampling.judge --rounds 5

A random classifier of 12 layers of 768 with a vocabulary of 49 152 (135 million parameters) scores
`--rows` texts of `--length` tokens, on one thread. One JSON line: of each form bytes, the median
seconds, the ratio of float32 to it, and how its scores rank against the float32 ones. Skipped
where the processor has neither AMX nor AVX512-BF16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from rllib_llm.modules.quantization import model_bytes, quantize
from rllib_llm.modules.sequence_scores import sequence_scores
from rllib_llm.shared.process import multiplies_bfloat16

FORMS = ("none", "bf16", "int8")


def build_judge(form: str, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=768, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=12, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval().requires_grad_(False)
    return quantize(model, form)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    return scores.argsort().argsort().float()


def compare(rows: int, length: int, layers: int, rounds: int) -> dict[str, Any]:
    """Medians over the rounds after the first."""
    models = {form: build_judge(form, layers) for form in FORMS}
    ids = torch.randint(3, 49_000, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    scores = {}
    for _ in range(rounds + 1):
        for form, model in models.items():
            start = time.process_time()
            with torch.no_grad():
                scores[form] = sequence_scores(model, ids, mask)
            seconds[form].append(time.process_time() - start)
    line: dict[str, Any] = {"rows": rows, "length": length}
    exact = models["none"]
    for form, model in models.items():
        ratios = [a / b for a, b in zip(seconds["none"][1:], seconds[form][1:], strict=True)]
        both = torch.stack([ranks(scores["none"]), ranks(scores[form])])
        line[form] = {
            "cpu_s": round(statistics.median(seconds[form][1:]), 3),
            "ratio_cpu": round(statistics.median(ratios), 2),
            "megabytes": round(model_bytes(model) / 1e6),
            "share_of_bytes": round(model_bytes(model) / model_bytes(exact), 2),
            "rank_correlation": round(float(torch.corrcoef(both)[0, 1]), 4),
        }
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=96, help="tokens of a text")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not multiplies_bfloat16():
        print("skipped: the processor has neither AMX nor AVX512-BF16")
        return
    torch.set_num_threads(1)
    print(json.dumps(compare(args.rows, args.length, args.layers, args.rounds)))


if __name__ == "__main__":
    main()
