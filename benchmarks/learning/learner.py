"""Forward and backward of one policy-gradient mini-batch beside TRL's: CPU seconds and peak memory.

    python -m benchmarks.learning.learner --peer_python /venv/with/trl/bin/python --rounds 3

24 completions (3 prompts x 8) of mixed length, Llama of 4 layers of 512, vocabulary 32 000, GRPO's
loss with entropies. The same random weights and batch on each side, each in processes of its own,
in turn:

    ours    `score_completions` and `policy_loss`: no padding, prompts once, head where needed
    compiled  as ours, the layers by `torch.compile` (what RLlib's `torch_compile_learner` does)
    padded  the same on right-padded rows, as models get them whose attention cannot be laid out
    trl     GRPOTrainer._compute_loss
    trl_bf16  the same with `bf16=True`, for `--precision bf16` alone, in which ours are the float32
            weights' bfloat16 copy (`mixed_precision`)

One JSON line each, then the ratios of TRL's medians to ours, of the better of its precisions. The
run ends with an error where losses and gradient norms do not agree.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PAD, BOS, EOS = 0, 1, 2
NUM_PROMPTS, GROUP, PROMPT_LEN, COMPLETION_LEN = 3, 8, 32, 64
Batch = dict[str, torch.Tensor]
# Largest relative difference of loss and gradient norm: round-off, and that of eight bits.
AGREE = {"float32": 1e-4, "bf16": 0.03}


def build_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.hidden,
            intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64,
            num_key_value_heads=args.hidden // 64,
            max_position_embeddings=512,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    )


def build_batch(vocab: int) -> Batch:
    """Prompts of 16 to 32 tokens, completions of 8 to 64, rows of a group adjacent."""
    generator = torch.Generator().manual_seed(1)
    rows = NUM_PROMPTS * GROUP
    prompts = torch.randint(3, vocab, (NUM_PROMPTS, PROMPT_LEN), generator=generator)
    prompt_lengths = torch.linspace(PROMPT_LEN // 2, PROMPT_LEN, NUM_PROMPTS).long()
    prompt_mask = torch.arange(PROMPT_LEN) >= PROMPT_LEN - prompt_lengths.unsqueeze(1)
    lengths = torch.linspace(8, COMPLETION_LEN, rows).long()
    lengths = lengths[torch.randperm(rows, generator=generator)]
    mask = torch.arange(COMPLETION_LEN) < lengths.unsqueeze(1)
    ids = torch.randint(3, vocab, mask.shape, generator=generator)
    return {
        "prompt_ids": prompts.where(prompt_mask, PAD).repeat_interleave(GROUP, 0),
        "prompt_mask": prompt_mask.repeat_interleave(GROUP, 0),
        "completion_ids": ids.where(mask, PAD),
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=generator),
    }


def our_loss(args: argparse.Namespace) -> tuple[LlamaForCausalLM, Callable[[Batch], torch.Tensor]]:
    from rllib_llm.modules.logprobs import score_completions
    from rllib_llm.modules.precision import ComputingCopy
    from rllib_llm.numerics.losses import LossDenominators, policy_loss, reduce_loss

    weights = model = build_model(args).eval()
    if args.precision == "bf16":
        model = ComputingCopy(weights, torch.bfloat16).model.eval()
    if args.side == "padded":
        model.set_attn_implementation("eager")  # of which no layout is known
    if args.side == "compiled":
        for layer in model.model.layers:
            layer.compile()

    def loss(batch: Batch) -> torch.Tensor:
        mask = batch["completion_mask"]
        columns = (batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids"))
        outputs = score_completions(model, *columns, mask, entropy=True)
        policy = policy_loss(
            outputs.logprobs,
            outputs.logprobs.detach(),
            batch["advantages"].unsqueeze(1) * mask,
            mask,
            kind="ppo",
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=None,
            weights=None,
        )
        denominators = LossDenominators.count(mask, COMPLETION_LEN)
        return reduce_loss(policy.per_token, mask, "sequence_mean", denominators)

    return weights, loss


def their_loss(
    args: argparse.Namespace, folder: str
) -> tuple[LlamaForCausalLM, Callable[[Batch], torch.Tensor]]:
    """TRL's trainer around the same model; it needs a tokenizer, prompts and a reward to start."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "a": 3}, "a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    model = build_model(args)
    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=args.side == "trl_bf16", report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=NUM_PROMPTS * GROUP, num_generations=GROUP, beta=0.0,
        loss_type="grpo", max_completion_length=COMPLETION_LEN, num_iterations=2,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        args=settings,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    wrapped = trainer.accelerator.prepare_model(model)  # its forward pass in autocast

    def loss(batch: Batch) -> torch.Tensor:
        inputs = {name: column.long() for name, column in batch.items() if name != "advantages"}
        return trainer._compute_loss(wrapped, {**inputs, "advantages": batch["advantages"]})

    return model, loss


