"""Iterations of a model that people know beside TRL's: CPU and wall seconds, and peak memory.

    python -m benchmarks.loop.real_model --model SMOLLM2 --peer_python /venv/with/trl/bin/python \\
        --peer_ppo_path /folder/with/trl/1.12 --rounds 3

`--model` is a folder of SmolLM2-135M-Instruct, or of another chat model. Each side runs in a
process of its own, with one thread, in turn, `--rounds` times; a process takes `--steps` iterations
and reports the median without the first. The data are word problems; lengths, batches, learning
rates and optimisers are the same on both sides, and each side is otherwise as its defaults are.

    grpo      8 prompts x 8 completions of at most 24 tokens, one epoch, no KL
    rloo      the same with KL to a reference (β 0.05, TRL's default)
    ppo       16 completions, reference, reward model and critic of the same size; TRL 1.12 has the
              last PPO. `ours_one_trunk`: policy and critic share theirs
    dpo       16 pairs, with a reference
    sft       32 questions with their answers

`--precision bf16` has ours compute so and runs TRL in both precisions. One JSON line a process,
then one for each case: medians over the rounds, and TRL's better precision over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = {"grpo": 64, "rloo": 64, "ppo": 16, "dpo": 16, "sft": 32}  # of an iteration
GROUP, NEW_TOKENS, MAX_LENGTH = 8, 24, 128
BETAS = {"grpo": 0.0, "rloo": 0.05, "ppo": 0.05, "dpo": 0.1}
LR = 5e-6
NAMES = ("Tom", "Ana", "Li", "Sam", "Mia", "Ben")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells")


def problems(count: int = 1200) -> list[dict[str, str]]:
    """Questions with their answers, and wrong ones, from a fixed seed."""
    draw, rows = random.Random(0), []
    for _ in range(count):
        name, things = draw.choice(NAMES), draw.choice(THINGS)
        a, b = draw.randint(6, 30), draw.randint(2, 6)
        text, answer = draw.choice((
            (f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
             a + b),
            (f"{name} had {a} {things} and gave {b} away. How many {things} are left?", a - b),
            (f"{name} has {b} boxes with {a} {things} each. How many {things} are there?", a * b),
        ))  # fmt: skip
        rows.append({
            "question": f"{text} Answer with the number only.", "answer": str(answer),
            "chosen": f"There are {answer} {things}.",
            "rejected": f"{answer + 10} {things}, I think.",
        })  # fmt: skip
    return rows


def chat(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last number is the answer."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    found = [re.findall(r"-?\d+", text)[-1:] for text in texts]
    return [float(numbers == [right]) for numbers, right in zip(found, answer, strict=True)]


def brief(completions: list[Any], **columns: Any) -> list[float]:
    """The share of words that are numbers; 1: nothing but the number, as was asked."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    words = [text.split() or ["-"] for text in texts]
    return [sum(word.strip(".,").isdigit() for word in each) / len(each) for each in words]


REWARDS = {"correct": correct, "brief": brief}


def data(case: str) -> list[dict[str, Any]]:
    """Rows as both sides read them."""
    kept = {"dpo": ("chosen", "rejected"), "sft": ("chosen",)}.get(case, ())
    names = {"chosen": "completion"} if case == "sft" else {}
    return [
        {"prompt": chat("user", row["question"])}
        | {names.get(name, name): chat("assistant", row[name]) for name in kept}
        | ({} if kept else {"answer": row["answer"]})
        for row in problems()
    ]


# --- ours ---------------------------------------------------------------------------------------


