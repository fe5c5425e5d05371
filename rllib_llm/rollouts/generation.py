"""The completions of one request, by the module's own decode loop or by another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from rllib_llm import columns
from rllib_llm.engines.engine import generate
from rllib_llm.engines.external_engine import ExternalEngine
from rllib_llm.engines.noise import row_seeds, uniform_noise
from rllib_llm.engines.params import SamplingParams
from rllib_llm.rollouts.request import SampleRequest

if TYPE_CHECKING:
    from typing_extensions import TypeIs

EVALUATION_SEED = 1_000_003  # added to the seed, so that evaluation has noise of its own


class PolicyModule(Protocol):
    """What is asked of an RLModule that generates; both calls give the columns of completions."""

    model: Any
    tokenizer: Any

    def forward_exploration(
        self, batch: dict[str, torch.Tensor], **options: Any
    ) -> dict[str, torch.Tensor]: ...

    def forward_inference(
        self, batch: dict[str, torch.Tensor], **options: Any
    ) -> dict[str, torch.Tensor]: ...


def is_engine(policy: PolicyModule | ExternalEngine) -> TypeIs[ExternalEngine]:
    """Whether `policy` is no module of ours."""
    return not hasattr(policy, "forward_exploration")


def generate_completions(
    policy: PolicyModule | ExternalEngine,
    config: Any,
    observation: dict[str, torch.Tensor],
    request: SampleRequest,
    row_ids: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The columns of completions, B rows, on the prompts' device.

    Args:
        policy: the RLModule, or an engine that has a copy of it.
        config: the sampler's.
        observation: prompt columns, B rows, those of a group adjacent and alike.
        request: what is answered.
        row_ids: [B] int64, which with the seed decide the randomness of each row.
    """
    params = sampling_params(policy, config, greedy=not request.explore)
    n = request.num_completions
    prompts = {name: observation[name][::n] for name in (columns.PROMPT_IDS, columns.PROMPT_MASK)}
    seed = (config.seed or 0) + EVALUATION_SEED * bool(config.in_evaluation)
    device = observation[columns.PROMPT_IDS].device
    if is_engine(policy):
        completions = policy.generate(
            prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK], params,
            num_completions=n, seeds=row_seeds(seed, row_ids),
        )  # fmt: skip
        return completions.columns(device)
    noise = None if params.greedy else uniform_noise(seed, row_ids, params.max_new_tokens)
    forward = policy.forward_exploration if request.explore else policy.forward_inference
    made = forward(
        prompts, generate=generate, params=params, num_completions=n, noise=noise,
        max_rows=config.sampling_batch_size, cuda_graphs=config.cuda_graphs,
    )  # fmt: skip
    # A module shared with a learner on a GPU generates there.
    return {name: column.to(device) for name, column in made.items()}


def sampling_params(
    policy: PolicyModule | ExternalEngine, config: Any, *, greedy: bool
) -> SamplingParams:
    """What `config` says about sampling, with the policy's own stop tokens where it is silent."""
    stops = config.stop_token_ids
    if stops is None:
        stops = _stop_token_ids(policy)
    return SamplingParams(
        pad_token_id=policy.tokenizer.pad_token_id,
        stop_token_ids=tuple(stops),
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        greedy=greedy,
    )


def _stop_token_ids(policy: PolicyModule | ExternalEngine) -> tuple[int, ...]:
    if is_engine(policy):
        return policy.stop_token_ids
    # Here, since transformers would make importing the package slow.
    from rllib_llm.modules.tokenizer import eos_token_ids

    return eos_token_ids(policy.model, policy.tokenizer)
