"""What the configs and algorithms of all stages share: the model, the optimiser, micro-batches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from pyarrow.fs import LocalFileSystem
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics import LEARNER_RESULTS
from ray.util.debug import log_once

from rllib_llm.algorithms.settings.checks import (
    check_adapters,
    check_cuts,
    check_optimiser,
    check_precision,
    check_timeout,
    given,
)
from rllib_llm.algorithms.settings.no_effect import warn_of_no_effect
from rllib_llm.algorithms.settings.placement import require_places
from rllib_llm.checkpoints.folder import make_readable
from rllib_llm.checkpoints.started_in import in_its_folder
from rllib_llm.checkpoints.whole import WholeCheckpoints
from rllib_llm.listening import Listener, Message
from rllib_llm.modules.tokenizer import load_tokenizer, read_chat_template
from rllib_llm.tracebacks import explains_itself
from rllib_llm.tune.headline import HEADLINE, with_headline
from rllib_llm.tune.messages import MessageLog
from rllib_llm.tune.setup_watch import is_trial, killed_after

# Where a checkpoint of ours holds the trained model, as an ordinary Hugging Face folder.
MODEL_IN_CHECKPOINT = Path("learner_group", "learner", "rl_module", DEFAULT_MODULE_ID)


class LanguageModelConfig(AlgorithmConfig):
    """Settings of every stage; subclasses add their own in `.training(...)`."""

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        self.enable_rl_module_and_learner = True
        self.enable_env_runner_and_connector_v2 = True
        self.pretrained_model: str | None = None
        self.chat_template: str | None = None
        self.dtype = "float32"
        self.autocast_dtype: str | None = None
        self.gradient_checkpointing = False
        self.lora: dict[str, Any] | None = None
        self.quantization = "none"
        self.learner_strategy = "ddp"
        self.lr = 1e-5
        self.lr_schedule = "constant"
        self.lr_num_warmup_updates = 0
        self.lr_num_updates: int | None = None
        self.adam_betas = (0.9, 0.999)
        self.adam_epsilon = 1e-5
        self.weight_decay = 0.0
        self.grad_clip = 1.0
        self.grad_clip_by = "global_norm"
        self.num_epochs = 1
        self.minibatch_size: int | None = None
        self.minibatch_tokens: int | None = None
        self.micro_batch_size: int | None = None
        self.micro_batch_tokens: int | None = 16_384
        self.refused_batch_dir: str | None = None
        self.learner_timeout_s: float | str | None = "auto"
        self.setup_timeout_s: float | None = 7200.0
        self._started_in: str | None = None  # folder that relative paths in settings mean
        self.seed = 0
        # The local learner and sampler share one process with the driver.
        self.num_cpus_for_main_process = 1

    # Settings of a base class that this algorithm does not use.
    ignored_settings: tuple[str, ...] = ()
    trains_adapters = True  # whether `lora` can be set

    def language_model(
        self,
        *,
        model: str = NotProvided,
        chat_template: str | None = NotProvided,
        dtype: str = NotProvided,
        autocast_dtype: str | None = NotProvided,
        gradient_checkpointing: bool = NotProvided,
        lora: dict[str, Any] | None = NotProvided,
        quantization: str = NotProvided,
    ):
        """Sets what the model starts from and what of it is trained.

        Args:
            model: a Hugging Face folder, a hub id, or the dotted path of a function that returns
                (model, tokenizer). It gives tokenizer and weights. In YAML simply `model:`.
            chat_template: how conversations become text, where the tokenizer does not say or says
                it otherwise: a Jinja file, or the template itself. It is saved with the model.
            dtype: of the weights being trained: "float32" (default; optimiser steps below about
                1e-3 of a weight are lost in bfloat16) or "bfloat16".
            autocast_dtype: "bfloat16" has matrix products done in it, in the sampler as well, while
                weights, gradients and optimiser stay in `dtype`; None (default): nothing changes.
            gradient_checkpointing: keep only the layers' inputs for the backward pass and compute
                the rest again: less memory for about a third more time.
            lora: {r, alpha, dropout, target_modules, ...} trains adapters on the frozen model
                (`modules/lora.py`); {} is r=16, alpha=32 on all linear layers; None: all weights.
            quantization: of the frozen model under adapters (QLoRA): "none", "int8" or "nf4".
        """
        values = {**locals(), "model": NotProvided}  # RLlib keeps something else under `model`
        self._assign(values, LanguageModelConfig.language_model)
        if model is not NotProvided:
            self.pretrained_model = model
        return self

    def learners(self, *, strategy: str = NotProvided, **kwargs):
        """As RLlib's; in YAML the strategy is `learner_strategy:`.

        Args:
            strategy: what several learners (`num_learners` >= 2) hold. "ddp" (default): each the
                whole model. "fsdp": each a share of weights, gradients and optimiser (FSDP2), a
                layer being gathered while it computes. The numbers are the same.
        """
        if strategy is not NotProvided:
            self.learner_strategy = strategy
        return super().learners(**kwargs)

    def fault_tolerance(
        self,
        *,
        learner_timeout_s: float | str | None = NotProvided,
        setup_timeout_s: float | None = NotProvided,
        **kwargs,
    ):
        """Settings of what happens to processes that die or hang; RLlib's own are passed on.

        Args:
            learner_timeout_s: seconds after which a learner that has not answered (an update, a
                state, an export) ends the run with an error, so that Tune can restart it. "auto"
                (default): ten times the slowest answer of its kind so far and at least 120 s,
                1800 s for the first. Set a number to notice a hang sooner, None to wait for ever.
            setup_timeout_s: seconds after which a trial that is not set up is killed, so that Tune
                can restart it; two hours by default, None: never.
        """
        super().fault_tolerance(**kwargs)
        self._assign(locals(), LanguageModelConfig.fault_tolerance)
        return self

    def build_learner_group(
        self, *, env=None, spaces=None, rl_module_spec=None, placement_group=None
    ):
        """As RLlib's, with a group that can read shards."""
        from rllib_llm.learners.learner_group import LanguageModelLearnerGroup

        if rl_module_spec is None:
            rl_module_spec = self.get_multi_rl_module_spec(env=env, spaces=spaces)
        return LanguageModelLearnerGroup(
            config=self.copy(), module_spec=rl_module_spec, placement_group=placement_group
        )

    def training(
        self,
        *,
        lr_schedule: str = NotProvided,
        lr_num_warmup_updates: int = NotProvided,
        lr_num_updates: int | None = NotProvided,
        adam_betas: tuple[float, float] = NotProvided,
        adam_epsilon: float = NotProvided,
        weight_decay: float = NotProvided,
        minibatch_tokens: int | None = NotProvided,
        micro_batch_size: int | None = NotProvided,
        micro_batch_tokens: int | None = NotProvided,
        refused_batch_dir: str | None = NotProvided,
        **kwargs,
    ):
        """Settings of the optimiser and of how a batch is cut; RLlib's own are passed on.

        `lr` is the peak learning rate, `train_batch_size_per_learner` the rows (completions,
        texts or pairs) of one iteration, `minibatch_size` the rows of one optimiser step per
        learner (None: all), `num_epochs` the passes over them, `grad_clip` the largest global
        gradient norm.

        Args:
            lr_schedule: "constant" (default), "linear" or "cosine" decay to 0, after warm-up.
            lr_num_warmup_updates: n optimiser steps of linear warm-up; step u (from 0) takes
                (u + 1)/(n + 1) of `lr`, so that none is wasted at 0 as transformers' first is.
            lr_num_updates: optimiser steps at which the decay reaches 0.
            adam_betas, adam_epsilon, weight_decay: of AdamW; epsilon 1e-5 as in the original
                RLHF code (vwxyzjn, "The N implementation details of RLHF with PPO"). Norms and
                biases do not decay, as in transformers' Trainer.
            minibatch_tokens: instead of minibatch_size: tokens (prompt and completion, without
                padding) of one optimiser step per learner; rows are many where they are short.
            micro_batch_size: rows whose activations are held at a time; gradients are the same.
            micro_batch_tokens: the same as a budget of tokens, padding included (default 16384;
                rows of like length go together). Set None to use micro_batch_size.
            refused_batch_dir: where a mini-batch with a non-finite loss is written; None: a new
                folder among the system's temporary files, named in the log.
        """
        if micro_batch_size is not NotProvided and micro_batch_size is not None:
            self.micro_batch_tokens = None
        if minibatch_tokens is not NotProvided and minibatch_tokens is not None:
            self.minibatch_size = None
        super().training(**kwargs)
        self._assign(locals(), LanguageModelConfig.training)
        return self

    def _assign(self, values: dict[str, Any], method) -> None:
        """Sets the keyword arguments of `method` that were given as attributes."""
        for name in method.__kwdefaults__ or {}:
            if values[name] is not NotProvided:
                setattr(self, name, values[name])

    def update_from_dict(self, config_dict: dict[str, Any]):
        """As RLlib's; `model: <folder, hub id or dotted path>` is what `language_model` sets."""
        config_dict = dict(config_dict)
        if "model" in config_dict and not isinstance(config_dict["model"], dict):
            config_dict["pretrained_model"] = config_dict.pop("model")
        if config_dict.get("micro_batch_size") is not None:
            config_dict.setdefault("micro_batch_tokens", None)
        if config_dict.get("minibatch_tokens") is not None:
            config_dict.setdefault("minibatch_size", None)
        return super().update_from_dict(config_dict)

    def to_dict(self) -> dict[str, Any]:
        """As RLlib's, without what is so by default: Tune, which takes a config as this dict,
        prints, logs and stores what was set, as it does with the settings of a YAML file."""
        settings = super().to_dict()
        defaults = AlgorithmConfig.to_dict(type(self)())
        return {
            key: value
            for key, value in settings.items()
            if key not in defaults or not _same(value, defaults[key])
        }

    def module_class(self) -> type:
        """The RLModule class that this stage trains."""
        raise NotImplementedError(f"{type(self).__name__} must define module_class.")

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=self.module_class())

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {
            "pretrained_model": self.pretrained_model,
            "chat_template": self.chat_template,
            "dtype": self.dtype,
            "autocast_dtype": self.autocast_dtype,
            "gradient_checkpointing": self.gradient_checkpointing,
            "lora": self.lora,
            "quantization": self.quantization,
            "seed": self.seed or 0,
        }

    def validate(self) -> None:
        """Checks every setting that can be checked without loading a model.

        Raises:
            ValueError: naming the setting, the rule, the reason and a remedy.
        """
        # RLlib greets every algorithm on its new API stack; there is no other stack here.
        log_once(f"{self.algo_class.__name__}_on_new_api_stack")
        super().validate()
        self.given_model()
        if self.chat_template is not None:
            text = read_chat_template(self.chat_template)
            if text != self.chat_template:  # workers and later runs need not find the file
                self.chat_template = text
        check_optimiser(self)
        check_cuts(self)
        check_precision(self)
        check_adapters(self)
        check_timeout("learner_timeout_s", self.learner_timeout_s)
        check_timeout("setup_timeout_s", self.setup_timeout_s, auto=False)
        warn_of_no_effect(self)

    def load_tokenizer(self) -> Any:
        """The model's tokenizer, with `chat_template` where one is set."""
        return load_tokenizer(self.given_model(), chat_template=self.chat_template)

    def given_model(self) -> str:
        """`pretrained_model`, which must be set.

        Raises:
            ValueError: it is not.
        """
        return given(
            self.pretrained_model,
            "model",
            "a Hugging Face folder, a hub id or the dotted path of a function",
            "the policy starts from pretrained weights",
            "Set model: in YAML or .language_model(model=...)",
        )


