"""Writes the table of what models cost on 1 to 512 GPUs, on paper, into the pages that show it.

    python scripts/scale.py

The model is in docs/explanations/scale.md. Nothing here is measured; that page gives the constants'
sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = (DOCS / "explanations" / "scale.md", DOCS / "guides" / "cluster.md")
BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"


@dataclass(frozen=True)
class Gpu:
    """Peak of one: bytes/s of its memory, bfloat16 FLOP/s without sparsity, bytes; bytes/s of its
    node's network; and the seconds of an iteration that neither sample nor learn."""

    bandwidth: float = 3.35e12
    flops: float = 989e12
    memory: float = 80e9
    link: float = 50e9
    rest_s: float = 0.0
    memory_share: float = 0.6  # of the bandwidth that decoding reaches
    flops_share: float = 0.4  # of the FLOP/s that training reaches


@dataclass(frozen=True)
class Model:
    """A transformer: parameters, layers, width of keys (values have as much), bytes of a number."""

    name: str
    params: float
    layers: int
    kv_width: int
    number_bytes: int = 2

    @property
    def weight_bytes(self) -> float:
        return self.number_bytes * self.params

    @property
    def cache_bytes(self) -> float:
        """Of one token."""
        return 2 * self.number_bytes * self.layers * self.kv_width


@dataclass(frozen=True)
class Job:
    """An update: prompts, completions of each, tokens of a prompt and of a completion (mean), and
    whether the learner passes a prompt once for all of its group, which flash attention does not.
    """

    prompts: int = 128
    group: int = 8
    prompt: int = 256
    completion: int = 1024
    shares_prompts: bool = False

    @property
    def rows(self) -> int:
        return self.prompts * self.group

    @property
    def tokens(self) -> int:
        """That the learner passes through the model."""
        num_prompts = self.prompts if self.shares_prompts else self.rows
        return num_prompts * self.prompt + self.rows * self.completion


H100 = Gpu()
MODELS = (
    Model("0.5 B", 0.49e9, 24, 128),
    Model("8 B", 8.0e9, 32, 1024),
    Model("70 B", 70.6e9, 80, 1024),
)
GPUS = (1, 8, 64, 512)
STATE_BYTES = 16.0  # a parameter's float32 master, gradient and two moments
NODE = 8


def sampler_gpus(model: Model, gpu: Gpu) -> int:
    """That one copy of a sampler needs: weights, and as much again for caches, in powers of two."""
    return 2 ** max(0, math.ceil(math.log2(2 * model.weight_bytes / gpu.memory)))


def learner_gpus(model: Model, gpu: Gpu) -> int:
    """That hold the sharded state of training, with a fifth left for activations."""
    return math.ceil((STATE_BYTES + 2) * model.params / (0.8 * gpu.memory))


def sampling_s(model: Model, job: Job, gpu: Gpu, num: int) -> float:
    """Seconds in which `num` GPUs sample an update: a step reads the weights once for all rows of a
    copy, and each row's cache; or is as slow as its products."""
    per_copy = sampler_gpus(model, gpu)
    copies = max(1, num // per_copy)
    rows = math.ceil(job.rows / copies)
    context = job.prompt + job.completion / 2
    read = (model.weight_bytes + rows * context * model.cache_bytes) / per_copy
    step = max(
        read / (gpu.memory_share * gpu.bandwidth),
        2 * model.params * rows / per_copy / (gpu.flops_share * gpu.flops),
    )
    return job.completion * step


def learning_s(model: Model, job: Job, gpu: Gpu, num: int) -> float:
    """Seconds of an update on `num` GPUs: forward and backward (6 FLOPs a parameter and token), and
    the reference's pass (2)."""
    return 8 * model.params * job.tokens / (num * gpu.flops_share * gpu.flops)


def weights_s(model: Model, gpu: Gpu, num: int) -> float:
    """Seconds until all nodes of `num` GPUs have the weights: they leave one node, and each node
    that has them passes them on."""
    nodes = math.ceil(num / NODE)
    return model.weight_bytes / gpu.link * math.ceil(math.log2(nodes)) if nodes > 1 else 0.0


@dataclass(frozen=True)
class Plan:
    """How GPUs are shared, and what an update takes."""

    samplers: int
    learners: int
    sampling: float
    learning: float
    weights: float
    rest: float

    @property
    def seconds(self) -> float:
        """Of an update, where samplers are one update ahead of the learners."""
        return max(self.sampling, self.learning) + self.weights + self.rest

    @property
    def holds_up(self) -> str:
        parts = {"sampling": self.sampling, "learning": self.learning, "weights": self.weights}
        return max(parts, key=lambda name: parts[name])


def best_plan(model: Model, job: Job, gpu: Gpu, num: int) -> Plan | None:
    """The fastest way to share `num` GPUs; None where the model does not fit. One GPU does both, in
    turn."""
    least_s, least_l = sampler_gpus(model, gpu), learner_gpus(model, gpu)
    if num == 1:
        if least_s > 1 or least_l > 1:
            return None
        sampling, learning = sampling_s(model, job, gpu, 1), learning_s(model, job, gpu, 1)
        return Plan(1, 1, sampling + learning, learning, 0.0, gpu.rest_s)
    plans = [
        Plan(
            samplers,
            num - samplers,
            sampling_s(model, job, gpu, samplers),
            learning_s(model, job, gpu, num - samplers),
            weights_s(model, gpu, num),
            gpu.rest_s,
        )
        for samplers in range(least_s, num - least_l + 1, least_s)
    ]
    return min(plans, key=lambda plan: plan.seconds, default=None)


def tables(job: Job = Job(), gpu: Gpu = H100) -> str:
    """The computed part of the pages."""
    lines = [
        "| model | GPUs | samplers + learners | seconds of an update | tokens/s | limited by |",
        "|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for num in GPUS:
            plan = best_plan(model, job, gpu, num)
            if plan is None:
                needs = f"{sampler_gpus(model, gpu)} + {learner_gpus(model, gpu)}"
                lines.append(f"| {model.name} | {num} | does not fit: {needs} at least | | | |")
                continue
            shared = "1 for both" if num == 1 else f"{plan.samplers} + {plan.learners}"
            rate = job.rows * job.completion / plan.seconds
            lines.append(
                f"| {model.name} | {num} | {shared} | {plan.seconds:.3g} | {rate:,.0f} | "
                f"{plan.holds_up} |"
            )
    return "\n".join(lines)


def page_with(computed: str, page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{computed}\n\n{END}{after}"


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(page_with(tables(), file.read_text(encoding="utf-8")), encoding="utf-8")
