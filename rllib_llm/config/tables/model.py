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
        note="The source of tokenizer and weights.",
        attribute="pretrained_model",
        also=("model_name_or_path", "model_name", "pretrained_model_name_or_path", "base_model"),
    )


class LanguageModel(StartingPoint):
    """The model's initial weights, and which of its parameters are trained."""

    chat_template: str | None = setting(
        None,
        "a Jinja chat template, or its file",
        note="For tokenizers without one, or to replace theirs. Saved with the model.",
        trl=("chat_template_path",),
    )
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "the dtype of the trained weights",
        note="In bfloat16, optimiser steps below about 1e-3 of a weight are lost.",
        also=("torch_dtype", "model_dtype"),
        reason="float16 holds nothing below 6e-8, where gradients vanish, and losses are not "
        "scaled here",
        remedy="Use 'float32' with mixed_precision='bf16', or 'bfloat16'",
    )
    mixed_precision: Literal["bf16", "auto"] | None = setting(
        None,
        "the precision of computations in learners and samplers",
        note=(
            '"bf16": compute with a bfloat16 copy, cast from the float32 weights after each '
            "optimiser step; weights, gradient sums, optimiser state, norms, log-probs, losses "
            "and values stay float32. For GPUs and CPUs with AMX or AVX512-BF16. None: compute "
            'in `dtype`. "auto": "bf16" if the learners\' hardware supports it, else None; '
            "decided at the start of a run, logged, and stored in checkpoints."
        ),
        also=("autocast_dtype", "bf16", "fp16", "precision"),
        reason="float16 needs scaled losses, which are not built in",
        remedy="Use 'bf16' or 'auto'",
    )
    float32_products: str = setting(
        "mkl",
        "the library for float32 matrix products on a CPU, in learners and samplers",
        note=(
            '"mkl": torch\'s default; "onednn": twice as fast on AMD CPUs with AVX-512, equal '
            'on Intel. "auto": the faster one for this kind of CPU; decided at the start of a '
            "run and stored in checkpoints, since the two round differently. bfloat16 always "
            "uses oneDNN."
        ),
        choices=(*LIBRARIES, "auto"),
        acts=(COMPUTES_FLOAT32,),
    )
    attn_implementation: Literal["sdpa", "flash_attention_2", "flex_attention"] = setting(
        "sdpa",
        "the attention kernel of learners",
        note=(
            '"sdpa": torch\'s own; rows of a group share their prompt. "flash_attention_2": '
            "flash attention for rows of different lengths, each with its own prompt; for long "
            'completions on GPUs, in bfloat16. "flex_attention": torch\'s flex attention, '
            "compiled; shares prompts. None of them computes padding. Samplers have kernels of "
            "their own."
        ),
        also=("attention_implementation", "use_flash_attention_2", "flash_attention"),
    )
    gradient_checkpointing: bool = setting(
        False,
        "whether only the layers' inputs are kept for the backward pass",
        note="Saves memory; activations are recomputed, which takes about a third more time.",
    )
    lora: dict[str, Any] | None = setting(
        None,
        "the trained adapters, {r, alpha, dropout, target_modules, ...}",
        note="{} means r=16, alpha=32 on all linear layers; None: all weights are trained.",
        trl=("peft_config",),
        also=("lora_config", "use_lora", "use_peft", "lora_r", "lora_alpha", "rank"),
        remedy="Use {} for r=16, alpha=32, None to train all weights",
    )
    quantization: Literal["none", "int8", "nf4"] = setting(
        "none",
        "the quantisation of the frozen model under adapters (QLoRA)",
        also=("load_in_4bit", "load_in_8bit", "quantization_config", "quantisation"),
    )


LANGUAGE_MODEL = Section.of("language_model", LanguageModel)


class Learners(Settings):
    """Learner processes; RLlib's settings and ours."""

    learner_strategy: Literal["ddp", "fsdp"] = setting(
        "ddp",
        "the distribution of the model over several learners",
        note=(
            '"ddp": each holds the whole model. "fsdp": weights, gradients and optimiser are '
            "sharded (FSDP2), and each layer is gathered while it is computed. The results are "
            "the same."
        ),
        acts=(SEVERAL_LEARNERS,),
        short="strategy",
        also=("fsdp", "deepspeed"),
    )


LEARNERS = Section.of("learners", Learners)


class FaultTolerance(Settings):
    """Handling of processes that die or hang; RLlib's settings and ours."""

    learner_timeout_s: float | Literal["auto"] | None = setting(
        "auto",
        "the time limit of a learner's answer, after which the run ends with an error",
        note=(
            'Tune can then restart it. "auto": ten times the slowest answer of its kind so far '
            "and at least 120 s, 1800 s for the first. Set a number to detect hangs sooner; "
            "None: no limit."
        ),
        unit="seconds",
        above=0,
        acts=(REMOTE_LEARNERS,),
        reason="a process that has not answered by then is killed",
        remedy="Use None to wait for ever",
    )
    setup_timeout_s: float | None = setting(
        7200.0,
        "the time limit of a trial's setup, after which it is killed",
        note="Tune can then restart it; None: no limit.",
        unit="seconds",
        above=0,
        reason="a process that has not answered by then is killed",
        remedy="Use None to wait for ever",
    )
    overseer: bool = setting(
        False,
        "whether a run under Tune can be watched and controlled while it runs",
        note=(
            "With `rllib status`, `top`, `pause` and others. Starts a small process, on which "
            "the run does not depend."
        ),
    )


FAULT_TOLERANCE = Section.of("fault_tolerance", FaultTolerance)


class SamplerFaults(Settings):
    """Handling of processes that die or hang; RLlib's settings and ours."""

    sampler_timeout_s: float | Literal["auto"] | None = setting(
        "auto",
        "the time limit of a sampler's answer, after which it is killed and restarted",
        note=(
            "Its prompts go to another sampler; for a request taken from a silent sampler the "
            'limit is doubled. "auto": ten times the slowest answer so far, in proportion to '
            "the number of prompts, and at least 120 s; 1800 s for the first. None: no limit."
        ),
        unit="seconds",
        above=0,
        reason="a process that has not answered by then is killed",
        remedy="Use None to wait for ever",
    )


SAMPLER_FAULTS = Section.of("fault_tolerance", SamplerFaults)