def _processes(config: AlgorithmConfig) -> str:
    """The processes that an algorithm starts beside its own."""
    counts = {"sampler": config.num_env_runners or 0, "learner": config.num_learners or 0}
    parts = [f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n]
    return f", starting {' and '.join(parts)}" if parts else ""


def _same(value: Any, other: Any) -> bool:
    """Whether two settings are equal; what cannot be compared is not."""
    return value is other or (type(value) is type(other) and bool(value == other))


class LanguageModelAlgorithm(WholeCheckpoints):
    """An algorithm whose checkpoints hold its model as a Hugging Face folder, and whose results
    carry the field's known metric names at the top."""

    _progress_metrics = (*HEADLINE, "episode")  # what Tune shows of a trial's last result
    config: LanguageModelConfig

    def __init__(self, config: Any = None, env: Any = None, **kwargs: Any):
        settings = self.get_default_config() if config is None else config
        seconds = None
        self._listener: Listener | None = None
        self._message_log: MessageLog | None = None
        if is_trial():
            self._listener = Listener("trial")
            default = self.get_default_config().setup_timeout_s
            seconds = settings.get("setup_timeout_s", default)
            # Relative paths in settings mean the folder in which Ray's processes start, the
            # script's, in samplers too; Tune would move this one elsewhere.
            os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
        with killed_after(seconds), self._listening():
            super().__init__(config=config, env=env, **kwargs)
        self.doing("starting an iteration")

    def __repr__(self) -> str:
        return type(self).__name__  # in Ray's messages

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Notes what this process says while a block runs, if it is a trial's: in a script or a
        notebook it is seen anyway."""
        if self._listener is None:
            yield
            return
        try:
            with self._listener:
                yield
        except ValueError as error:
            if not explains_itself(error):
                raise
            # Places in Ray and here would bury the sentence.
            raise error.with_traceback(None) from error.__cause__
        finally:
            self.tell(self._listener.take())

    def tell(self, messages: list[Message]) -> None:
        """Writes messages to the trial's folder, from where the command shows warnings."""
        if self._message_log is not None:
            self._message_log.write(messages, self.iteration + 1)

    def doing(self, activity: str) -> None:
        """Notes what a trial does from now on, for those who wait for it."""
        if self._listener is not None and self._message_log is not None:
            self._message_log.doing(activity)

    def setup(self, config) -> None:
        self.known_metrics: dict[str, Any] = {}  # of the latest iteration, nested by group
        self.eval_metrics: dict[str, float] | None = None  # the latest held-out results
        self.eval_env_runner_group = None
        self._message_log = MessageLog(self.trial_folder)
        if self._listener is not None:
            self._listener.take()  # what settings warn of was said where they were given
        self.doing(f"loading models{_processes(self.config)}")
        self.config = in_its_folder(self.config)
        require_places(self.config)
        super().setup(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Starts anew under `new_config` in the same process, as a new trial would (Tune's
        `reuse_actors`, which spares starting a process and importing what it needs)."""
        kept = {
            name: value
            for name, value in vars(self).items()
            if name == "_trial_info" or name.startswith(("_stdout", "_stderr"))
        }
        self.cleanup()
        type(self).__init__(self, config=new_config, storage=self._storage)
        self.__dict__.update(kept)
        return True

    @property
    def trial_folder(self) -> Path:
        """Where this run's files go: the trial's own folder where Tune keeps it on this disk,
        else the log folder, which Tune uploads with `SyncConfig(sync_artifacts=True)`."""
        storage = getattr(self, "_storage", None)
        if storage is not None and isinstance(storage.storage_filesystem, LocalFileSystem):
            return Path(storage.trial_fs_path)
        return Path(self.logdir)

    def learner_metrics(self) -> dict[str, dict[str, float]]:
        """The learners' latest means, `group/name` nested by group; the rest under ''."""
        groups: dict[str, dict[str, float]] = {}
        for name, value in self.metrics.peek((LEARNER_RESULTS, DEFAULT_MODULE_ID)).items():
            group, _, leaf = name.rpartition("/")
            groups.setdefault(group, {})[leaf] = float(value)
        return groups

    def update_learners(self, columns: dict[str, Any], num_rows: int) -> None:
        """Gives every learner the whole batch; each takes its share of every mini-batch."""
        self.has_begun_to_learn = True
        batch = MultiAgentBatch({DEFAULT_MODULE_ID: SampleBatch(columns)}, env_steps=num_rows)
        if self.learner_group.is_local:
            results = self.learner_group.update(batch=batch)
        else:
            refs = [ray.put(batch)] * self.config.num_learners
            results = self.learner_group.update(batch_refs=refs)
        self.metrics.aggregate(results, key=LEARNER_RESULTS)

    def step(self) -> dict[str, Any]:
        """RLlib's result plus the known names, and the latest held-out results under `eval`."""
        with self._listening():
            results = super().step()
        for name, value in self.known_metrics.items():
            if isinstance(value, dict):
                results[name] = {**results.get(name, {}), **value}
            else:
                results[name] = value
        if self.eval_metrics is not None:
            results["eval"] = dict(self.eval_metrics)
        return with_headline(results)

    def cleanup(self) -> None:
        self.doing("")
        super().cleanup()

    def export_model(self, folder: str | Path) -> Path:
        """Writes the model as it is now to `folder`, as `from_pretrained` reads it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = str(folder.resolve())
        results = self.learner_group.foreach_learner(lambda learner: learner.export_model(path))
        errors = [result.get() for result in results if not result.ok]
        if errors:
            raise errors[0]
        make_readable(folder)
        return folder