def run_side(args: argparse.Namespace) -> dict[str, object]:
    """Medians over the passes after the first, in this process."""
    torch.set_num_threads(1)
    batch = build_batch(args.vocab)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        model, loss_of = their_loss(args, folder) if args.side.startswith("trl") else our_loss(args)
        for _ in range(args.passes + 1):
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            loss = loss_of(batch)
            loss.backward()
            seconds.append(time.process_time() - start)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return {
        "side": args.side,
        "cpu_s": round(statistics.median(seconds[1:]), 3),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "loss": round(float(loss.detach()), 6),
        "gradient_norm": round(float(norm), 5),
    }


def check_agreement(results: dict[str, list[dict]], precision: str) -> None:
    """Raises AssertionError where a side's loss or gradient is not that of our first."""
    first = results["ours"][0]
    for side, rounds in results.items():
        within = AGREE["bf16" if "bf16" in (precision, side[-4:]) else "float32"]
        for name in ("loss", "gradient_norm"):
            off = abs(rounds[0][name] / first[name] - 1)
            assert off <= within, f"{name} of {side} is off by {off:.2g}, more than {within}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer_python", help="interpreter with TRL; without it: ours alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--precision", choices=AGREE, default="float32", help="of ours")
    sides = ("ours", "compiled", "padded", "trl", "trl_bf16")
    parser.add_argument("--sides", nargs="+", choices=sides, default=list(sides))
    parser.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(run_side(args)))
        return
    # TRL's interpreter has neither.
    from benchmarks.common import last_json_line
    from rllib_llm.shared.process import multiplies_bfloat16

    if args.precision == "bf16" and not multiplies_bfloat16():
        print("skipped: the processor has neither AMX nor AVX512-BF16")
        return
    results: dict[str, list[dict]] = {side: [] for side in sides if _is_run(side, args)}
    names = ("passes", "hidden", "layers", "vocab", "precision")
    given = [f"--{name}={getattr(args, name)}" for name in names]
    for _ in range(args.rounds):
        for side, rounds in results.items():
            python = args.peer_python if side.startswith("trl") else sys.executable
            command = [python, __file__, "--side", side, *given]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            rounds.append(last_json_line(command, environ))
            print(json.dumps(rounds[-1]), flush=True)
    check_agreement(results, args.precision)
    _print_ratios(results)


def _is_run(side: str, args: argparse.Namespace) -> bool:
    if side not in args.sides or (side.startswith("trl") and not args.peer_python):
        return False
    return side != "trl_bf16" or args.precision == "bf16"


def _print_ratios(results: dict[str, list[dict]]) -> None:
    """TRL's medians over ours, of its better precision."""
    line = {}
    for name in ("cpu_s", "peak_rss_mb"):
        medians = {s: statistics.median(r[name] for r in rounds) for s, rounds in results.items()}
        theirs = [median for side, median in medians.items() if side.startswith("trl")]
        if theirs:
            line[f"ratio_{name}"] = round(min(theirs) / medians["ours"], 2)
    if line:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
