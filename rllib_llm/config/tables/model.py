"""Settings of the model, its initial weights, and the processes that train it."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.config.setting import Condition, Section, Settings, setting
from rllib_llm.modules.products import LIBRARIES

ADAPTERS = Condition("lora is set", lambda c: c.lora is not None, "without lora", "Set lora={{}}")
SEVERAL_LEARNERS = Condition(
    "num_learners is 2 or more",
    lambda c: c.num_learners >= 2,
    "with num_learners={config.num_learners}",
    "Use 2 or more",
)
COMPUTES_FLOAT32 = Condition(
    "dtype is 'float32' and mixed_precision is None",
    lambda c: c.dtype == "float32" and c.mixed_precision in (None, "auto"),
    "with dtype={config.dtype!r} and mixed_precision={config.mixed_precision!r}",
)
REMOTE_LEARNERS = Condition(
    "num_learners is 1 or more",
    lambda c: c.num_learners >= 1,
    "with num_learners=0: nobody is waited for",
)


class StartingPoint(Settings):
    """The model that samples the texts."""

    model: str | None = setting(
        None,
        "a Hugging Face folder, a hub id, or the dotted path of a function that returns "
        "(model, tokenizer)",
        note="It gives tokenizer and weights.",
        attribute="pretrained_model",
        also=("model_name_or_path", "model_name", "pretrained_model_name_or_path", "base_model"),
    )


class LanguageModel(StartingPoint):
    """The model's initial weights, and which of its parameters are trained."""

    chat_template: str | None = setting(
        None,
        "how conversations become text: a Jinja file, or the template itself",
        note="Where the tokenizer has none, or another is wanted. It is saved with the model.",
        trl=("chat_template_path",),
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "what the weights being trained are kept in",
        note="In bfloat16 optimiser steps below about 1e-3 of a weight are lost.",
        also=("torch_dtype", "model_dtype"),
        reason="float16 holds nothing below 6e-8, where gradients vanish, and losses are not "
        "scaled here",
        remedy="Use 'float32' with mixed_precision='bf16', or 'bfloat16'",
    )
    mixed_precision: Literal["bf16", "auto"] | None = setting(
        None,
        "what the model computes in, in learners and samplers",
        note='"bf16": a bfloat16 copy, cast from the float32 weights once per optimiser step; '
        "weights, sums of gradients and optimiser stay float32, and so do norms, log-probs, "
        "losses and values. For GPUs and for processors with AMX or AVX512-BF16. None: all in "
        '`dtype`. "auto": "bf16" where learners have the hardware, else None; decided where a '
        "run begins, said, and kept in its checkpoints.",
        also=("autocast_dtype", "bf16", "fp16", "precision"),
        reason="float16 needs scaled losses, which are not built in",
        remedy="Use 'bf16' or 'auto'",
    )
    float32_products: str = setting(
        "mkl",
        "which library multiplies float32 matrices on a processor, in learners and samplers",
        note='"mkl": what torch takes by itself; "onednn": twice as fast on AMD\'s with '
        'AVX-512, alike on Intel\'s. "auto": the one that is faster on this kind of '
        "processor; decided where a run begins, and kept in its checkpoints, since the two "
        "round differently. bfloat16 is oneDNN's always.",
        choices=(*LIBRARIES, "auto"),
        acts=(COMPUTES_FLOAT32,),
    )
    attn_implementation: Literal["sdpa", "flash_attention_2", "flex_attention"] = setting(
        "sdpa",
        "the kernel that computes attention in learners",
        note='"sdpa": torch\'s own, the rows of a group share their prompt. "flash_attention_2": '
        "flash attention for rows of different lengths, each row with its own prompt; for long "
        'completions on GPUs, in bfloat16. "flex_attention": torch\'s flex attention, compiled, '
        "which shares prompts. None of them computes anything for padding. Samplers decode with "
        "kernels of their own.",
        also=("attention_implementation", "use_flash_attention_2", "flash_attention"),
    )
    gradient_checkpointing: bool = setting(
        False,
        "whether only the layers' inputs are kept for the backward pass",
        note="The rest is computed again: less memory for about a third more time.",
    )
    lora: dict[str, Any] | None = setting(
        None,
        "the adapters that are trained on the frozen model, {r, alpha, dropout, "
        "target_modules, ...}",
        note="{} is r=16, alpha=32 on all linear layers; None: all weights are trained.",
        trl=("peft_config",),
        also=("lora_config", "use_lora", "use_peft", "lora_r", "lora_alpha", "rank"),
        remedy="Use {} for r=16, alpha=32, None to train all weights",
    )
    quantization: Literal["none", "int8", "nf4"] = setting(
        "none",
        "what the frozen model under adapters is kept in (QLoRA)",
        also=("load_in_4bit", "load_in_8bit", "quantization_config", "quantisation"),
    )


LANGUAGE_MODEL = Section.of("language_model", LanguageModel)


class Learners(Settings):
    """Learner processes; RLlib's settings and ours."""

    learner_strategy: Literal["ddp", "fsdp"] = setting(
        "ddp",
        "what each of several learners holds",
        note='"ddp": the whole model. "fsdp": a share of weights, gradients and optimiser '
        "(FSDP2), a layer being gathered while it computes. The numbers are the same.",
        acts=(SEVERAL_LEARNERS,),
        short="strategy",
        also=("fsdp", "deepspeed"),
    )


LEARNERS = Section.of("learners", Learners)


class FaultTolerance(Settings):
    """Handling of processes that die or hang; RLlib's settings and ours."""

    learner_timeout_s: float | Literal["auto"] | None = setting(
        "auto",
        "how long a learner may take to answer before the run ends with an error",
        note='So that Tune can restart it. "auto": ten times the slowest answer of its kind so '
        "far and at least 120 s, 1800 s for the first. Set a number to notice a hang sooner, "
        "None to wait for ever.",
        unit="seconds",
        above=0,
        acts=(REMOTE_LEARNERS,),
        reason="a process that has not answered by then is killed",
        remedy="Use None to wait for ever",
    )
    setup_timeout_s: float | None = setting(
        7200.0,
        "how long a trial may take to be set up before it is killed",
        note="So that Tune can restart it; None: for ever.",
        unit="seconds",
        above=0,
        reason="a process that has not answered by then is killed",
        remedy="Use None to wait for ever",
    )
    overseer: bool = setting(
        False,
        "whether a run under Tune can be watched and told what to do while it goes on",
        note="`rllib status`, `rllib top`, `rllib pause` and the like. A small process of its "
        "own; the run does not depend on it.",
    )


FAULT_TOLERANCE = Section.of("fault_tolerance", FaultTolerance)


class SamplerFaults(Settings):
    """Handling of processes that die or hang; RLlib's settings and ours."""

    sampler_timeout_s: float | Literal["auto"] | None = setting(
        "auto",
        "how long a sampler may take to answer a request before it is killed and started again",
        note="Its prompts go to another; doubled for a request that was already taken from a "
        'silent one. "auto": ten times the slowest answer so far, in proportion to the prompts '
        "asked for, and at least 120 s; 1800 s for the first. None: for ever.",
        unit="seconds",
        above=0,
        reason="a process that has not answered by then is killed",
        remedy="Use None to wait for ever",
    )


SAMPLER_FAULTS = Section.of("fault_tolerance", SamplerFaults)
