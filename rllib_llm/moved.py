"""Old names of modules that have moved: older checkpoints, YAML files and imports still work."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# Old room -> (new room, its modules; `old=new` where the file has another name).
_MOVED = {
    "": {"algorithms.settings": "config_schema=schema"},
    "learners": {
        "numerics": "advantages kl losses scores",
    },
    "modules": {
        "numerics": "token_stats",
        "modules.packing": (
            "dense_packing fused_layers llama_shape llama_trunk lm_head logprobs "
            "packed_attention packing sequence_scores token_batches trunk"
        ),
        "modules": "reward_model=reward_model_module",
    },
    "sampling": {
        "engines": (
            "check_inputs completions continuous=decoder cuda_graph decode_step decode_weights "
            "decoder engine external_engine kv_cache llama_step noise "
            "openai_engine=openai_completions params row_budget static_step token_sampling "
            "vllm_engine"
        ),
        "rollouts": (
            "collect env_runner errors faults generation=policy request samplers=sampler_pool"
        ),
    },
    "envs": {
        "envs.judges": (
            "judge_server reward_functions reward_model=frozen_reward_model reward_texts rewards"
        ),
        "envs.toys": (
            "arithmetic reviews reviews_grammar reviews_lexicon reviews_model reviews_sentences"
        ),
        "envs.checks": "check_env check_findings check_judging",
        "envs": "completions=checked_completions",
    },
    "algorithms": {
        "algorithms.settings": "checks engine_checks no_effect placement rlhf_checks",
        "checkpoints": "checkpoint_folder=folder whole_checkpoints=whole",
        "tune": "broken_trials hung_trials json_rows samples setup_watch",
    },
    "cli": {
        "checkpoints": "checkpoints=finding model_folder",
        "tune": (
            "loggers=wandb_logger result_files=result_log resumable_pbt search_space trial_logs"
        ),
        "experiments": (
            "algorithms check_sources overrides plan report scheduling stage_result stages "
            "yaml_experiments yaml_loader"
        ),
        "reports": "before_after live_table metrics_view plot",
        "": "errors=user_errors",
    },
}


def _new_names() -> dict[str, str]:
    names = {}
    for old_room, rooms in _MOVED.items():
        for new_room, modules in rooms.items():
            for module in modules.split():
                old, _, new = module.partition("=")
                path = ".".join(filter(None, ("rllib_llm", new_room, new or old)))
                names[".".join(filter(None, ("rllib_llm", old_room, old)))] = path
    return names


NEW_NAMES = _new_names()
# Rooms that are gone: their names are packages without content.
_GONE = {"rllib_llm.sampling"}


class _MovedModules(MetaPathFinder, Loader):
    """Imports a moved module under its old name, with a warning that names the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _GONE:
            return ModuleSpec(fullname, self, is_package=True)
        return ModuleSpec(fullname, self) if fullname in NEW_NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name in _GONE:
            return None
        new = NEW_NAMES[spec.name]
        warnings.warn(
            f"{spec.name} is called {new} now; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module(new)

    def exec_module(self, module: ModuleType) -> None:
        """The module was executed under its new name, and keeps the specification it has there:
        the import under its old name has just put another in its place."""
        if module.__name__ not in _GONE:
            module.__spec__ = PathFinder.find_spec(
                module.__name__, sys.modules[module.__name__.rpartition(".")[0]].__path__
            )


def forward_old_names() -> None:
    """Let old module names be imported in this process; calling it again changes nothing."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
