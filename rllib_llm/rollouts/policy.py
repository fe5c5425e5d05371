"""Whatever generates for a sampler: an RLModule, or any other engine.

    ModulePolicy   an RLModule: batches by `engines.engine.generate`, rows in a `TorchEngine`
    EnginePolicy   a class of `engines.protocol`: batches and rows in it
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from rllib_llm.engines.decode_step import DecodePlan
from rllib_llm.engines.engine import check_decoding, generate
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.protocol import (
    NOT_FINITE,
    Ended,
    Engine,
    InFlight,
    Noise,
    Row,
    Tokens,
    pad_completions,
    uniform_noise,
)
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.modules.images import FILES, image_rows, refuse_images
from rllib_llm.modules.model_source import text_config
from rllib_llm.shared import columns
from rllib_llm.shared.errors import require
from rllib_llm.weights.flat_buffer import FlatBuffer, unpack
from rllib_llm.weights.loading import ModuleLoader, differing

if TYPE_CHECKING:
    from rllib_llm.rollouts.generate_function import FunctionGenerator

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
        function: generates in the place of plain sampling; closed with this.
    """

    takes_weights = True

    def __init__(
        self, make_module: Callable[[], RLModule], *, alias: bool, max_rows: int | None = None,
        cuda_graphs: bool = True, is_pretrained: bool = True,
        function: FunctionGenerator | None = None,
    ) -> None:  # fmt: skip
        self.module: Any = None
        self.loader = ModuleLoader(alias=alias)
        self._alias = alias
        self.has_weights = is_pretrained
        self._make_module, self._function = make_module, function
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
        if self._function is not None:
            vocab_size = text_config(module.model).vocab_size
            return self._function(self.open_engine(0), vocab_size, prompts, asked)
        noise = None
        if not params.greedy:
            noise = uniform_noise(asked.seed, asked.row_ids, params.max_new_tokens)
        forward = module.forward_inference if params.greedy else module.forward_exploration
        made = forward(
            dict(prompts), params=params,
            generate=functools.partial(
                generate, on_step=asked.on_step, plan=self._decode_plan(),
                on_fewer_rows=functools.partial(setattr, self, "_max_rows"),
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
            self._plan = DecodePlan.of(
                model, keeps_experts=bool(self.module.model_config.get("routing_replay"))
            )
        return self._plan

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
        """Closes the function."""
        if self._function is not None:
            self._function.close()


class EnginePolicy:
    """An engine that is no module of ours, to be asked as a `ModulePolicy`.

    Args:
        model: folder, hub id or dotted path of the policy, for its tokens.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        # Here, since transformers would make importing the package slow.
        from rllib_llm.modules.tokenizer import load_tokenizer, policy_eos_ids

        self.engine, self.takes_weights = engine, engine.takes_weights
        self.coming: tuple[int, InFlight] | None = None  # version of what `load` is given next
        tokenizer = load_tokenizer(model)
        self.pad_token_id: int = tokenizer.pad_token_id
        self.stop_token_ids: tuple[int, ...] = policy_eos_ids(model, tokenizer)

    @property
    def has_weights(self) -> bool:
        return self.engine.version is not None

    def generate(
        self, prompts: Mapping[str, torch.Tensor], asked: Generation
    ) -> dict[str, torch.Tensor]:
        """See `ModulePolicy.generate`.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        if not self.engine.takes_images:
            refuse_images(prompts)
        shown = image_rows(prompts)
        ids, mask = prompts[columns.PROMPT_IDS], prompts[columns.PROMPT_MASK]
        params, n, engine = asked.params, asked.num_completions, self.engine
        groups = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        rows = [
            Row(i, groups[i // n], params, noise=Noise(asked.seed, row_id), group=i // n,
                published=asked.weights, is_read_whole=True, images=shown[i // n] if shown else {})
            for i, row_id in enumerate(asked.row_ids.tolist())
        ]  # fmt: skip
        ended: dict[Hashable, Ended] = {}
        engine.add(rows)
        while engine.num_running:
            ended |= {each.id: each for each in engine.step()}
        if any(each.finish == "error" for each in ended.values()):
            raise FloatingPointError(NOT_FINITE)
        made = pad_completions(
            [ended[row.id] for row in rows], params.pad_token_id,
            with_versions=engine.knows_versions,
        )  # fmt: skip
        return made.columns(ids.device)

    def open_engine(
        self, version: int | None, *, load_weights: LoadWeights | None = None
    ) -> Engine:
        """As that of a module: closing it leaves the engine open.

        Raises:
            Problems: it is asked for whole batches.
        """
        rule = "be one that takes rows at any step, such as 'torch', for conversations"
        require(self.engine.takes_rows, "engine", type(self.engine).__name__, rule)
        return _Loan(self, version, load_weights)

    def load(self, weights: FlatBuffer) -> None:
        """Generates with these published weights."""
        self.set_state(unpack(weights))

    def differing(self, weights: FlatBuffer) -> list[str]:
        """Nothing: its weights cannot be seen, or lie in a layout of the engine's own."""
        return []

    def get_state(self) -> dict[str, torch.Tensor]:
        """Empty: its weights are external, or come with a request."""
        return {}

    def set_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.engine.load(dict(state), *(self.coming or (self.engine.version or 0, "keep")))

    def close(self) -> None:
        self.engine.close()


class _Loan(Engine):
    """A policy's engine, to be closed by who borrows it.

    Args:
        version: of its weights, stamped on all tokens; None: the engine knows, after `load`.
        load_weights: see `ModulePolicy.open_engine`; it calls the policy's `load`.
    """

    def __init__(
        self, policy: EnginePolicy, version: int | None, load_weights: LoadWeights | None
    ) -> None:
        self._policy, self._engine = policy, policy.engine
        self._version, self._load_weights = version, load_weights
        self._ids: set[Hashable] = set()

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def version(self) -> int | None:
        return self._engine.version if self._version is None else self._version

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:  # conversations have no files for an engine that reads them itself
            reads = self._engine.takes_images and FILES in row.images
            refuse_images({columns.IMAGE_ROW: row.images} if row.images and not reads else {})
        self._engine.add(rows)
        self._ids |= {row.id for row in rows}

    def step(self) -> list[Ended]:
        return self._stamped(self._engine.step())

    def _stamped(self, ended: list[Ended]) -> list[Ended]:
        self._ids -= {each.id for each in ended}
        if self._version is None:
            return ended
        return [replace(each, versions=[self._version] * each.num_tokens) for each in ended]

    def sampled(self, ids: Sequence[Hashable], starts: Sequence[int]) -> list[Tokens]:
        return self._engine.sampled(ids, starts)

    def abort(self, ids: Sequence[Hashable]) -> list[Ended]:
        return self._stamped(self._engine.abort(ids))

    def load(
        self, weights: dict[str, torch.Tensor], version: int, in_flight: InFlight = "finish"
    ) -> None:
        self._version = None
        if self._load_weights is None:
            self._engine.load(weights, version, in_flight)
            return
        self._policy.coming = version, in_flight
        try:
            self._load_weights(weights)
        finally:
            self._policy.coming = None

    def close(self) -> None:
        self.abort(list(self._ids))


SamplingPolicy: TypeAlias = ModulePolicy | EnginePolicy
"""Whatever generates for a sampler."""
