"""What RLModules around a Hugging Face model share: state, checkpoints, tied weights.

On disk such a module is an ordinary Hugging Face folder (config.json, model.safetensors,
tokenizer), with whatever RL adds to it in a second safetensors file beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ray.rllib.core.rl_module.torch.torch_rl_module import TorchRLModule
from safetensors.torch import load_file, save_file

from rllib_llm.modules.pretrained import quiet_transformers

TRUNK = "model."  # prefix of the Hugging Face model's parameters in a module's state
EXTRAS_FILE = "rl_heads.safetensors"  # value head, critic: what is not part of the model
FORMAT_KEY, FORMAT_VERSION = "rllib_llm_format", 1


class HuggingFaceModule(TorchRLModule):
    """A TorchRLModule whose trunk is `self.model`, with `self.tokenizer` beside it.

    Subclasses set both in `load()`. Parameters other than the trunk's are the module's extras.
    """

    def load(self) -> None:
        """Sets `self.model`, `self.tokenizer` and the extras from `self.model_config`."""
        raise NotImplementedError(f"{type(self).__name__} must define load.")

    def setup(self) -> None:
        try:
            self.load()
        except AttributeError as error:
            # RLlib takes an AttributeError for a module with an outdated constructor and hides it.
            raise RuntimeError(f"{type(self).__name__}.load failed: {error}") from error

    def get_state(
        self, components=None, *, not_components=None, inference_only: bool = False, **kwargs
    ) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, detached, in their own dtype, sharing memory with the
        module; `inference_only` leaves out the module's extras (value head, critic)."""
        return {
            name: tensor.detach()
            for name, tensor in self.state_dict(keep_vars=True).items()
            if not inference_only or name.startswith(TRUNK)
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Copies `state` into the parameters in place; names of absent extras are ignored.

        Raises:
            ValueError: a parameter of this module is missing from `state` or has another shape.
        """
        own = self.state_dict(keep_vars=True)
        wanted = set(own) if any(not name.startswith(TRUNK) for name in state) else {
            name for name in own if name.startswith(TRUNK)
        }
        missing = sorted(wanted - set(state))
        if missing:
            raise ValueError(
                f"state lacks {len(missing)} parameters, first {missing[0]!r}; it must hold every "
                "parameter of the module: it was saved from another architecture. "
                "Build the module from the same model folder."
            )
        with torch.no_grad():
            for name in wanted:
                source = torch.as_tensor(state[name])
                if source.shape != own[name].shape:
                    raise ValueError(
                        f"{name} has shape {tuple(source.shape)} in the state and must have "
                        f"{tuple(own[name].shape)}: it was saved from another architecture. "
                        "Build the module from the same model folder."
                    )
                if source.data_ptr() != own[name].data_ptr():
                    own[name].copy_(source)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the trunk and tokenizer as a Hugging Face folder, the extras beside them."""
        with quiet_transformers():
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        extras = {
            name: tensor.contiguous().cpu()
            for name, tensor in self.get_state().items()
            if not name.startswith(TRUNK)
        }
        if extras:
            save_file(extras, str(Path(folder) / EXTRAS_FILE))

    def load_pretrained(self, folder: str | Path) -> None:
        """Loads what `save_pretrained` wrote into this module.

        Raises:
            FileNotFoundError: `folder` holds no model.
            ValueError: it holds another architecture.
        """
        state = {TRUNK + name: tensor for name, tensor in _read_weights(Path(folder)).items()}
        own = self.state_dict(keep_vars=True)
        for tied, source in _tied_names(own).items():
            state.setdefault(tied, state.get(source))
        extras = Path(folder) / EXTRAS_FILE
        if extras.exists():
            state.update(load_file(str(extras)))
        self.set_state(state)

    def save_to_path(self, path=None, *, state=None, filesystem=None, use_msgpack=False) -> str:
        """RLlib's checkpoint of this module: its own metadata plus a Hugging Face folder."""
        path = super().save_to_path(
            path,
            state={FORMAT_KEY: FORMAT_VERSION},
            filesystem=filesystem,
            use_msgpack=use_msgpack,
        )
        self.save_pretrained(path)
        return path

    def restore_from_path(self, path, *, component=None, filesystem=None, **kwargs) -> None:
        self.load_pretrained(path)


def _tied_names(own: dict[str, torch.Tensor]) -> dict[str, str]:
    """Name -> another name of the same tensor, both ways, for tensors that are tied."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in own.items():
        other = first.setdefault(tensor.data_ptr(), name)
        if other != name:
            tied[name], tied[other] = other, name
    return tied


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    shards = sorted(folder.glob("model*.safetensors"))
    if not shards:
        raise FileNotFoundError(
            f"checkpoint={str(folder)!r} must hold model.safetensors: none was found. "
            "Pick a complete checkpoint; an interrupted one can be deleted."
        )
    return {name: tensor for shard in shards for name, tensor in load_file(str(shard)).items()}
