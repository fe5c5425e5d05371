"""Settings of the model, its initial weights, the processes that train it, the optimiser, its
schedule, and how a batch is cut into its steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, Literal

from rllib_llm.config.sections import wrong
from rllib_llm.modules.precision import LIBRARIES
from rllib_llm.numerics.learning_rate import learning_rate_factor
from rllib_llm.shared.errors import Problem
from rllib_llm.shared.setting import Condition, Section, Settings, is_set, setting, when

IN_BF16 = when("mixed_precision", "is set", is_set, "Set mixed_precision: bf16")
SEVERAL_LEARNERS = when("num_learners", "is 2 or more", lambda n: n >= 2, "Use 2 or more")
COMPUTES_FLOAT32 = Condition(
    "dtype is 'float32' and mixed_precision is None",
    lambda c: c.dtype == "float32" and c.mixed_precision in (None, "auto"),
    "with dtype={config.dtype!r} and mixed_precision={config.mixed_precision!r}",
)
REMOTE_LEARNERS = when(
    "num_learners", "is 1 or more", lambda n: n >= 1, why=": nobody is waited for"
)


class StartingPoint(Settings):
    """The model that samples the texts."""

    model: str | None = setting(
        None, "a Hugging Face folder, a hub id, or the dotted path of a function that returns "
        "(model, tokenizer)", note="The source of tokenizer and weights.",
        attribute="pretrained_model", remedy="Write the folder, hub id or path itself",
        also="model_name_or_path model_name pretrained_model_name_or_path base_model",
    )  # fmt: skip


class LanguageModel(StartingPoint):
    """The model's initial weights, and which of its parameters are trained."""

    chat_template: str | None = setting(
        None, "a Jinja chat template, or its file", note="For tokenizers without one, or to "
        "replace theirs. Saved with the model.", trl="chat_template_path",
    )  # fmt: skip
    template_settings: dict[str, Any] | None = setting(
        None, "variables of the chat template, such as {enable_thinking: false}",
        note="For every chat whose row says nothing else. Saved with the model.",
        trl="chat_template_kwargs",
    )  # fmt: skip
    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "the dtype of the trained weights", note="In bfloat16, optimiser steps below "
        "about 1e-3 of a weight are lost.", also="torch_dtype model_dtype",
        reason="no other is trained here (in float16 gradients below 6e-8 vanish)",
        remedy="Use 'float32' with mixed_precision='bf16', or 'bfloat16'",
    )  # fmt: skip
    mixed_precision: Literal["bf16", "auto"] | None = setting(
        None, "the precision of computations in learners and samplers",
        note='"bf16": compute with a bfloat16 copy, cast from the float32 weights after each '
        "optimiser step; weights, gradient sums, optimiser state, norms, log-probs, losses "
        "and values stay float32. For GPUs and CPUs with AMX or AVX512-BF16. None: compute "
        'in `dtype`. "auto": "bf16" if the learners\' hardware supports it, else None; '
        "decided at the start of a run, logged, and stored in checkpoints.",
        also="autocast_dtype bf16 fp16 precision",
        reason="no other is built in (float16 would need scaled losses)",
        remedy="Use 'bf16' or 'auto'",
    )  # fmt: skip
    lm_head_float32: bool = setting(
        False, "whether the output layer computes in float32 under mixed_precision",
        note="Logits of 16 bits are most of the difference between log-probs of learners and "
        "samplers (MiniMax-M1). For models whose output layer does not share the embedding's "
        "weights.", acts=(IN_BF16,), trl="cast_lm_head_to_fp32",
    )  # fmt: skip
    float32_products: str = setting(
        "mkl", "the library for float32 matrix products on a CPU, in learners and samplers",
        note='"mkl": torch\'s default; "onednn": up to twice as fast on AMD CPUs from Zen 4 on, '
        'equal on Intel. "auto": the faster one for this kind of CPU; decided at the start of '
        "a run and stored in checkpoints, since the two round differently. bfloat16 always "
        "uses oneDNN.", choices=(*LIBRARIES, "auto"), acts=(COMPUTES_FLOAT32,),
    )  # fmt: skip
    attn_implementation: Literal["sdpa", "flash_attention_2", "flex_attention"] = setting(
        "sdpa", "the attention kernel of learners",
        note='"sdpa": torch\'s own; rows of a group share their prompt. "flash_attention_2": '
        "flash attention for rows of different lengths, each with its own prompt; for long "
        'completions on GPUs, in bfloat16. "flex_attention": torch\'s flex attention, '
        "compiled; shares prompts. None of them computes padding. Samplers have kernels of "
        "their own.", also="attention_implementation use_flash_attention_2 flash_attention",
    )  # fmt: skip
    gradient_checkpointing: bool = setting(
        False, "whether only the layers' inputs are kept for the backward pass",
        note="Saves memory; activations are recomputed, which takes about a third more time.",
    )  # fmt: skip
    lora: dict[str, Any] | None = setting(
        None, "the trained adapters, {r, alpha, dropout, target_modules, ...}",
        note="{} means r=16, alpha=32 on all linear layers; None: all weights are trained.",
        trl="peft_config", also="lora_config use_lora use_peft lora_r lora_alpha rank",
        remedy="Use {} for r=16, alpha=32, None to train all weights",
    )  # fmt: skip
    quantization: Literal["none", "int8", "nf4"] = setting(
        "none", "the quantisation of the frozen model under adapters (QLoRA)",
        also="load_in_4bit load_in_8bit quantization_config quantisation",
    )  # fmt: skip
    train_vision: bool = setting(
        False, "whether the vision tower and projector of a multimodal model are trained as well",
        note="False: they stay as they were in the checkpoint, and are exported with the trained "
        "decoder. Only prompts with images give them gradients.",
        also="freeze_vision_tower freeze_vision",
    )  # fmt: skip