def our_config(args: argparse.Namespace) -> Any:
    from rllib_llm import DPOConfig, GRPOConfig, PPOPtxConfig, RLOOConfig, SFTConfig

    case, rows = args.case, args.rows or ROWS[args.case]
    settings: dict[str, Any] = {
        "model": args.model, "lr": args.lr, "train_batch_size_per_learner": rows,
        "minibatch_size": rows, "seed": args.seed,
    }  # fmt: skip
    if args.precision == "bf16":
        settings["mixed_precision"] = "bf16"
    if case in ("dpo", "sft"):
        settings |= {"data": data(case), "max_length": MAX_LENGTH}
        if case == "dpo":
            settings["ref_kl_coeff"] = BETAS[case]
        return {"dpo": DPOConfig, "sft": SFTConfig}[case]().update_from_dict(settings)
    env_config: dict[str, Any] = {
        "prompts": data(case), "max_prompt_len": 96, "max_completion_len": NEW_TOKENS,
        "reward_functions": [{"function": REWARDS[args.reward], "name": "reward"}],
    }  # fmt: skip
    settings |= {
        "env": "rllib_llm/RLHF-v0", "env_config": env_config, "max_new_tokens": NEW_TOKENS,
        "num_completions": 1 if case == "ppo" else GROUP, "num_epochs": 1,
        "ref_kl_coeff": BETAS[case], "log_samples_every": 0,
    }  # fmt: skip
    if case == "ppo":
        env_config["reward_model"] = {"model": args.judge, "normalize": False}
        env_config["reward_functions"][0]["weight"] = 0.0
        one_trunk = args.side == "ours_one_trunk"
        settings["critic"] = "shared" if one_trunk else "separate"
        if not one_trunk:
            settings["critic_model"] = args.judge
    config = {"grpo": GRPOConfig, "rloo": RLOOConfig, "ppo": PPOPtxConfig}[case]()
    return config.update_from_dict(settings)


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    import ray
    import torch

    if "RAY_ADDRESS" not in os.environ:
        ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=2**27)
    torch.set_num_threads(1)
    algorithm = our_config(args).build_algo()
    seconds, results = [], []
    for _ in range(args.steps):
        start = time.perf_counter(), time.process_time()
        results.append(algorithm.train().get("train", {}))
        seconds.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    algorithm.stop()
    return {
        "seconds": seconds, "version": "rllib_llm",
        "mean_length": results[-1].get("output_length"),
        "rewards": [each["reward_rewards"] for each in results if "reward_rewards" in each],
    }  # fmt: skip


# --- TRL ----------------------------------------------------------------------------------------


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    """GRPO, RLOO, DPO and SFT: the time between a step's begin and its end, sampling included."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback

    seconds: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, cpu = self.start
            seconds.append((time.perf_counter() - wall, time.process_time() - cpu))

    case = args.case
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": args.rows or ROWS[case],
        "learning_rate": args.lr, "bf16": args.side == "trl_bf16", "use_cpu": True,
        "max_steps": args.steps, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "seed": args.seed,
        "disable_tqdm": True,
    }  # fmt: skip
    if case in ("grpo", "rloo"):
        settings |= {"num_generations": GROUP, "max_completion_length": NEW_TOKENS}
        settings |= {"temperature": 1.0, "beta": BETAS[case]}
    else:
        settings["max_length"] = MAX_LENGTH
    if case == "dpo":
        settings["beta"] = BETAS[case]
    kind = case.upper()
    rewards = {"reward_funcs": REWARDS[args.reward]} if case in ("grpo", "rloo") else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=Dataset.from_list(data(case)), callbacks=[Clock()], **rewards,
    )  # fmt: skip
    trainer.train()
    logged = [each for each in trainer.state.log_history if "reward" in each]
    return {
        "seconds": seconds, "version": f"trl {trl.__version__}",
        "mean_length": logged[-1]["completions/mean_length"] if logged else None,
        "rewards": [each["reward"] for each in logged],
    }  # fmt: skip


def run_trl_ppo(args: argparse.Namespace) -> dict[str, Any]:
    """PPO: the time between two batches of completions."""
    sys.path.insert(0, args.peer_ppo_path)
    import torch
    import trl
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    ids = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True,
                                      return_dict=False)
        for row in data("ppo")
    ]  # fmt: skip
    rows = Dataset.from_dict({"input_ids": ids})
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) for _ in range(2)
    )
    judge, critic = (
        AutoModelForSequenceClassification.from_pretrained(args.judge, dtype=torch.float32)
        for _ in range(2)
    )
    batch = args.rows or ROWS["ppo"]
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=args.side == "trl_bf16", fp16=False,
        gradient_checkpointing=False, report_to=[], logging_steps=10**6, save_strategy="no",
        disable_tqdm=True, seed=args.seed, learning_rate=args.lr, lr_scheduler_type="constant",
        per_device_train_batch_size=batch, gradient_accumulation_steps=1, num_mini_batches=1,
        num_ppo_epochs=1, total_episodes=args.steps * batch, local_rollout_forward_batch_size=batch,
        response_length=NEW_TOKENS, temperature=1.0, stop_token="eos", kl_coef=BETAS["ppo"],
        num_sample_generations=0, missing_eos_penalty=None, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = PPOTrainer(
        args=config, processing_class=tokenizer, model=policy, ref_model=reference,
        reward_model=judge, value_model=critic, train_dataset=rows, eval_dataset=rows.select([0]),
    )  # fmt: skip
    stamps: list[tuple[float, float]] = []
    generate = ppo_trainer.batch_generation

    def batch_generation(*given: Any, **named: Any) -> Any:
        stamps.append((time.perf_counter(), time.process_time()))
        return generate(*given, **named)

    ppo_trainer.batch_generation = batch_generation
    trainer.train()
    stamps.append((time.perf_counter(), time.process_time()))
    seconds = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(stamps, stamps[1:], strict=False)]
    version = f"trl {trl.__version__}"
    return {"seconds": seconds, "version": version, "mean_length": None, "rewards": []}


# --- both ---------------------------------------------------------------------------------------


def write_judge(model: str, folder: str) -> None:
    """A reward model: the policy's trunk with a random head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    judge.config.pad_token_id = tokenizer.pad_token_id
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_side(args: argparse.Namespace) -> dict[str, Any]:
    runner = run_ours if args.side.startswith("ours") else run_trl
    if args.case == "ppo" and runner is run_trl:
        runner = run_trl_ppo
    found = runner(args)
    counted = found["seconds"][1:] or found["seconds"]
    wall, cpu = (statistics.median(step[k] for step in counted) for k in (0, 1))
    return {
        "case": args.case, "side": args.side, "version": found["version"],
        "wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "mean_length": found["mean_length"],
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "rewards": [round(reward, 3) for reward in found["rewards"]],
    }  # fmt: skip


