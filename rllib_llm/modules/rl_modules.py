"""RLModules around Hugging Face models: policy with critic, policy in DPO, reward model.

forward_exploration(prompts, generate=...) -> completions, with the sampler's own log-probs
forward_train(batch)                       -> log-probs, entropy and values of completion tokens

How tokens are sampled is decided by an engine (`engines/`), whose `generate` is passed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, ValueFunctionAPI
from torch import nn
from transformers import PreTrainedTokenizerBase

from rllib_llm.modules.hugging_face_module import HuggingFaceModule
from rllib_llm.modules.images import image_rows, images_of
from rllib_llm.modules.logprobs import (
    ReferencePolicy,
    Teacher,
    completion_hidden,
    score_completions,
    text_logprobs,
)
from rllib_llm.modules.lora import add_adapters
from rllib_llm.modules.model_source import text_config
from rllib_llm.modules.multimodal import text_decoder
from rllib_llm.modules.precision import Float32Linear, use_float32_head
from rllib_llm.modules.pretrained import (
    load_causal_lm,
    load_sequence_classifier,
    score_head,
)
from rllib_llm.modules.routers import Routing, routers_of
from rllib_llm.modules.tokenizer import load_tokenizer
from rllib_llm.modules.trunk import take_apart
from rllib_llm.shared import columns
from rllib_llm.shared.columns import widen
from rllib_llm.shared.errors import require


class ValueHead(nn.Module):
    """Linear map from the trunk's last hidden state [..., hidden] to a value [...]."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        # Values start at 0: the first advantages are then the rewards themselves.
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # A value has to be more exact than eight bits of mantissa. Copied, because a view can lose
        # the hook with which FSDP2 gathers the weights for the backward pass.
        return self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1).float().clone()