LANGUAGE_MODEL = Section.of("language_model", LanguageModel)


class Learners(Settings):
    """Learner processes; RLlib's settings and ours."""

    learner_strategy: Literal["ddp", "fsdp"] = setting(
        "ddp", "the distribution of the model over several learners",
        note='"ddp": each holds the whole model. "fsdp": weights, gradients and optimiser are '
        "sharded (FSDP2), and each layer is gathered while it is computed. The results are "
        "the same. Each sampler on a CPU then joins a copy of the weights of its own; with "
        '"ddp" those of a node share one.', acts=(SEVERAL_LEARNERS,), short="strategy",
        also="fsdp deepspeed",
    )  # fmt: skip


LEARNERS = Section.of("learners", Learners)


class FaultTolerance(Settings):
    """Handling of processes that die or hang; RLlib's settings and ours."""

    learner_timeout_s: float | Literal["auto"] | None = setting(
        "auto", "the time limit of a learner's answer, after which the run ends with an error",
        note='Tune can then restart it. "auto": ten times the slowest answer of its kind so far '
        "and at least 120 s, 1800 s for the first. Set a number to detect hangs sooner; "
        "None: no limit.", unit="seconds", above=0, acts=(REMOTE_LEARNERS,),
        remedy="Use None to wait for ever",
    )  # fmt: skip
    setup_timeout_s: float | None = setting(
        7200.0, "the time limit of a trial's setup, after which it is killed",
        note="Tune can then restart it; None: no limit.", unit="seconds", above=0,
        remedy="Use None to wait for ever",
    )  # fmt: skip
    overseer: bool = setting(
        False, "whether a run under Tune can be watched and controlled while it runs",
        note="With `rllib status`, `top`, `pause` and others. Starts a small process, on which the "
        "run does not depend.",
    )  # fmt: skip


FAULT_TOLERANCE = Section.of("fault_tolerance", FaultTolerance)


class SamplerFaults(Settings):
    """Handling of processes that die or hang; RLlib's settings and ours."""

    sampler_timeout_s: float | Literal["auto"] | None = setting(
        "auto", "the time limit of a sampler's answer, after which it is killed and restarted",
        note="Its prompts go to another sampler; for a request taken from a silent sampler the "
        'limit is doubled. "auto": ten times the slowest answer so far, in proportion to '
        "the number of prompts, and at least 120 s; 1800 s for the first. None: no limit.",
        unit="seconds", above=0, remedy="Use None to wait for ever",
    )  # fmt: skip


SAMPLER_FAULTS = Section.of("fault_tolerance", SamplerFaults)


DECAY = when(
    "lr_schedule", "is not 'constant'", lambda s: s != "constant", "Choose 'linear' or 'cosine'"
)
ON_GPUS = when(
    "num_gpus_per_learner", "is above 0", bool, why=": the state is in host memory anyway"
)


