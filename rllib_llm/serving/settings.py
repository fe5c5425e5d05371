"""How a server is set up: one class for the command's flags, the environment and a YAML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from rllib_llm.shared.errors import Problems, require, unknown_key
from rllib_llm.shared.setting import Setting, choices_of
from rllib_llm.shared.strict_yaml import read_text

ENVIRONMENT_PREFIX = "RLLIB_SERVE_"
_SECRETS = ("api_keys", "admin_key")
RATES = ("requests_per_minute", "tokens_per_minute")
ONE_REPLICA = (
    "must come with one replica: it would hold for that which a request happens to reach, since "
    "replicas share nothing. Leave it out, or set replicas=1 and no max_replicas"
)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServeSettings(BaseModel):
    """Every setting of `rllib serve`. Later sources win: YAML file, environment, flags."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)  # it may be a key

    model: str = Field(description="Checkpoint, trial, run, Hugging Face folder or hub id.")
    name: str | None = Field(None, description="Of the model in answers. Default: its folder's.")
    chat_template: str | None = Field(
        None, description="In place of the tokenizer's: file or text."
    )
    template_settings: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, where a request gives no others."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Of weights and arithmetic."
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1; auto: a GPU where there is one.")
    num_threads: int | None = Field(None, ge=1, description="Of arithmetic on a CPU.")
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "sdpa", description="Attention kernel, by its name in transformers, of prompts and of "
        "models that no step of ours decodes; the step of Llama-like ones is always SDPA.",
    )  # fmt: skip
    engine: Literal["torch", "vllm"] = Field(
        "torch", description="vllm: no grammars, likeliest tokens, log-probs of prompts or images; "
        "log-probs are of the distribution after temperature, penalties and truncation.",
    )  # fmt: skip
    engine_settings: dict[str, Any] = Field(
        {}, description="Arguments of vllm.LLM, such as tensor_parallel_size over several GPUs."
    )
    engine_process: bool = Field(
        True, description="The engine has a process of its own, which HTTP does not hold up."
    )

    max_rows: int = Field(64, ge=1, description="Completions sampled at once.")
    max_waiting: int = Field(256, ge=0, description="Further completions that may wait; then 429.")
    max_model_len: int | None = Field(
        None, ge=2, description="Tokens of prompt and completion. Default: what the model reads."
    )
    max_prompt_chars: int | None = Field(
        None, ge=1, description="Of a prompt; longer ones are refused before they are tokenised. "
        "Default: 16 for each token of max_model_len.",
    )  # fmt: skip
    default_max_tokens: int | None = Field(
        None, ge=1, description="Of a chat that names no limit. Default: what there is room for."
    )

    weights_name: str | None = Field(
        None, description="Follow the weights that a run publishes under this name."
    )
    lora: dict[str, Any] | None = Field(
        None, description="Of the run that is followed, where it trains adapters: they are merged "
        "into the model here.",
    )  # fmt: skip
    quantization: Literal["none", "int8", "nf4"] = Field(
        "none", description="Of that run's frozen model under its adapters."
    )
    in_flight: Literal["finish", "recompute", "keep"] = Field(
        "finish",
        description="When weights come, completions under way finish on theirs (needs a second "
        "copy of the model), have their cache recomputed, or keep it.",
    )
    weights_wait_s: float = Field(
        30.0, ge=0, description="Longest wait for X-Min-Weight-Version, seconds."
    )

    host: str = Field("127.0.0.1", description="Address; another than this machine's needs keys.")
    port: int = Field(8000, ge=0, le=65535, description="0: any free one.")
    api_keys_file: Path | None = Field(
        None, description="YAML: a list of {name, key, requests_per_minute, tokens_per_minute}."
    )
    api_keys: SecretStr | None = Field(
        None, description="Keys with a comma between them. For the environment."
    )
    admin_key: SecretStr | None = Field(
        None, description="Key of the administration, which is off without it. For the environment."
    )
    admin_key_file: Path | None = Field(None, description="File with the administration's key.")
    update_weights_folder: Path | None = Field(
        None, description="Weights that /update_weights names lie below this folder; without it "
        "that is off.",
    )  # fmt: skip
    requests_per_minute: float | None = Field(None, gt=0, description="Of a key that names none.")
    tokens_per_minute: float | None = Field(None, gt=0, description="Of a key that names none.")
    cors_origins: list[str] = Field([], description="Web pages of these origins may ask, too.")
    max_body_bytes: int = Field(4 * 1024**2, ge=1024, description="Of a request.")
    allowed_local_media_path: Path | None = Field(
        None, description="file:// addresses of images in chats name files below this folder; "
        "without it none is read.",
    )  # fmt: skip
    max_images: int = Field(8, ge=0, description="Of a request.")
    max_image_bytes: int = Field(8 * 1024**2, ge=1, description="Of an image as it comes.")
    max_image_pixels: int = Field(2**24, ge=1, description="Of an image: its width x height.")
    deadline_s: float = Field(600.0, gt=0, description="Longest time of a request, seconds.")
    slow_request_s: float = Field(
        20.0, gt=0, description="Longest time that a request takes to arrive, seconds."
    )
    slow_reader_s: float = Field(
        30.0, gt=0, description="Longest time that a client reads nothing of its answer, seconds."
    )
    drain_s: float = Field(30.0, ge=0, description="For answers under way when it stops, seconds.")
    log_prompts: bool = Field(False, description="Write prompts and answers into the log.")

    replicas: int = Field(1, ge=1, description="Copies of the server under Ray Serve.")
    max_replicas: int | None = Field(
        None, ge=1, description="Scale up to so many by completions under way and waiting."
    )
    autoscaling: dict[str, Any] = Field(
        {}, description="Further settings of Ray Serve's autoscaling, such as upscale_delay_s."
    )
    num_cpus: float = Field(1.0, ge=0, description="Of a replica under Ray Serve.")
    num_gpus: float = Field(0.0, ge=0, description="Of a replica under Ray Serve.")
    haproxy: bool | None = Field(
        None, description="Ray Serve's HAProxy in place of its Python proxy. It listens on all "
        "addresses: by default only where there are keys.",
    )  # fmt: skip

    @field_validator("api_keys_file", "admin_key_file")
    @classmethod
    def _is_there(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError("there is no such file")
        return file

    @model_validator(mode="after")
    def _keeps_rules(self) -> ServeSettings:
        of_one = ("admin_key", "admin_key_file", *RATES) if self.has_replicas else ()
        for broken, told in (
            (self.engine_settings and self.engine == "torch",
             "engine_settings must come with engine=vllm: ours has settings of its own"),
            *((name in self.engine_settings, f"engine_settings.{name} must be left out. Set {ours}")
              for name, ours in (("max_model_len", "max_model_len"), ("dtype", "dtype"),
                                 ("max_num_seqs", "max_rows"))),
            (self.attn_implementation != "sdpa" and self.engine == "vllm",
             "attn_implementation must come with engine=torch: vLLM has kernels of its own"),
            (self.lora is not None and self.weights_name is None,
             "lora must come with weights_name: without it nothing is merged"),
            (self.quantization != "none" and self.lora is None,
             "quantization must come with lora: without it nothing is merged"),
            (self.autoscaling and self.max_replicas is None,
             "autoscaling must come with max_replicas: else nothing is scaled"),
            *((f"{name}_replicas" in self.autoscaling,
               f"autoscaling.{name}_replicas must be left out. Set {ours}")
              for name, ours in (("min", "replicas"), ("max", "max_replicas"))),
            *((getattr(self, name) is not None, f"{name} {ONE_REPLICA}") for name in of_one),
        ):  # fmt: skip
            if broken:
                raise ValueError(told)
        return self

    @property
    def has_replicas(self) -> bool:
        """Whether a request may reach any of several copies, which share nothing."""
        return max(self.replicas, self.max_replicas or 1) > 1

    @property
    def served_name(self) -> str:
        """The model's name in answers."""
        return self.name or Path(self.model).name or self.model

    def for_replica(self) -> dict[str, Any]:
        """All that was set, secrets in plain text, to be handed to another process."""
        values = self.model_dump(exclude_defaults=True)
        secret = [name for name, value in values.items() if isinstance(value, SecretStr)]
        return values | {name: values[name].get_secret_value() for name in secret}

    def check_exposure(self, has_keys: bool) -> None:
        """Raises Problems for an address that others reach, without keys."""
        require(
            self.host in LOOPBACK or has_keys, f"host={self.host!r} must be one of {LOOPBACK} "
            "without API keys: others who reach the address could use the model. Set "
            f"api_keys_file, or {ENVIRONMENT_PREFIX}API_KEYS.", ..., "",
        )  # fmt: skip


def url_of(host: str, port: int) -> str:
    """The URL of a server; an IPv6 address stands in brackets there."""
    return f"http://[{host}]:{port}" if ":" in host and host[0] != "[" else f"http://{host}:{port}"


def check_without_keys(given: Mapping[str, Any], where: str, reason: str) -> None:
    """Raises Problems for keys themselves among settings that others can read.

    Args:
        where: what stands before a setting's name.
        reason: who can read them.
    """
    for name in _SECRETS:
        if given.get(name) is not None:
            raise Problems(
                f"{where}{name}=... must be left out: {reason}. Set "
                f"{ENVIRONMENT_PREFIX}{name.upper()} in the environment, or {name}_file.",
            )  # fmt: skip


def read_settings(
    given: Mapping[str, Any],
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServeSettings:
    """Reads the settings from all sources.

    Args:
        given: by flags, or as keyword arguments; None counts as not given.
        file: YAML with settings by name.
        environment: RLLIB_SERVE_<NAME>; lists have commas between their entries.

    Raises:
        Problems: an unknown or wrong setting, by name.
    """
    values: Any = {}
    if file is not None:
        values, problem = None, "it is not"
        try:
            values = read_text(file.read_text(encoding="utf-8"))
        except OSError as error:
            problem = str(error.strerror)
        except UnicodeDecodeError:
            problem = "it is no text in UTF-8"
        except yaml.YAMLError as error:  # PyYAML's words may show a key, as the line may
            mark = getattr(error, "problem_mark", None)
            problem = f"line {0 if mark is None else mark.line + 1} is not YAML"
        require(
            isinstance(values, dict), "config", str(file), "be a YAML file of settings by name",
            problem, "Write lines such as `port: 8000`",
        )  # fmt: skip
    for key, value in (os.environ if environment is None else environment).items():
        if key.startswith(ENVIRONMENT_PREFIX):
            name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
            values[name] = value.split(",") if name == "cors_origins" else value
    values |= {name: value for name, value in given.items() if value is not None}
    try:
        return ServeSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # a rule of several, which names them; what came holds the keys, too
            raise Problems(f"{problem}.") from error
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise Problems([unknown_key("", name, ServeSettings.model_fields)]) from error
        field, rule = ServeSettings.model_fields[str(first["loc"][0])], "be given"
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        is_missing, is_secret = first["type"] == "missing", "key" in name and "_file" not in name
        if not is_missing:
            bounds = {ours: getattr(each, theirs) for each in field.metadata
                      for ours, theirs in _BOUNDS.items() if hasattr(each, theirs)}  # fmt: skip
            kind = field.annotation
            row = Setting(name=name, type=kind, default=default, meaning="",
                          choices=choices_of(kind), **bounds)  # fmt: skip
            words = row.rule.replace("SecretStr", "text").replace("Path", "a path")
            is_told = first["type"] == "value_error" or len(first["loc"]) > 1
            rule = f"be corrected, {problem}" if is_told else f"be {words}"
        raise Problems(
            name, rule, str(field.description).rstrip("."),
            "Leave it out" if default is None else f"Write {default!r}, its default",
            ... if is_secret or is_missing else first["input"],
        ) from error  # fmt: skip


_BOUNDS = {"least": "ge", "above": "gt", "most": "le"}
