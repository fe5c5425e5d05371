"""Learners without a cluster, and the scripted batches they learn from."""

from __future__ import annotations

import copy

import torch
from gymnasium.spaces import Discrete
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.spaces.repeated import Repeated

from rllib_llm.learners.metrics import MEANS, REPORT
from rllib_llm.shared import columns

SPACE = Repeated(Discrete(18), 8)  # ids of the character tokenizer


def build(config):
    """The learner of `config`, built in this process."""
    config = config.copy(copy_frozen=False)
    return config.build_learner(spaces={DEFAULT_MODULE_ID: (SPACE, SPACE)})


def module_of(learner):
    return learner.module[DEFAULT_MODULE_ID].unwrapped()


def update(learner, batch: dict[str, torch.Tensor], **options) -> dict[str, float]:
    """The metrics of one update with a copy of `batch`."""
    rows = SampleBatch(copy.deepcopy(batch))
    batch = MultiAgentBatch({DEFAULT_MODULE_ID: rows}, env_steps=len(rows))
    result = learner.update(batch=batch, **options)
    return result[REPORT][MEANS]


def parameters(learner) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in module_of(learner).state_dict().items()}


def first_gradients(learner) -> dict[str, torch.Tensor]:
    """Gradients of the only optimiser step so far: Adam's first moment is (1 - beta1) of them."""
    (optimizer,) = learner._named_optimizers.values()
    share = 1.0 - optimizer.param_groups[0]["betas"][0]
    return {
        name: optimizer.state[param]["exp_avg"] / share
        for name, param in module_of(learner).named_parameters()
        if param in optimizer.state
    }


def completions(lengths=(3, 5, 1, 4, 2, 5), *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompt and completion columns, one row for each length; ids of digits, none special."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(3, 13, (num_rows, longest), generator=generator)
    prompt_mask = torch.arange(4) >= torch.arange(num_rows).unsqueeze(1) % 3
    prompts = torch.randint(3, 13, (num_rows, 4), generator=generator)
    return {
        columns.PROMPT_IDS: prompts.where(prompt_mask, 0),
        columns.PROMPT_MASK: prompt_mask,
        columns.COMPLETION_IDS: ids.where(mask, 0),
        columns.COMPLETION_MASK: mask,
    }


def judged(learner, lengths=(3, 5, 1, 4, 2, 5), *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch as a sampler with the learner's own policy would give it: its log-probs, a reference
    a little apart, scores 0, 1, 2 ..."""
    batch = completions(lengths, seed=seed)
    mask = batch[columns.COMPLETION_MASK]
    with torch.no_grad():
        logprobs = module_of(learner).forward_train(batch)[columns.LOGPROBS]
    generator = torch.Generator().manual_seed(seed + 1)
    drift = 0.2 * torch.randn(logprobs.shape, generator=generator)
    num_rows = len(mask)
    return {
        **batch,
        columns.SAMPLER_LOGPROBS: logprobs,
        columns.REF_LOGPROBS: (logprobs - drift).where(mask, 0.0),
        columns.SCORES: torch.arange(num_rows).float(),
        columns.VALID: torch.ones(num_rows, dtype=torch.bool),
        columns.FINISHED: torch.arange(num_rows) % 2 == 0,
        columns.PROMPT_INDEX: torch.arange(num_rows),
        columns.ROW_ID: torch.arange(num_rows),
        columns.GROUP: torch.arange(num_rows) // 3,
        columns.WEIGHTS_VERSION: torch.zeros(mask.shape, dtype=torch.int32).where(mask, -1),
    }


def take(batch: dict[str, torch.Tensor], rows) -> dict[str, torch.Tensor]:
    return {name: column[rows] for name, column in batch.items()}
