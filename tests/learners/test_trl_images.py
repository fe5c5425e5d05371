"""SFT, DPO and GRPO on prompts with images: losses and gradients of TRL's trainers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoProcessor

from rllib_llm import DPOConfig, GRPOConfig, SFTConfig
from rllib_llm.modules.images import image_columns, pad_rows
from rllib_llm.modules.logprobs import ReferencePolicy
from rllib_llm.shared import columns
from tests.data.test_image_prompts import image, saved
from tests.learners import tiny_learners as tiny
from tests.modules.test_images import SEEN, own_logprobs, pairs, prompts
from tests.modules.test_multimodal import checkpoint
from tests.modules.test_multimodal import tiny as tiny_model

BETA = 0.1
# Loss and norm of its gradient, tower included, that `compute_loss` of TRL 1.16.0's trainers
# (transformers 5.23, torch 2.13) gave for these tensors.
TRL = {
    ("sft", "gemma3"): (4.578765869140625, 4.3403706550598145),
    ("sft", "qwen2_5_vl"): (5.06555700302124, 8.319787979125977),
    ("sft", "smolvlm"): (4.944675922393799, 10.694491386413574),
    ("dpo", "gemma3"): (0.6921774744987488, 1.094629168510437),
    ("dpo", "qwen2_5_vl"): (0.6929095387458801, 1.9521383047103882),
    ("dpo", "smolvlm"): (0.6885755658149719, 2.429940700531006),
    ("grpo", "gemma3"): (0.045283522456884384, 3.3467814922332764),
    ("grpo", "qwen2_5_vl"): (0.04528350383043289, 5.598501682281494),
    ("grpo", "smolvlm"): (0.04528351128101349, 6.657934665679932),
}


def completions(family):
    """Six completions, two for each prompt; one prompt shows an image, one two, one none. The
    sampler's and the reference's log-probs are a little apart from the policy's."""
    generator = torch.Generator().manual_seed(3)
    ids, mask, shown = prompts(family)
    rows = [each.repeat_interleave(2, 0) for each in (ids, mask)]
    images = image_columns(shown)
    images[columns.IMAGE_ROW] = images[columns.IMAGE_ROW].repeat_interleave(2)
    said = torch.randint(3, 60, (6, 4), generator=generator)
    real = torch.arange(4) < torch.tensor([4, 2, 3, 4, 1, 4]).unsqueeze(1)
    shown = [images for images in shown for _ in range(2)]
    with torch.no_grad():
        logprobs = own_logprobs(tiny_model(family), family, *rows, shown, said)
    sampler, ref = (logprobs + 0.3 * torch.randn(6, 4, generator=generator) for _ in range(2))
    return shown, {
        columns.PROMPT_IDS: rows[0], columns.PROMPT_MASK: rows[1],
        columns.COMPLETION_IDS: said.where(real, 0), columns.COMPLETION_MASK: real,
        columns.SAMPLER_LOGPROBS: sampler.where(real, 0.0),
        columns.REF_LOGPROBS: ref.where(real, 0.0),
        columns.SCORES: torch.tensor([1.0, 0.0, 0.0, 2.0, 3.0, 1.0]),
        columns.VALID: real[:, 0], columns.FINISHED: ~real[:, 3],
        columns.PROMPT_INDEX: torch.arange(6) // 2, columns.GROUP: torch.arange(6) // 2,
        columns.ROW_ID: torch.arange(6),
        columns.WEIGHTS_VERSION: torch.zeros(6, 4, dtype=torch.int32).where(real, -1),
        **images,
    }  # fmt: skip


def texts(family):
    """The completions of `completions` as texts, whose answers are learnt."""
    shown, batch = completions(family)
    ids = torch.cat([batch[columns.PROMPT_IDS], batch[columns.COMPLETION_IDS]], 1)
    mask = torch.cat([batch[columns.PROMPT_MASK], batch[columns.COMPLETION_MASK]], 1)
    rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    padded, real = columns.pad_right(rows, 0)
    starts = batch[columns.PROMPT_MASK].sum(dim=1, keepdim=True)
    return shown, {
        columns.INPUT_IDS: padded, columns.ATTENTION_MASK: real,
        columns.LOSS_MASK: real & (torch.arange(padded.shape[1]) >= starts),
        **image_columns(shown),
    }  # fmt: skip


def preferences(family):
    batch, (_, _, shown), _ = pairs(family)
    return shown * 2, batch


KINDS = {
    "sft": (SFTConfig, {}, texts),
    "dpo": (DPOConfig, {"ref_kl_coeff": BETA}, preferences),
    "grpo": (GRPOConfig, {"ref_kl_coeff": BETA, "loss_reduction": "token_mean"}, completions),
}


def reference(family):
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def learnt(kind, family, folder):
    """Metrics and gradients of an update of ours."""
    config, settings, batch = KINDS[kind]
    config = config().language_model(model=str(checkpoint(folder, family)), train_vision=True)
    learner = tiny.build(config.training(grad_clip=None, **settings))
    if kind == "dpo":
        learner.reference = ReferencePolicy(reference(family))
    metrics = tiny.update(learner, batch(family)[1])
    metrics["loss"] = (
        metrics["loss/policy_avg"] + BETA * metrics["loss/ref_kl_avg"] if kind == "grpo"
        else metrics[f"loss/{kind}"]
    )  # fmt: skip
    grads = tiny.first_gradients(learner)
    return metrics, {name.removeprefix("model."): grad for name, grad in grads.items()}