def compare(case: str, args: argparse.Namespace, judge: str) -> dict[str, Any]:
    from benchmarks.common import last_json_line  # TRL's process has no such module

    sides = ["ours", *(["ours_one_trunk"] if case == "ppo" else [])]
    if args.peer_python and (case != "ppo" or args.peer_ppo_path):
        sides += ["trl_float32", *(["trl_bf16"] if args.precision == "bf16" else [])]
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for seed in range(args.rounds):
        for side, lines in rounds.items():
            python = args.peer_python if side.startswith("trl") else sys.executable
            given = ["--case", case, "--side", side, "--judge", judge, "--seed", str(seed)]
            for name in ("model", "steps", "rows", "lr", "reward", "precision", "peer_ppo_path"):
                if (value := getattr(args, name)) is not None:
                    given += [f"--{name}", str(value)]
            lines.append(last_json_line([python, __file__, *given], environ))
            print(json.dumps(lines[-1]), flush=True)
    figures = ("cpu_s", "wall_s", "peak_rss_mb")
    medians = {
        side: {name: statistics.median(line[name] for line in lines) for name in figures}
        for side, lines in rounds.items()
    }
    found: dict[str, Any] = {"case": case, "precision": args.precision, **medians}
    if theirs := [m for side, m in medians.items() if side.startswith("trl")]:
        for side in (side for side in sides if side.startswith("ours")):
            found[f"ratios of {side}"] = {
                name: round(min(their[name] for their in theirs) / medians[side][name], 2)
                for name in figures
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--peer_python", help="interpreter with TRL; without it: ours alone")
    parser.add_argument("--peer_ppo_path", help="folder with TRL 1.12, whose PPO is the last")
    parser.add_argument("--cases", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", type=int, help="of an iteration; default: those of the case")
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--reward", choices=REWARDS, default="correct")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    for hidden in ("--side", "--case", "--judge"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        print(json.dumps(run_side(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        judge = Path(folder) / "judge"
        if "ppo" in args.cases:
            write_judge(args.model, str(judge))
        for case in args.cases:
            print(json.dumps(compare(case, args, str(judge))), flush=True)


if __name__ == "__main__":
    main()
