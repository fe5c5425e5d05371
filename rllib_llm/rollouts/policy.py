"""Whatever generates for a sampler: an RLModule, vLLM in this process, or a server.

A user's function that generates is in `generate_function.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.engine import check_decoding, generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import Engine, Noise, Row, pad_completions, uniform_noise
from rllib_llm.engines.servers import CompletionClient
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.modules.images import refuse_images
from rllib_llm.shared import columns
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.loading import ModuleLoader, differing

if TYPE_CHECKING:
    from rllib_llm.engines.vllm_engine import VLLMEngine

LoadWeights: TypeAlias = Callable[[dict[str, torch.Tensor]], None]
EVALUATION_SEED = 1_000_003  # added to the seed, so that evaluation has other noise


@dataclass(frozen=True)
class Generation:
    """A request to a policy: `num_completions` of each prompt.

    The noise of a row is a function of `seed` and its id in `row_ids` [B] int64. `on_step` is
    called after each step of a policy that decodes itself.
    """

    params: SamplingParams
    num_completions: int
    seed: int
    row_ids: torch.Tensor
    on_step: Callable[[], None] | None = None
    weights: tuple[int, int] | None = None
    """(epoch, version) that were published last, for a server that follows them."""


class ModulePolicy:
    """An RLModule, made on first use or shared with the learner in the same process.

    takes_weights: whether it generates with published weights; if not, with another model.
    has_weights: whether it was given weights to generate with, or needs none.

    Args:
        alias: its parameters may become views of shared memory: nothing else writes to them.
        max_rows: completions decoded at once; None: all that fit.
        cuda_graphs: whether decode steps are recorded on a CUDA device.
        is_pretrained: whether what `make_module` gives may be sampled from as it is.
    """

    takes_weights = True

    def __init__(
        self, make_module: Callable[[], RLModule], *, alias: bool, max_rows: int | None = None,
        cuda_graphs: bool = True, is_pretrained: bool = True,
    ) -> None:  # fmt: skip
        self.module: Any = None
        self.loader = ModuleLoader(alias=alias)
        self._alias = alias
        self.has_weights = is_pretrained
        self._make_module = make_module
        self._max_rows = max_rows
        self._plan: DecodePlan | None = None
        self._cuda_graphs = cuda_graphs
        self._is_shared = False
        self._pending_state: Mapping[str, torch.Tensor] | None = None

    def another(self) -> ModulePolicy:
        """A copy with a separate module, to hold another version of the weights."""
        return type(self)(
            self._make_module, alias=self._alias, max_rows=self._max_rows,
            cuda_graphs=self._cuda_graphs, is_pretrained=False,
        )  # fmt: skip

    def share(self, module: RLModule) -> None:
        """Samples with `module` itself, the learner's: no copy, no transfer.

        Raises:
            ValueError: it cannot be decoded here.
        """
        check_decoding(module.computing_model)
        self.module, self._is_shared, self.has_weights = module, True, True
        self._pending_state = None

    def build(self) -> Any:
        """The module, made on first use.

        Raises:
            ValueError: it cannot be decoded here.
        """
        if self.module is None:
            self.module = self._make_module()
            check_decoding(self.module.computing_model)
            if self._pending_state is not None:
                self.module.set_state(self._pending_state)
                self._pending_state = None
        return self.module

    @property
    def pad_token_id(self) -> int:
        """The token id after the end of a completion."""
        return self.build().tokenizer.pad_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All token ids that end a completion, as declared by the model."""
        # Here, since transformers would make importing the package slow.
        from rllib_llm.modules.tokenizer import eos_token_ids

        return eos_token_ids(self.build().model, self.build().tokenizer)

    def generate(
        self, prompts: Mapping[str, torch.Tensor], asked: Generation
    ) -> dict[str, torch.Tensor]:
        """The columns of the completions, B rows, on the prompts' device."""
        params, module = asked.params, self.build()
        noise = None
        if not params.greedy:
            noise = uniform_noise(asked.seed, asked.row_ids, params.max_new_tokens)
        forward = module.forward_inference if params.greedy else module.forward_exploration
        made = forward(
            dict(prompts), params=params,
            generate=functools.partial(
                generate, on_step=asked.on_step, on_fewer_rows=self._decode_at_most,
                plan=self._decode_plan(),
            ),
            num_completions=asked.num_completions, noise=noise,
            max_rows=self._max_rows, cuda_graphs=self._cuda_graphs,
        )  # fmt: skip
        # A module shared with a learner on a GPU generates there.
        device = prompts[columns.PROMPT_IDS].device
        return {name: column.to(device) for name, column in made.items()}

    def _decode_plan(self) -> DecodePlan:
        """How the module's model is decoded, decided once."""
        model = self.build().computing_model
        if self._plan is None or self._plan.model is not model:
            self._plan = DecodePlan.of(model)
        return self._plan

    def _decode_at_most(self, rows: int) -> None:
        self._max_rows = rows

    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        """An engine that rows are added to one by one.

        Args:
            version: of the weights as they are; None where it has to be given some first.
            load_weights: what the engine's `load` does. Without it the caller closes the engine
                before there are new weights.
        """
        module = self.build()
        return TorchEngine(
            module.computing_model, version=version, max_rows=self._max_rows,
            cuda_graphs=self._cuda_graphs, load_weights=load_weights, plan=self._decode_plan(),
        )  # fmt: skip

    def load(self, weights: FlatBuffer) -> None:
        """Generates with these published weights; the learner's own module has them already."""
        if not self._is_shared:
            self.loader.load(self.build(), weights)
            self.has_weights = True

    def differing(self, weights: FlatBuffer) -> list[str]:
        """Names of the parameters that are not bit for bit these."""
        return differing(self.build(), weights)

    def get_state(self) -> dict[str, torch.Tensor]:
        """Its weights by name, without critic."""
        weights = self.build().get_state(inference_only=True)
        if self.loader.is_aliased:  # pickled, each view would take the whole buffer along
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        return weights

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Generates with these weights from now on."""
        self.has_weights = True
        if self.module is None:
            self._pending_state = state
        else:
            self.loader.own_memory(self.module)
            self.module.set_state(state)

    def close(self) -> None:
        """Does nothing."""


class EnginePolicy:
    """vLLM in this process, which has a copy of the policy, or a server, with weights that it has
    from elsewhere; to be asked as a `ModulePolicy`.
    """

    def __init__(self, engine: CompletionClient | VLLMEngine) -> None:
        self._engine = engine
        self.takes_weights = engine.takes_weights

    @property
    def has_weights(self) -> bool:
        return self._engine.has_weights

    @property
    def pad_token_id(self) -> int:
        return self._engine.tokenizer.pad_token_id

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._engine.stop_token_ids

    def generate(
        self, prompts: Mapping[str, torch.Tensor], asked: Generation
    ) -> dict[str, torch.Tensor]:
        refuse_images(prompts)
        ids, mask = prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK]
        params, n, engine = asked.params, asked.num_completions, self._engine
        groups = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        rows = [
            Row(i, groups[i // n], params, noise=Noise(asked.seed, row_id))
            for i, row_id in enumerate(asked.row_ids.tolist())
        ]
        ended = engine.complete(rows, asked.weights)
        made = pad_completions(ended, params.pad_token_id, with_versions=engine.knows_versions)
        return made.columns(ids.device)

    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        """As that of a module.

        Raises:
            ValueError: a server cannot be asked turn by turn.
        """
        return self._engine.open_rows(version, load_weights)

    def load(self, weights: FlatBuffer) -> None:
        self.set_state(unpack(weights))

    def differing(self, weights: FlatBuffer) -> list[str]:
        """Nothing: its weights cannot be seen, or lie in a layout of the engine's own."""
        return []

    def get_state(self) -> dict[str, torch.Tensor]:
        """Empty: its weights are external, or come with a request."""
        return {}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._engine.load_weights(dict(state))

    def close(self) -> None:
        self._engine.close()


SamplingPolicy: TypeAlias = ModulePolicy | EnginePolicy
"""Whatever generates for a sampler."""