@pytest.mark.parametrize(("kind", "family"), TRL)
def test_loss_and_gradient_equal_trl(kind, family, tmp_path):
    metrics, _ = learnt(kind, family, tmp_path)
    loss, norm = TRL[kind, family]
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def trl_inputs(kind, family):
    """The same tensors as TRL's collators and samplers lay them out."""
    shown, batch = KINDS[kind][2](family)
    if kind == "sft":
        ids, mask = batch[columns.INPUT_IDS], batch[columns.ATTENTION_MASK]
        own = {"labels": ids.where(batch[columns.LOSS_MASK], -100)}
    elif kind == "grpo":
        ids, mask = batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK]
        scores = batch[columns.SCORES].view(3, 2)
        spread = scores.std(dim=1, keepdim=True) + 1e-4
        own = {
            "completion_ids": batch[columns.COMPLETION_IDS],
            "completion_mask": batch[columns.COMPLETION_MASK].long(),
            "advantages": ((scores - scores.mean(dim=1, keepdim=True)) / spread).flatten(),
            "old_per_token_logps": batch[columns.SAMPLER_LOGPROBS],
            "ref_per_token_logps": batch[columns.REF_LOGPROBS],
            "num_images": [len(row.get("image_grid_thw", row.get("pixel_values", ())))
                           for row in shown],
            "num_items_in_batch": batch[columns.COMPLETION_MASK].sum(),
        }  # fmt: skip
    else:
        chosen, rejected = batch[columns.CHOSEN_IDS], batch[columns.REJECTED_IDS]
        said, real = columns.pad_right([*chosen.tolist(), *rejected.tolist()], 0)
        prompt, seen = batch[columns.PROMPT_IDS], batch[columns.PROMPT_MASK]
        ids = torch.cat([prompt.repeat(2, 1), said], 1)
        mask = torch.cat([seen.repeat(2, 1), real], 1)
        own = {"completion_mask": mask.long()}
        own["completion_mask"][:, : prompt.shape[1]] = 0
    names = ("prompt_ids", "prompt_mask") if kind == "grpo" else ("input_ids", "attention_mask")
    own |= dict(zip(names, (ids, mask.long()), strict=True))
    if family == "smolvlm":  # rows of images, filled up with empty ones
        none = torch.zeros(1, 0, 3, 28, 28)
        pixels, _ = pad_rows([row.get("pixel_values", none) for row in shown])
        own["pixel_values"] = pixels.flatten(0, 1)
    else:
        shown = [row for row in shown if row]
        own |= {name: torch.cat([row[name] for row in shown]) for name in shown[0]}
    if family != "smolvlm":
        types = "token_type_ids" if family == "gemma3" else "mm_token_type_ids"
        whole = torch.cat([ids, own["completion_ids"]], 1) if kind == "grpo" else ids
        own[types] = (whole == SEEN).long()
    return own


def trainer(kind, family, folder):
    """A trainer of TRL; its data set and processor make nothing of what it is given."""
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0 to compare")
    datasets = pytest.importorskip("datasets")
    asked = [{"role": "user", "content": "c?"}]
    answer = [{"role": "assistant", "content": "a"}]
    row = {"image": image(0), "prompt": asked}
    names = {"sft": ["completion"], "dpo": ["chosen", "rejected"], "grpo": []}[kind]
    row |= dict.fromkeys(names, answer)
    given = {
        "model": tiny_model(family), "train_dataset": datasets.Dataset.from_list([row] * 8),
        "processing_class": AutoProcessor.from_pretrained(saved(folder)),
    }  # fmt: skip
    settings = {"output_dir": str(folder / "out"), "report_to": "none", "use_cpu": True,
                "bf16": False, "gradient_checkpointing": False}  # fmt: skip
    if kind == "sft":
        return trl.SFTTrainer(args=trl.SFTConfig(**settings), **given)
    if kind == "dpo":
        args = trl.DPOConfig(beta=BETA, **settings)
        return trl.DPOTrainer(args=args, ref_model=reference(family), **given)
    args = trl.GRPOConfig(loss_type="bnpo", num_generations=2, per_device_train_batch_size=2,
                          **settings)  # fmt: skip
    made = trl.GRPOTrainer(args=args, reward_funcs=lambda **_: [0.0], **given)
    made.beta = BETA  # with the argument it would load a reference
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family"), TRL)
def test_every_gradient_equals_that_of_trl(kind, family, tmp_path):
    theirs = trainer(kind, family, tmp_path)
    theirs.current_gradient_accumulation_steps = 1  # as in a step of its own loop
    loss = theirs.compute_loss(theirs.model, trl_inputs(kind, family))
    loss.backward()
    expected = {n: p.grad for n, p in theirs.model.named_parameters() if p.grad is not None}
    metrics, gradients = learnt(kind, family, tmp_path)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