class Optimiser(Settings):
    """The optimiser, and how a batch is cut into its steps."""

    lr: float = setting(
        1e-5, "the peak learning rate", least=0, trl="learning_rate",
        also="learning_rate lr_rate step_size actor_lr actor_learning_rate",
        remedy="Write a number such as 1e-5; lr_schedule changes it over the updates, and "
        "`{grid_search: [...]}` tries several",
    )  # fmt: skip
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon"] = setting(
        "adamw", "the optimiser", note='"adamw_8bit": AdamW with moments in 8 bits (bitsandbytes; '
        'those of fewer than 4096 numbers stay in 32); "paged_adamw_8bit": the same in memory '
        'that a GPU pages to the host; "muon": torch.optim.Muon for the matrices between hidden '
        "states, with steps of AdamW's size, AdamW for the rest.", trl="optim",
    )  # fmt: skip
    optimizer_offload: bool = setting(
        False, "whether the optimiser's state is in host memory between steps",
        note="It is copied to the GPU and back in every step, a few layers at a time; the numbers "
        "stay the same.", acts=(ON_GPUS,), also="adam_offload optimizer_cpu_offload",
    )  # fmt: skip
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant", "the decay of the learning rate to 0 after warm-up", trl="lr_scheduler_type",
        also="lr_scheduler scheduler_type",
    )  # fmt: skip
    lr_num_warmup_updates: int = setting(
        0, "the length of the linear warm-up", note="Step u (from 0) of n uses (u + 1)/(n + 1) of "
        "`lr`; the first step is not at 0, as in transformers.", unit="optimiser steps", least=0,
        trl="warmup_steps", also="num_warmup_steps lr_warmup_steps",
    )  # fmt: skip
    lr_num_updates: int | None = setting(
        None, "the step at which the decay reaches 0; later steps change nothing",
        unit="optimiser steps", least=1, acts=(DECAY,), also="num_training_steps lr_decay_steps",
    )  # fmt: skip
    adam_betas: tuple[float, float] = setting(
        (0.9, 0.999), "the decay rates of AdamW's two moments", trl="adam_beta1 adam_beta2",
        also="betas",
    )  # fmt: skip
    adam_epsilon: float = setting(
        1e-5, "AdamW's ε, added to the root of the second moment",
        note='1e-5 as in the original RLHF code (vwxyzjn, "The N implementation details of RLHF '
        'with PPO").', above=0, also="adam_eps eps",
    )  # fmt: skip
    weight_decay: float = setting(
        0.0, "AdamW's decoupled weight decay", note="Not applied to norms and biases, as in "
        "transformers' Trainer.", least=0,
    )  # fmt: skip
    grad_clip: float | None = setting(
        1.0, "the maximum global norm of gradients", above=0, trl="max_grad_norm",
        also="clip_grad gradient_clipping grad_norm", reason="longer gradients are shortened to it",
        remedy="Use null for none",
    )  # fmt: skip
    num_epochs: int = setting(
        1, "the number of passes of an iteration over its batch", least=1,
        trl="num_iterations num_ppo_epochs", rllib="num_sgd_iter",
        also="ppo_epochs num_policy_epochs mu",
        reason="an iteration without rows or passes learns nothing",
    )  # fmt: skip
    train_batch_size_per_learner: int = setting(
        64, "the number of completions, texts or pairs per learner in an iteration", unit="rows",
        least=1, trl="generation_batch_size", rllib="train_batch_size",
        also="batch_size rollout_batch_size train_batch",
    )  # fmt: skip
    minibatch_size: int | None = setting(
        None, "the number of rows per optimiser step and learner",
        note="None: all. A default above the batch size means the whole batch.", unit="rows",
        least=1, trl="gradient_accumulation_steps", rllib="sgd_minibatch_size",
        also="mini_batch_size ppo_mini_batch_size local_mini_batch_size",
        reason="it says how much goes through the model at a time",
        remedy="Write 32, say, or None for the whole batch",
    )  # fmt: skip
    micro_batch_size: int | None = setting(
        None, "the number of rows per forward and backward pass",
        note="Does not change the gradients.", unit="rows", least=1,
        trl="per_device_train_batch_size", also="per_gpu_train_batch_size micro_train_batch_size",
    )  # fmt: skip
    micro_batch_tokens: int | None = setting(
        16_384, "the number of tokens per forward and backward pass, padding included",
        note="Rows of similar length are grouped. Set None to use micro_batch_size.", unit="tokens",
        least=1, also="ppo_max_token_len_per_gpu max_tokens_per_batch",
        reason="it says how much goes through the model at a time",
        remedy="Write 16384, or None with micro_batch_size",
    )  # fmt: skip
    refused_batch_dir: str | None = setting(
        None, "the folder for mini-batches with a non-finite loss",
        note="None: a new temporary folder, named in the log.",
    )  # fmt: skip


OPTIMISER = Section.of("training", Optimiser)


# --- what must hold between them --------------------------------------------------------------