class CausalLMModule(HuggingFaceModule, ValueFunctionAPI, InferenceOnlyAPI):
    """Policy and critic. `model_config` keys:

    pretrained_model: folder, hub id or dotted path of the policy (and its tokenizer).
    dtype: torch dtype name of the weights.
    critic: "shared" (a value head on the policy's trunk), "separate" (its own trunk) or
        "none" (critic-free algorithms).
    critic_model: what a separate critic starts from, usually the reward model; the policy's model
        when None.
    temperature: sampling temperature, by which logits are divided here as well.
    lora: adapters to train instead of the weights (`lora.py`), or None.
    quantization: of the frozen trunk under adapters: "none", "int8" or "nf4".
    train_vision: whether the towers of a multimodal model are trained, too.
    mixed_precision: "bf16": the models compute in bfloat16, the value head in float32; None: all
        in `dtype`. lm_head_float32: the head then computes in float32 as well.
    off_policy: the correction of older tokens; without one the sampler's values are the old ones.
    gradient_checkpointing: keep only the layers' inputs for the backward pass.
    router_aux_coeff, routing_replay: above 0 or True of a mixture of experts alone.
    """

    def load(self) -> None:
        config = self.model_config
        self.temperature = float(config["temperature"])
        self.tokenizer = load_tokenizer(
            config["pretrained_model"], chat_template=config.get("chat_template"),
            template_settings=config.get("template_settings"),
        )  # fmt: skip
        lora, dtype = config.get("lora"), config["dtype"]
        if lora is None:
            self.model = load_causal_lm(config["pretrained_model"], dtype=dtype)
        else:
            from rllib_llm.modules.frozen import load_quantized  # only adapters stand on such

            self.model = load_quantized(
                load_causal_lm, config["pretrained_model"], dtype=dtype,
                quantization=config.get("quantization", "none"),
            )  # fmt: skip
            add_adapters(self.model, lora, seed=config.get("seed", 0))
        self.freeze_towers()
        if config.get("router_aux_coeff") or config.get("routing_replay"):
            routers_of(self.model)  # raises where it has none
        if config.get("lm_head_float32") and self.computing_dtype is not None:
            use_float32_head(self.model)
        self.save_memory(self.model)
        self.has_critic = config["critic"] != "none" and not self.inference_only
        if not self.has_critic:
            return
        if config["critic"] == "shared":
            self.value_head = ValueHead(_state_size(self.model))
        else:
            self.critic, self.value_head = _separate_critic(config, self.tokenizer)
            self.save_memory(self.critic)

    def _sampling_value_head(self) -> nn.Module | None:
        """The value head to run while sampling, if the learner's own module samples and its values
        are as exact as those of a forward pass."""
        config = self.model_config
        if not self.has_critic or config["critic"] != "shared" or config["dtype"] != "float32":
            return None
        if config.get("off_policy") is not None:  # values of older weights are computed again
            return None
        if self.computing_dtype is not None or take_apart(self.model) is None:
            return None
        return self.value_head

    def float32_parts(self) -> list[nn.Module]:
        head = self.model.get_output_embeddings()
        return [head] if isinstance(head, Float32Linear) else []

    def get_non_inference_attributes(self) -> list[str]:
        return ["value_head", "critic"]

    # --- sampling --------------------------------------------------------------------------

    @torch.no_grad()
    def _forward_exploration(
        self, batch: dict[str, Any], *, generate: Any = None, **options: Any
    ) -> dict[str, torch.Tensor]:
        """The columns of completions of `batch`'s prompts.

        generate: `engines.engine.generate` or what has its arguments; options: its settings.
        """
        require(
            generate is not None, "generate", None, "take the arguments of engines.engine.generate",
            "an engine samples whole completions with the module",
            "Call forward_inference(batch, generate=..., params=SamplingParams(...))",
        )  # fmt: skip
        prompts = batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK]
        head = self._sampling_value_head()
        if images := image_rows(batch):
            options["images"] = images
        return generate(self.computing_model, *prompts, value_head=head, **options).columns()

    _forward_inference = _forward_exploration

    # --- learning --------------------------------------------------------------------------

    def _forward_train(
        self, batch: dict[str, Any], *, names: Collection[str] | None = None,
        full_kl_to: ReferencePolicy | None = None, ref_logprobs_of: ReferencePolicy | None = None,
        distill_to: Teacher | None = None, router_aux: bool = False, **kwargs,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """`logprobs`, `entropy` and, with a critic, `values`, each [B, T] float32; where texts
        are given (`input_ids`), `text_logprobs` [N, L] of their target tokens.

        names: of the outputs that are needed; values and entropy that are not are not computed, and
            for `values` alone no logits. Learners pass none to a class that overrides this method:
            what it gets from `super()` is complete.
        full_kl_to: adds `full_kl` [B, T], the exact KL from that reference.
        distill_to: adds `divergence` [B, T] from a teacher, which reads `teacher_prompt_ids` where
            the batch has them, `teacher_kl` and `teacher_agrees`. Without a policy its likeliest
            tokens are the batch's.
        ref_logprobs_of: that policy's log-probs alone, as `ref_logprobs`, without gradient.
        router_aux: adds `router_aux_loss`, a scalar, see `numerics.losses.load_balancing_loss`.

        Where the batch has the experts that the sampler chose, they are those of all passes over
        completions but a reference's and a teacher's.
        """
        if ref_logprobs_of is not None:
            return {columns.REF_LOGPROBS: self._reference_logprobs(batch, ref_logprobs_of)}
        if distill_to is not None:
            distill_to = _with_columns(distill_to, batch)
        values = self.has_critic and (names is None or columns.VALUES in names)
        if names is not None and set(names) == {columns.VALUES}:
            return {columns.VALUES: self.compute_values(batch)}
        outputs: dict[str, torch.Tensor] = {}
        routing = None
        if columns.COMPLETION_IDS in batch:
            routing = _routing(batch) or (Routing() if router_aux else None)
            scored = score_completions(
                self.computing_model, *_completion_columns(batch),
                temperature=batch.get(columns.TEMPERATURE, self.temperature),
                entropy=names is None or columns.ENTROPY in names,
                hidden=values and self.model_config["critic"] == "shared", full_kl_to=full_kl_to,
                distill_to=distill_to, shown=images_of(batch), routing=routing,
            )  # fmt: skip
            outputs[columns.LOGPROBS] = scored.logprobs
            counts = scored.num_computed, scored.num_padding
            outputs[columns.COMPUTED_AND_PADDING] = torch.tensor(counts, dtype=torch.float32)
            if scored.entropy is not None:
                outputs[columns.ENTROPY] = scored.entropy
            if scored.full_kl is not None:
                outputs[columns.FULL_KL] = scored.full_kl
            if scored.distillation is not None:
                outputs |= zip(_DISTILLATION, scored.distillation, strict=True)
            if values:
                outputs[columns.VALUES] = self.compute_values(batch, embeddings=scored.hidden)
        if columns.INPUT_IDS in batch:
            names_of_text = (columns.INPUT_IDS, columns.ATTENTION_MASK, columns.LOSS_MASK)
            texts = (batch[name] for name in names_of_text)
            is_alone = columns.COMPLETION_IDS not in batch
            seen = images_of(batch) if is_alone else None
            of_texts = Routing() if router_aux and is_alone else None
            outputs[columns.TEXT_LOGPROBS] = text_logprobs(
                self.computing_model, *texts, shown=seen, routing=of_texts
            )
            routing = routing or of_texts
        if router_aux and routing is not None and routing.aux_loss is not None:
            outputs[columns.ROUTER_AUX_LOSS] = routing.aux_loss
        return outputs

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        """Values [B, T] of the states before each completion token.

        `embeddings` [B, T, hidden]: the policy trunk's hidden states, where they are known.
        """
        if self.model_config["critic"] == "separate":
            require(columns.IMAGE_ROW not in batch, "critic", "separate",
                    "be 'shared' or 'none' with images", "a critic of its own reads text alone"
                    )  # fmt: skip
            embeddings = completion_hidden(self.computing("critic"), *_completion_columns(batch))
        elif embeddings is None:
            model, rows = self.computing_model, _completion_columns(batch)
            halves, shown, routing = take_apart(model), images_of(batch), _routing(batch)
            if halves is None or shown is not None or routing is not None:
                embeddings = score_completions(
                    model, *rows, hidden=True, shown=shown, routing=routing
                ).hidden
            else:
                embeddings = completion_hidden(halves.trunk, *rows)
        return self.value_head(embeddings)

    @torch.no_grad()
    def _reference_logprobs(self, batch: dict[str, Any], reference: ReferencePolicy):
        with reference.context():
            return score_completions(
                reference.model, *_completion_columns(batch),
                temperature=batch.get(columns.TEMPERATURE, self.temperature),
                shown=images_of(batch),
            ).logprobs  # fmt: skip


_DISTILLATION = (columns.DIVERGENCE, columns.TEACHER_KL, columns.TEACHER_AGREES)


def _with_columns(teacher: Teacher, batch: dict[str, Any]) -> Teacher:
    """The teacher with what a batch says of it."""
    prompts = None
    if columns.TEACHER_PROMPT_IDS in batch:
        prompts = batch[columns.TEACHER_PROMPT_IDS], batch[columns.TEACHER_PROMPT_MASK]
    return dataclasses.replace(
        teacher, prompts=prompts, top_ids=batch.get(columns.TEACHER_TOP_IDS),
        top_logprobs=batch.get(columns.TEACHER_TOP_LOGPROBS),
    )  # fmt: skip


def _routing(batch: dict[str, Any]) -> Routing | None:
    """The experts of a batch of completions; None where it has none."""
    if columns.COMPLETION_EXPERTS not in batch:
        return None
    names = columns.PROMPT_EXPERTS, columns.COMPLETION_EXPERTS
    return Routing(torch.cat([batch[name] for name in names], dim=1))


def _completion_columns(batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The columns of a batch of completions: sampled tokens are scored, earlier ones are
    context."""
    return (
        batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK], batch[columns.COMPLETION_IDS],
        columns.sampled_mask(batch),
    )  # fmt: skip


def _state_size(model: Any) -> int:
    """Width of the states that a language model's trunk gives its head, which need not be the
    width that it computes in: OPT-350m has 512 and 1024."""
    head = model.get_output_embeddings()
    return text_config(model).hidden_size if head is None else head.weight.shape[-1]


def _separate_critic(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[nn.Module, ValueHead]:
    """The separate critic's trunk and head: the reward model's where one is named, with its scale
    of scores, else the policy's trunk and a head of zeros.

    Raises:
        ValueError: the reward model's vocabulary is not the policy's.
    """
    source = config.get("critic_model")
    if source is None:
        model = load_causal_lm(config["pretrained_model"], dtype=config["dtype"])
        return text_decoder(model).base_model, ValueHead(_state_size(model))
    require(load_tokenizer(source).get_vocab() == tokenizer.get_vocab(), "critic_model", source,
            f"have the vocabulary of model={config['pretrained_model']!r}",
            "a critic reads the policy's token ids")  # fmt: skip
    model = load_sequence_classifier(source, dtype=config["dtype"])
    head = score_head(model)
    value_head = ValueHead(head.in_features)
    if head.out_features == 1:
        from rllib_llm.modules.sequence_scores import read_score_normalization  # few critics

        mean, std = read_score_normalization(source) or (0.0, 1.0)
        with torch.no_grad():
            bias = 0.0 if head.bias is None else head.bias
            value_head.linear.weight.copy_(head.weight / std)
            value_head.linear.bias.copy_((bias - mean) / std)
    return text_decoder(model).base_model, value_head


_PAIR_NAMES = (
    (columns.CHOSEN_IDS, columns.REJECTED_IDS), (columns.CHOSEN_MASK, columns.REJECTED_MASK)
)  # fmt: skip


def stack_pairs(
    batch: dict[str, Any], names: tuple[tuple[str, str], ...] = _PAIR_NAMES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [2N, L] of the right-padded chosen and rejected rows under each other, as long
    as the longer, on the host; `names`: of the two columns of each."""
    pairs = columns.fetched([batch[name] for both in names for name in both])
    length = max(column.shape[1] for column in pairs)
    ids, mask = (torch.cat([widen(c, length) for c in both]) for both in (pairs[:2], pairs[2:]))
    return ids, mask


class PreferenceModule(CausalLMModule):
    """`model_config` as `CausalLMModule`'s; there is no critic."""

    def _forward_train(
        self, batch: dict[str, Any], *, ref_logprobs_of: ReferencePolicy | None = None, **kwargs
    ) -> dict[str, torch.Tensor]:
        """`chosen_logprobs` and `rejected_logprobs` [N] float32, sums over the completions' tokens.

        ref_logprobs_of: of that policy instead, as `ref_chosen_logprobs` and
            `ref_rejected_logprobs`, without gradient.
        """
        if ref_logprobs_of is None:
            chosen, rejected = self._pair_logprobs(self.computing_model, batch)
            return {columns.CHOSEN_LOGPROBS: chosen, columns.REJECTED_LOGPROBS: rejected}
        with torch.no_grad(), ref_logprobs_of.context():
            chosen, rejected = self._pair_logprobs(ref_logprobs_of.model, batch)
        return {columns.REF_CHOSEN_LOGPROBS: chosen, columns.REF_REJECTED_LOGPROBS: rejected}

    def _pair_logprobs(self, model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        # Rows with the same prompt share it: it is read once for both completions.
        prompts = columns.fetched([batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK]])
        ids, mask = (torch.cat([prompt, prompt]) for prompt in prompts)
        shown = images_of(batch)
        scored = score_completions(
            model, ids, mask, *stack_pairs(batch), shown=shown and shown.twice
        )
        names = (columns.CHOSEN_IDS, columns.REJECTED_IDS), (
            columns.CHOSEN_LOSS_MASK, columns.REJECTED_LOSS_MASK
        )  # fmt: skip
        wanted = stack_pairs(batch, names)[1].to(scored.logprobs.device, non_blocking=True)
        return (scored.logprobs * wanted).sum(dim=1).chunk(2)
