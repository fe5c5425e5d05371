"""The base of RLModules around a Hugging Face model: state, checkpoints, tied weights.

On disk such a module is an ordinary Hugging Face folder (config.json, model.safetensors,
tokenizer), with whatever RL adds to it in a second safetensors file beside it. A module with
adapters on a frozen trunk is the adapters' folder (`lora.py`) instead, and its state the
adapters' alone.

Where parameters are shards of several learners, reading them gathers them: all learners must call
`get_state` at the same time, and only the first is given the tensors.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_compile_config import TorchCompileConfig
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rllib_llm.modules.lora import (
    AdapterBase,
    has_adapters,
    is_adapter,
    merge_into,
    read_adapters,
    save_adapters,
    write_adapters,
)
from rllib_llm.modules.model_source import is_multimodal, text_config
from rllib_llm.modules.multimodal import CHAT_TEMPLATE, other_tensors, processor_files
from rllib_llm.modules.precision import ComputingCopy, cast_parameters_, computing_dtype, use_onednn
from rllib_llm.modules.pretrained import load_causal_lm, quiet_transformers
from rllib_llm.modules.routers import routed_again
from rllib_llm.modules.shards import gather, is_sharded, local_data, own_parts, write_
from rllib_llm.modules.trunk import use_kernel
from rllib_llm.shared.errors import require

TRUNK = "model."  # prefix of the Hugging Face model's parameters in a module's state
EXTRAS_FILE = "rl_heads.safetensors"  # value head, critic: what is not part of the model
FORMAT_KEY, FORMAT_VERSION = "rllib_llm_format", 1


class HuggingFaceModule(TorchRLModule):
    """A TorchRLModule with a trunk `self.model` and its `self.tokenizer`.

    Subclasses set both in `load()`. Parameters other than the trunk's are the module's extras.
    """

    def load(self) -> None:
        """Sets `self.model`, `self.tokenizer` and the extras from `self.model_config`."""
        raise NotImplementedError(f"{type(self).__name__} must define load.")

    def setup(self) -> None:
        self._copies: dict[str, ComputingCopy] = {}
        self._frozen: frozenset[str] = frozenset()  # names in a state; no process needs them sent
        try:
            self.load()
            source = self.model_config["pretrained_model"]
            self._processor_files = processor_files(source) if is_multimodal(self.model) else {}
        except AttributeError as error:
            # RLlib takes an AttributeError for a module with an outdated constructor and hides it.
            raise RuntimeError(f"{type(self).__name__}.load failed: {error}") from error
        if self.computing_dtype is None and self.model_config.get("float32_products") == "onednn":
            use_onednn(self)
        use_kernel(self, self.model_config.get("attn_implementation", "sdpa"))
        if self.inference_only and self.computing_dtype is not None:
            cast_parameters_(self.model, self.computing_dtype, self.float32_parts())

    # --- precision ---------------------------------------------------------------------------

    @property
    def computing_dtype(self) -> torch.dtype | None:
        """The dtype of the models' computations under `mixed_precision`; None: their own."""
        return computing_dtype(self.model_config.get("mixed_precision"))

    @property
    def computing_model(self) -> Any:
        """The model that computes: `self.model`, or the copy of it in mixed precision."""
        return self.computing("model")

    def computing(self, name: str) -> Any:
        """The model that computes in place of the attribute `name`, "model" or "critic"."""
        return self._copies[name].model if name in self._copies else getattr(self, name)

    def make_computing_copies(self) -> None:
        """Creates the copies that compute under `mixed_precision`. Called by the trainer once the
        weights are on their device; `cast_weights` follows every step."""
        if self.computing_dtype is None:
            return
        for name in ("model", "critic"):
            if hasattr(self, name):
                weights, keep = getattr(self, name), self.float32_parts()
                self._copies[name] = ComputingCopy(weights, self.computing_dtype, keep)

    def float32_parts(self) -> list[nn.Module]:
        """Parts of the models that compute in float32 in mixed precision as well."""
        return []

    def cast_weights(self) -> None:
        """Copies the weights into the computing copies."""
        for made in self._copies.values():
            made.cast()

    # --- modes -------------------------------------------------------------------------------

    def forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, torch.Tensor]:
        """As RLlib's, but in train mode only where gradients are taken: dropout is for these."""
        self.train(torch.is_grad_enabled())
        return super(TorchRLModule, self).forward_train(batch, **kwargs)

    def train(self, mode: bool = True) -> HuggingFaceModule:
        """As torch's, the copies too; but of the models' parts only dropout and layers that compute
        their activations again are ever in train mode: some models add noise to their routing in
        it (PhiMoE samples its experts), and log-probs would be of another policy each time."""
        super().train(mode)
        models = [part for part in self.children() if isinstance(part, PreTrainedModel)]
        for model in (*models, *(made.model for made in self._copies.values())):
            for part in model.modules():
                is_used = isinstance(
                    part, nn.modules.dropout._DropoutNd | GradientCheckpointingLayer
                ) or getattr(part, "gradient_checkpointing", False)
                part.training = mode and is_used
        return self

    # --- memory and speed --------------------------------------------------------------------

    def save_memory(self, *models: Any) -> None:
        """Enables gradient checkpointing, if set."""
        if self.model_config.get("gradient_checkpointing") and not self.inference_only:
            settings: dict[str, Any] = {"use_reentrant": False}
            if self.model_config.get("routing_replay"):
                settings["context_fn"] = lambda: routed_again(self.computing_model)
            for model in models:
                model.gradient_checkpointing_enable(settings)

    def compile(self, compile_config: TorchCompileConfig) -> None:
        """Compiles each layer of the trunk separately, since the code around them depends on a
        batch's lengths. Learners do so under `framework(torch_compile_learner=True)`."""
        copies = (made.model.modules() for made in self._copies.values())
        for layer in itertools.chain(self.modules(), *copies):
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile(
                    backend=compile_config.torch_dynamo_backend,
                    mode=compile_config.torch_dynamo_mode,
                    **compile_config.kwargs,
                )

    def freeze_towers(self) -> None:
        """Excludes what a multimodal model has beside its text decoder from training, unless
        `train_vision` is set."""
        if has_adapters(self.model):
            return
        others, trains = other_tensors(self.model), bool(self.model_config.get("train_vision"))
        require(bool(others) or not trains, "train_vision", True, "be False for this model",
                f"{type(self.model).__name__} reads text alone")  # fmt: skip
        if not trains:
            self._frozen = frozenset(TRUNK + name for name in others)
            for tensor in others.values():
                tensor.requires_grad_(False)

    # --- state -------------------------------------------------------------------------------

    def get_state(
        self, components=None, *, not_components=None, inference_only: bool = False, **kwargs
    ) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, detached, in their own dtype, sharing memory with the
        module; `inference_only` leaves out the module's extras (value head, critic)."""
        own = self.own_tensors().items()
        return gather({n: t for n, t in own if not inference_only or n.startswith(TRUNK)})

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a state by name: all, without those that never change where the module
        only samples; if the trunk has adapters, only these."""
        everything = self.state_dict(keep_vars=True)
        if not has_adapters(self.model):
            unchanged = self._frozen if self.inference_only else frozenset()
            return {name: t for name, t in everything.items() if name not in unchanged}
        return {n: t for n, t in everything.items() if not n.startswith(TRUNK) or is_adapter(n)}

    def published_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that samplers receive: those that compute the policy and change, by their
        names in a state."""
        copy = self._copies.get("model")
        return {
            name: tensor if copy is None else copy.copy_of(tensor)
            for name, tensor in self.own_tensors().items()
            if name.startswith(TRUNK) and name not in self._frozen
        }

    def published_state(self, *, gathers: bool = True) -> dict[str, torch.Tensor]:
        """`published_tensors`, detached and sharing memory with the module, shards cast as they are
        when they compute: gathered, or this learner's share of them, see `shards.own_parts`."""
        tensors, dtype = self.published_tensors(), self.computing_dtype
        state = gather(tensors) if gathers else own_parts(tensors)
        if dtype is None or not is_sharded(self.model):
            return state
        cast: dict[int, torch.Tensor] = {}  # tied stay one
        for name, tensor in state.items():
            if isinstance(tensors[name], nn.Parameter) and id(tensors[name]) not in cast:
                cast[id(tensors[name])] = tensor.to(dtype)
        return {name: cast.get(id(tensors[name]), tensor) for name, tensor in state.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Copies `state` into the parameters in place; absent extras and frozen parts stay.

        Raises:
            ValueError: a parameter of this module is missing from `state` or has another shape.
        """
        own = self.own_tensors()
        has_extras = any(not name.startswith(TRUNK) for name in state)
        wanted = {name for name in own if has_extras or name.startswith(TRUNK)}
        wanted -= self._frozen - set(state)
        given = {name: torch.as_tensor(state[name]) for name in wanted & set(state)}
        wrong = [n for n in sorted(wanted) if n not in given or given[n].shape != own[n].shape]
        if wrong:
            why = f"{len(wrong)} parameters are missing or have another shape, first {wrong[0]!r}"
            raise ValueError(f"the state was saved from another architecture: {why}")
        with torch.no_grad():
            for name, source in given.items():
                write_(own[name], source)
        self.cast_weights()

    def save_pretrained(
        self, folder: str | Path, *, state: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Writes trunk (or adapters), tokenizer and extra tensors as a folder.

        `state`: what `get_state` gave, which a caller with shards must pass.
        """
        state = self.get_state() if state is None else state
        trunk = {n.removeprefix(TRUNK): t for n, t in state.items() if n.startswith(TRUNK)}
        self._name_pad_token(self.model)
        with quiet_transformers():
            if has_adapters(self.model):
                save_adapters(self.model, trunk, folder, self._adapter_base())
            elif is_sharded(self.model):
                # Of tied tensors, which may have come as copies, the first is written.
                own = {id(t): n for n, t in reversed(self.own_tensors().items())}
                first = {n: t for n, t in trunk.items() if TRUNK + n in own.values()}
                self.model.save_pretrained(folder, state_dict=first)
            else:
                self.model.save_pretrained(folder)
            self._save_tokenizer(folder)
        extras = {n: t.contiguous().cpu() for n, t in state.items() if not n.startswith(TRUNK)}
        if extras:
            save_file(extras, str(Path(folder) / EXTRAS_FILE))

    def export_pretrained(
        self, folder: str | Path, *, state: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Writes an ordinary Hugging Face folder, adapters merged into the trunk."""
        if not has_adapters(self.model):
            self.save_pretrained(folder, state=state)
            return
        state = self.get_state(inference_only=True) if state is None else state
        trunk = {n.removeprefix(TRUNK): t for n, t in state.items() if n.startswith(TRUNK)}
        base = self._adapter_base()
        plain = load_causal_lm(base.model, dtype=base.dtype)
        merge_into(plain, self.model, trunk)
        self._name_pad_token(plain)
        with quiet_transformers():
            plain.save_pretrained(folder)
            self._save_tokenizer(folder)

    def export_adapters(self, folder: str | Path, *, state: dict[str, torch.Tensor]) -> None:
        """Writes the adapters alone as peft's files, for others who have the trunk."""
        adapters = {n.removeprefix(TRUNK): t for n, t in state.items() if is_adapter(n)}
        write_adapters(adapters, self.model_config["lora"], folder)

    def _save_tokenizer(self, folder: str | Path) -> None:
        """Writes the tokenizer and, of a multimodal model, the files of its processor."""
        self.tokenizer.save_pretrained(folder)
        for name, content in self._processor_files.items():
            if name != CHAT_TEMPLATE or self.model_config.get("chat_template") is None:
                (Path(folder) / name).write_bytes(content)

    def _name_pad_token(self, model: PreTrainedModel) -> None:
        """The folder's model pads as its tokenizer does, which other tools ask its config."""
        text = text_config(model)
        for config in (model.config, text, getattr(model, "generation_config", None)):
            if config is not None and getattr(config, "pad_token_id", 0) is None:
                config.pad_token_id = self.tokenizer.pad_token_id

    def _adapter_base(self) -> AdapterBase:
        config = self.model_config
        bits = config.get("quantization", "none")
        return AdapterBase(config["pretrained_model"], bits, config["dtype"])

    def load_pretrained(self, folder: str | Path) -> None:
        """Loads what `save_pretrained` wrote into this module.

        Raises:
            FileNotFoundError: `folder` holds no model.
            ValueError: it holds another architecture.
        """
        own, files = self.own_tensors(), sorted(Path(folder).glob("model*.safetensors"))
        if has_adapters(self.model):
            read = read_adapters(folder, self.model)
        elif files:
            read = {name: t for file in files for name, t in load_file(str(file)).items()}
        else:
            raise FileNotFoundError(f"checkpoint={str(folder)!r} must hold model.safetensors")
        state = {TRUNK + name: tensor for name, tensor in read.items()}
        for tied, source in _tied_names(own).items():
            state.setdefault(tied, state.get(source))
        extras = Path(folder) / EXTRAS_FILE
        if extras.exists():
            state.update(load_file(str(extras)))
        self.set_state(state)

    def save_to_path(self, path=None, *, state=None, filesystem=None, use_msgpack=False) -> str:
        """RLlib's checkpoint of this module: its metadata and a Hugging Face folder."""
        path = super().save_to_path(
            path, state={FORMAT_KEY: FORMAT_VERSION}, filesystem=filesystem, use_msgpack=use_msgpack
        )
        # Shards were gathered by the learners, who gave their state; else it is read here.
        self.save_pretrained(path, state=state if is_sharded(self.model) else None)
        return path

    def restore_from_path(self, path, *, component=None, filesystem=None, **kwargs) -> None:
        self.load_pretrained(path)


def _tied_names(own: dict[str, torch.Tensor]) -> dict[str, str]:
    """The names of tied tensors: each name -> the other name of the same tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in own.items():
        other = first.setdefault(local_data(tensor).data_ptr(), name)
        if other != name:
            tied[name], tied[other] = other, name
    return tied