def optimiser_rules(config: Any) -> Iterator[Problem]:
    """A batch is cut in one way, and the schedule of the learning rate and the moments exist."""
    if None not in (config.micro_batch_size, config.micro_batch_tokens):
        yield wrong(config, "micro_batch_size",
                    f"None while micro_batch_tokens={config.micro_batch_tokens}",
                    "each says alone where it is cut", "Set one of them to None")  # fmt: skip
    if not all(0 <= beta < 1 for beta in config.adam_betas):
        yield wrong(config, "adam_betas", "two numbers in [0, 1)",
                    "a moment is that much of the one before", "Use (0.9, 0.999)")  # fmt: skip
    kind = config.optimizer
    if kind != "adamw" and config.learner_strategy == "fsdp":
        yield wrong(config, "optimizer", "'adamw' with learner_strategy='fsdp'",
                    "the others need whole weights, and these are shards",
                    "Use 'adamw', or strategy='ddp'")  # fmt: skip
    if kind.startswith("paged") and config.optimizer_offload:
        yield wrong(config, "optimizer_offload", f"False with optimizer={kind!r}",
                    "its state is paged to the host already")  # fmt: skip
    if kind.startswith("paged") and not config.num_gpus_per_learner:
        yield wrong(config, "optimizer", "'adamw_8bit' without a GPU for each learner",
                    "only a GPU's memory is paged to the host", "Use 'adamw_8bit'")  # fmt: skip
    if kind.endswith("8bit") and importlib.util.find_spec("bitsandbytes") is None:
        yield wrong(config, "optimizer", "'adamw' or 'muon' without bitsandbytes",
                    "it keeps the moments in 8 bits", "pip install bitsandbytes")  # fmt: skip
    end, warmup = config.lr_num_updates, config.lr_num_warmup_updates
    if config.lr_schedule != "constant" and end is not None and end <= warmup:
        yield wrong(config, "lr_num_updates", f"above lr_num_warmup_updates={warmup}",
                    "the learning rate is 0 from there on, before it has reached its peak",
                    "Set it to the optimiser steps of the whole run")  # fmt: skip
    learning_rate_factor(
        warmup, schedule=config.lr_schedule, num_warmup_updates=warmup, num_total_updates=end
    )


def precision_rules(config: Any) -> Iterator[Problem]:
    """Weights, computation and the attention kernel go together."""
    if config.mixed_precision is not None and config.dtype != "float32":
        yield wrong(config, "mixed_precision", f"None with dtype={config.dtype!r}",
                    "a copy of float32 weights computes; these compute themselves",
                    "Use dtype='float32', or leave mixed_precision out")  # fmt: skip
    if config.lm_head_float32 and config.learner_strategy == "fsdp":
        yield wrong(config, "lm_head_float32", "False with learner_strategy='fsdp'",
                    "gathered weights of the root compute in bfloat16",
                    "Use strategy='ddp', or leave it out")  # fmt: skip
    if config.attn_implementation != "sdpa" and not config.num_gpus_per_learner:
        yield wrong(config, "attn_implementation", "'sdpa' without a GPU for each learner",
                    "on processors the other kernels have no gradient",
                    "Set num_gpus_per_learner: 1, or leave it out")  # fmt: skip
    reads_half = config.dtype == "bfloat16" or config.mixed_precision is not None
    if config.attn_implementation == "flash_attention_2" and not reads_half:
        yield wrong(config, "attn_implementation", "'sdpa' or 'flex_attention' in float32",
                    "its kernel reads 16 bits",
                    "Set mixed_precision: bf16, or leave it out")  # fmt: skip


def adapter_rules(config: Any) -> Iterator[Problem]:
    """Adapters, or a trunk in few bits, can be trained."""
    if config.quantization != "none" and config.lora is None:
        yield wrong(config, "quantization", "'none' without lora",
                    "weights of few bits cannot be trained",
                    "Set lora={}, or quantization='none'")  # fmt: skip
    if config.quantization != "none" and config.learner_strategy != "ddp":
        yield wrong(config, "learner_strategy", f"'ddp' with quantization={config.quantization!r}",
                    "weights of few bits are not sharded",
                    "Use quantization='none', or strategy='ddp'")  # fmt: skip
    if config.train_vision and config.lora is not None:
        yield wrong(config, "train_vision", "False with lora", "only adapters are trained then",
                    "Name layers of the tower in lora.target_modules")  # fmt: skip
    if config.lora is not None and not config.trains_adapters:
        yield wrong(config, "lora", "None in this stage",
                    "its head has to be trained with the model")  # fmt: skip
    elif config.lora is not None:
        from rllib_llm.modules.lora import check_lora

        check_lora(config.lora)
