"""What is trained, where it starts from, and the processes that train it."""

from __future__ import annotations

from typing import Any, Literal

from rllib_llm.config.setting import Condition, Section, Setting
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

MODEL = Setting(
    name="model",
    type=str | None,
    default=None,
    attribute="pretrained_model",
    meaning="a Hugging Face folder, a hub id, or the dotted path of a function that returns "
    "(model, tokenizer)",
    note="It gives tokenizer and weights.",
    also=("model_name_or_path", "model_name", "pretrained_model_name_or_path", "base_model"),
)

LANGUAGE_MODEL = Section(
    "language_model",
    "What the model starts from and what of it is trained.",
    (
        MODEL,
        Setting(
            name="chat_template",
            type=str | None,
            default=None,
            meaning="how conversations become text: a Jinja file, or the template itself",
            note="Where the tokenizer has none, or another is wanted. It is saved with the model.",
            trl=("chat_template_path",),
        ),
        Setting(
            name="dtype",
            type=str,
            default="float32",
            choices=("float32", "bfloat16"),
            meaning="what the weights being trained are kept in",
            note="In bfloat16 optimiser steps below about 1e-3 of a weight are lost.",
            reason="float16 holds nothing below 6e-8, where gradients vanish, and losses are not "
            "scaled here",
            remedy="Use 'float32' with mixed_precision='bf16', or 'bfloat16'",
            also=("torch_dtype", "model_dtype"),
        ),
        Setting(
            name="mixed_precision",
            type=str | None,
            default=None,
            choices=("bf16", "auto"),
            meaning="what the model computes in, in learners and samplers",
            note='"bf16": a bfloat16 copy, cast from the float32 weights once per optimiser step; '
            "weights, sums of gradients and optimiser stay float32, and so do norms, log-probs, "
            "losses and values. For GPUs and for processors with AMX or AVX512-BF16. None: all in "
            '`dtype`. "auto": "bf16" where learners have the hardware, else None; decided where a '
            "run begins, said, and kept in its checkpoints.",
            reason="float16 needs scaled losses, which are not built in",
            remedy="Use 'bf16' or 'auto'",
            also=("autocast_dtype", "bf16", "fp16", "precision"),
        ),
        Setting(
            name="float32_products",
            type=str,
            default="mkl",
            choices=(*LIBRARIES, "auto"),
            meaning="which library multiplies float32 matrices on a processor, in learners and "
            "samplers",
            note='"mkl": what torch takes by itself; "onednn": twice as fast on AMD\'s with '
            'AVX-512, alike on Intel\'s. "auto": the one that is faster on this kind of '
            "processor; decided where a run begins, and kept in its checkpoints, since the two "
            "round differently. bfloat16 is oneDNN's always.",
            acts=(COMPUTES_FLOAT32,),
        ),
        Setting(
            name="gradient_checkpointing",
            type=bool,
            default=False,
            meaning="whether only the layers' inputs are kept for the backward pass",
            note="The rest is computed again: less memory for about a third more time.",
        ),
        Setting(
            name="lora",
            type=dict[str, Any] | None,
            default=None,
            meaning="the adapters that are trained on the frozen model, {r, alpha, dropout, "
            "target_modules, ...}",
            note="{} is r=16, alpha=32 on all linear layers; None: all weights are trained.",
            remedy="Use {} for r=16, alpha=32, None to train all weights",
            trl=("peft_config",),
            also=("lora_config", "use_lora", "use_peft", "lora_r", "lora_alpha", "rank"),
        ),
        Setting(
            name="quantization",
            type=str,
            default="none",
            choices=("none", "int8", "nf4"),
            meaning="what the frozen model under adapters is kept in (QLoRA)",
            also=("load_in_4bit", "load_in_8bit", "quantization_config", "quantisation"),
        ),
    ),
)

LEARNERS = Section(
    "learners",
    "The processes that learn; RLlib's settings beside ours.",
    (
        Setting(
            name="learner_strategy",
            short="strategy",
            type=str,
            default="ddp",
            choices=("ddp", "fsdp"),
            meaning="what each of several learners holds",
            note='"ddp": the whole model. "fsdp": a share of weights, gradients and optimiser '
            "(FSDP2), a layer being gathered while it computes. The numbers are the same.",
            acts=(SEVERAL_LEARNERS,),
            also=("fsdp", "deepspeed"),
        ),
    ),
)

FAULT_TOLERANCE = Section(
    "fault_tolerance",
    "What happens to processes that die or hang; RLlib's settings beside ours.",
    (
        Setting(
            name="learner_timeout_s",
            type=float | Literal["auto"] | None,
            default="auto",
            above=0,
            unit="seconds",
            meaning="how long a learner may take to answer before the run ends with an error",
            note='So that Tune can restart it. "auto": ten times the slowest answer of its kind so '
            "far and at least 120 s, 1800 s for the first. Set a number to notice a hang sooner, "
            "None to wait for ever.",
            reason="a process that has not answered by then is killed",
            remedy="Use None to wait for ever",
            acts=(REMOTE_LEARNERS,),
        ),
        Setting(
            name="setup_timeout_s",
            type=float | None,
            default=7200.0,
            above=0,
            unit="seconds",
            meaning="how long a trial may take to be set up before it is killed",
            note="So that Tune can restart it; None: for ever.",
            reason="a process that has not answered by then is killed",
            remedy="Use None to wait for ever",
        ),
        Setting(
            name="overseer",
            type=bool,
            default=False,
            meaning="whether a run under Tune can be watched and told what to do while it goes on",
            note="`rllib status`, `rllib top`, `rllib pause` and the like. A small process of its "
            "own; the run does not depend on it.",
        ),
    ),
)

SAMPLER_FAULTS = Section(
    "fault_tolerance",
    FAULT_TOLERANCE.meaning,
    (
        Setting(
            name="sampler_timeout_s",
            type=float | Literal["auto"] | None,
            default="auto",
            above=0,
            unit="seconds",
            meaning="how long a sampler may take to answer a request before it is killed and "
            "started again",
            note="Its prompts go to another; doubled for a request that was already taken from a "
            'silent one. "auto": ten times the slowest answer so far, in proportion to the prompts '
            "asked for, and at least 120 s; 1800 s for the first. None: for ever.",
            reason="a process that has not answered by then is killed",
            remedy="Use None to wait for ever",
        ),
    ),
)
