"""The base AlgorithmConfig of all stages: model, optimiser, mini-batches.

Some settings are left to the hardware, and decided where a run begins: `mixed_precision: "auto"` is
bf16 where learners have it; `float32_products: "auto"` is the library that is faster on this kind
of processor.

    config ("auto") ─▶ here: "bf16" or None ─▶ said, built, kept in every checkpoint
                                                                │
                    elsewhere, perhaps other hardware: what the checkpoint says ◀─┘
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.util.debug import log_once

from rllib_llm.config.model import (
    FAULT_TOLERANCE,
    LANGUAGE_MODEL,
    LEARNERS,
    OPTIMISER,
    adapter_rules,
    optimiser_rules,
    precision_rules,
)
from rllib_llm.config.sections import (
    Rule,
    SectionMethod,
    defaults,
    given,
    known_names,
    section_names,
)
from rllib_llm.config.tabled_config import OWN_ENVS, TabledConfig
from rllib_llm.data.sources import OF_CONFIG, OF_ENV, check_source
from rllib_llm.modules.precision import cuda_multiplies_bfloat16, faster_library
from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problem, errors_of, refusals, report, require
from rllib_llm.shared.process import multiplies_bfloat16
from rllib_llm.shared.setting import Section

logger = logging.getLogger(__name__)
AUTO = "auto"
DECIDED = ("mixed_precision", "float32_products")  # the settings that may be "auto"


def decided(config: Any, on_processor: Callable[[], bool] = multiplies_bfloat16) -> str | None:
    """The resolved `mixed_precision` of a config on its learners' hardware: "bf16" or None.

    on_processor: says whether this machine's processor multiplies bfloat16.
    """
    if config.mixed_precision != AUTO:
        return config.mixed_precision
    if not config.num_gpus_per_learner:
        return "bf16" if on_processor() else None
    if not config.num_learners:
        return "bf16" if cuda_multiplies_bfloat16() else None
    # This process need not see the GPUs that learners will have.
    ask = ray.remote(num_cpus=0, num_gpus=config.num_gpus_per_learner)(cuda_multiplies_bfloat16)
    return "bf16" if ray.get(ask.remote()) else None


def frozen_with(config: Any, **settings: Any) -> Any:
    """A frozen copy of `config` with these settings."""
    config = config.copy(copy_frozen=False)
    for name, value in settings.items():
        setattr(config, name, value)
    config.freeze()
    return config


def with_decided_precision(config: Any) -> Any:
    """A frozen copy of `config` with "auto" precision resolved for this machine; logs the
    choice."""
    if config.float32_products == AUTO:
        config = frozen_with(config, float32_products=faster_library())
        logger.info("float32_products='auto' is %r in this run.", config.float32_products)
    if config.mixed_precision != AUTO:
        return config
    config = frozen_with(config, mixed_precision=decided(config))
    where = "GPU" if config.num_gpus_per_learner else "processor"
    what = (
        f"'bf16' in this run: the {where} multiplies bfloat16 faster than float32"
        if config.mixed_precision
        else f"None in this run, all in {config.dtype}: the {where} would emulate bfloat16"
    )
    warnings.warn(
        f"mixed_precision='auto' is {what}. It stays so wherever the run goes on.", stacklevel=2
    )
    return config


class LanguageModelConfig(TabledConfig):
    """Settings of every stage that trains a model; subclasses add sections of their own."""

    sections: tuple[Section, ...] = (LANGUAGE_MODEL, OPTIMISER, LEARNERS, FAULT_TOLERANCE)
    minibatch_size: int | None
    chat_template: str | None
    template_settings: dict[str, Any] | None
    trains_adapters = True  # whether `lora` can be set
    # The classes of RLModule and Learner, or their dotted paths.
    module_path: str | type | None = None
    learner_path: str | type | None = None

    language_model = SectionMethod()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        require(
            not hasattr(cls, "module_class"), f"{cls.__name__}.module_class", ...,
            "be called module_path", "nothing reads it by this name",
            "Write module_path = MyRLModule, or its dotted path",
        )  # fmt: skip

    def __init__(self, algo_class=None):
        super().__init__(algo_class=algo_class)
        self.enable_rl_module_and_learner = True
        self.enable_env_runner_and_connector_v2 = True
        self._started_in: str | None = None  # folder that relative paths in settings mean
        self._overseer: tuple[str, str] | None = None  # folder of the Tune run, and the trial
        self.seed = 0
        # The local learner and sampler share one process with the driver.
        self.num_cpus_for_main_process = 1

    @classmethod
    def algorithms_with(cls, name: str) -> list[str]:
        # Here, since it is asked for a name that is wrong.
        from rllib_llm.algorithms.registry import ALGORITHMS, get_algorithm_class

        configs = {each: get_algorithm_class(each).get_default_config() for each in ALGORITHMS}
        names = {
            each: {*known_names(type(c)), *section_names(type(c))} for each, c in configs.items()
        }
        return [each for each in ALGORITHMS if name in names[each]]

    def implied(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Turns off one of two settings that express the same in different units, if the other is
        given."""
        follows = dict(super().implied(given))
        if given.get("micro_batch_size") is not None:
            follows["micro_batch_tokens"] = None
        return follows

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

    def sampler_configs(self) -> list[Any]:
        """The config of each group of samplers, its processes being `num_env_runners`."""
        return []

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=self._named("module_path", "an RLModule"))

    def get_default_learner_class(self) -> type:
        return self._named("learner_path", "a Learner")

    def build_algo(self, env: Any = None, use_copy: bool = True) -> Any:
        """As RLlib's, which would take the settings alone of a config of another class, drop those
        of -1, and end in a RecursionError where rows are nested deeper than Python copies them."""
        of_algorithm = type(self._algorithm().get_default_config())
        require(
            isinstance(self, of_algorithm), f"{type(self).__name__}.algo_class", self.algo_class,
            f"be an algorithm of this class of configs, and not of {of_algorithm.__name__}",
            "it would take the settings alone", f"Set config_class = {type(self).__name__} in it",
        )  # fmt: skip
        with self.copies():
            config = copy.deepcopy(self) if use_copy else self
        report(errors_of([*config.table_problems(), *config.missing_data()]))
        return super(LanguageModelConfig, config).build_algo(env, use_copy=False)

    def missing_data(self) -> Iterator[Problem]:
        """Problems of data that this process is to read, found without reading it: no such file, a
        key that is not known."""
        env = self.env_config if str(self.env).startswith(OWN_ENVS) else {}
        named = [(name, getattr(self, name, None)) for name in OF_CONFIG]
        named += [(f"env_config.{name}", env.get(name)) for name in OF_ENV]
        for name, data in named:
            yield from refusals(check_source, data, name=name) if data is not None else ()

    def _algorithm(self) -> Any:
        return given(
            self.algo_class, f"{type(self).__name__}.algo_class", "the Algorithm's class",
            "it is built from this config", "Give it to super().__init__(algo_class=...)",
        )  # fmt: skip

    def _named(self, name: str, kind: str) -> type:
        name, value = f"{type(self).__name__}.{name}", getattr(self, name)
        value = given(
            value, name, f"{kind}'s class or its dotted path", "the algorithm is made of it",
            f"Set it in the class, or derive {type(self).__name__} from the algorithm that it "
            "resembles",
        )  # fmt: skip
        return value if isinstance(value, type) else import_dotted(value, name=name)

    @property
    def _model_config_auto_includes(self) -> dict[str, Any]:
        return super()._model_config_auto_includes | {
            "pretrained_model": self.pretrained_model,
            "chat_template": self.chat_template,
            "template_settings": self.template_settings,
            "dtype": self.dtype,
            "mixed_precision": self.mixed_precision,
            "lm_head_float32": self.lm_head_float32,
            "float32_products": self.float32_products,
            "attn_implementation": self.attn_implementation,
            "gradient_checkpointing": self.gradient_checkpointing,
            "lora": self.lora,
            "quantization": self.quantization,
            "train_vision": self.train_vision,
            "seed": self.seed or 0,
        }

    def model_rules(self) -> Iterator[Problem]:
        """There is a model, and a learner for it."""
        self.given_model()
        named_by = next((c for c in type(self).__mro__ if vars(c).get("learner_path")), object)
        # This package's own are there, and take seconds to import.
        if self._learner_class is None and not named_by.__module__.startswith("rllib_llm."):
            self.get_default_learner_class()  # raises where the class names none
        if self.chat_template is not None:
            from rllib_llm.modules.tokenizer import read_chat_template

            # Workers and later runs need not find the file.
            self.chat_template = read_chat_template(self.chat_template)
        yield from ()

    rules: tuple[Rule, ...] = (model_rules, optimiser_rules, precision_rules, adapter_rules)

    def _settle(self) -> None:
        # A default mini-batch is no larger than the batch that somebody has chosen.
        rows, size = self.train_batch_size_per_learner, self.minibatch_size
        are_numbers = isinstance(rows, int) and isinstance(size, int)
        if are_numbers and 0 < rows < size == defaults(type(self)).minibatch_size:
            self.minibatch_size = rows

    def _check_by_rllib(self) -> None:
        # RLlib greets every algorithm on its new API stack; there is no other stack here.
        log_once(f"{self._algorithm().__name__}_on_new_api_stack")
        AlgorithmConfig.validate(self)

    def load_tokenizer(self) -> Any:
        """The model's tokenizer, with the chat template and its variables that are set."""
        from rllib_llm.modules.tokenizer import load_tokenizer

        return load_tokenizer(
            self.given_model(), chat_template=self.chat_template,
            template_settings=self.template_settings,
        )  # fmt: skip
