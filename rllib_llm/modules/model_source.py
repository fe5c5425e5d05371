"""Sources of models (local folders, Hugging Face hub ids, dotted paths), and what can be read of
one without loading its weights: context length, vocabulary, size.
"""

from __future__ import annotations

import errno
import inspect
import json
import logging
import math
import os
import pickle
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import Problems, require
from rllib_llm.shared.messages import raised
from rllib_llm.shared.storage import folder_like, is_url, local_copy

logger = logging.getLogger(__name__)

FOLDER, HUB, DOTTED = "folder", "hub", "dotted"
ALLOWED = (
    "a local folder with config.json and weights, a hub id such as 'org/name', or a dotted path "
    "'package.module.function' to a function returning (model, tokenizer)"
)
OFFLINE = "it is not in the local cache and HF_HUB_OFFLINE is set"
# Of files that are missing, cut short or hold something else: RuntimeError, EOFError,
# UnpicklingError and TypeError are of weights in torch's own format.
_FAILURES = (
    OSError, ValueError, SafetensorError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError
)  # fmt: skip
NUM_ATTEMPTS = 3
FIRST_DELAY_S = 1.0
# The hub client retries, too; past this time further ones only keep the user waiting.
RETRY_BUDGET_S = 20.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHT_FILES = (".gguf", ".safetensors", ".ckpt")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_POLICY_FOLDER = os.path.join("learner_group", "learner", "rl_module", "default_policy")
_TRANSIENT_ERRNO = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT}

T = TypeVar("T")


def no_model(model: Any, reason: str, remedy: str = "", name: str = "model") -> Problems:
    """The error for a setting, `name`, from which no model can be loaded."""
    return Problems(name, f"be {ALLOWED}", reason, remedy, model)


def source_kind(model: str | os.PathLike, *, name: str = "model") -> tuple[str, str]:
    """Returns (kind, value): kind is "folder", "hub" or "dotted"; `~` is expanded, and a URL's
    contents are copied into a folder.

    `name` is the setting to blame in messages. A hub is not asked.

    Raises:
        Problems: an empty or mistyped value, a file, a missing folder, a folder without
            config.json, or, where the hub may not be asked, a hub id that is not in the local
            cache.
    """
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        reason = "it is empty" if model == "" else f"it is a {type(model).__name__}"
        raise no_model(model, reason, name=name)
    value = os.path.expanduser(os.fspath(model))
    if is_url(value):
        value = str(local_copy(value))
    wrong: tuple[str, str] | None = None
    if os.path.isdir(value):
        kind, wrong = FOLDER, _why_no_model(value)
    elif os.path.exists(value) or value.endswith(_WEIGHT_FILES):
        wrong = "it is the name of a file", "Name the folder that holds it; GGUF is not read"
    elif _DOTTED.fullmatch(value):
        kind = DOTTED
    elif not _HUB_ID.fullmatch(value):
        remedy = did_you_mean_folder(value) or "Check the path"
        wrong = f"there is no folder {os.path.abspath(value)!r}", remedy
    else:
        kind = HUB
        if hub_constants.HF_HUB_OFFLINE and not is_cached(value):
            wrong = _nowhere(value, OFFLINE)
    if wrong is not None:
        raise no_model(model, *wrong, name)
    return kind, value


def did_you_mean_folder(model: str) -> str:
    """A question with the folder beside `model`, which is none, whose name is nearest; "" without
    one. Not for what is in the local cache."""
    close = "" if is_cached(model) else folder_like(Path(model))
    return f"Did you mean {close!r}?" if close else ""


def is_cached(hub_id: str, kind: str = "model") -> bool:
    """Whether something of a repository, a "model" or a "dataset", is in the local cache."""
    folder = "--".join([f"{kind}s", *hub_id.split("/")])
    return os.path.isdir(os.path.join(hub_constants.HF_HUB_CACHE, folder, "snapshots"))


def _why_no_model(folder: str) -> tuple[str, str] | None:
    """(reason, remedy) for a folder that holds no model; None if it holds one."""
    held, policy = sorted(os.listdir(folder)), os.path.join(folder, _POLICY_FOLDER)
    if "config.json" in held:
        return None
    if "adapter_config.json" in held:
        remedy = "Merge it (PeftModel.merge_and_unload) and save the result"
        return "it holds a PEFT adapter without its base model", remedy
    if os.path.isdir(policy):
        return "it is an RLlib checkpoint", f"Use {policy!r}"
    reason = f"the folder has no config.json (it holds {', '.join(held[:6]) or 'nothing'})"
    return reason, "Save model and tokenizer there with save_pretrained"


def build_from_dotted(path: str) -> tuple[Any, Any]:
    """The model and tokenizer, also that of a processor, of the function at `path`; see
    `call_dotted`."""
    network, reader = call_dotted(path)
    return network, reader.tokenizer if hasattr(reader, "image_processor") else reader


def call_dotted(path: str) -> tuple[Any, Any]:
    """Calls the function at `path` and returns its (model, tokenizer or processor).

    Every process calls it again, for the policy as for the reference, and all must get the same
    weights: torch's CPU random state is set to a fixed seed for the call and restored after it.

    Raises:
        Problems: nothing of that name can be imported, it is no function, or returns something
            else.
    """
    function = import_dotted(path, name="model")
    try:
        inspect.signature(function).bind()
    except TypeError as error:  # it is no function, or needs arguments
        raise no_model(path, str(error), "Name a function without arguments") from error
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            built = function()
        except Exception as error:
            raise no_model(path, raised(error)) from error
    is_pair = isinstance(built, (tuple, list)) and len(built) == 2
    if not is_pair or not isinstance(built[0], torch.nn.Module):
        got = [type(part).__name__ for part in built] if is_pair else type(built).__name__
        raise no_model(path, f"the function returned {got}")
    return built[0], built[1]


def load_with_retries(
    load: Callable[[], T], model: str, kind: str, *,
    first_delay_s: float = FIRST_DELAY_S, offline: bool = hub_constants.HF_HUB_OFFLINE,
) -> T:  # fmt: skip
    """Returns load(), called again where the failure may pass, after a delay that doubles.

    offline: the hub may not be asked, so that what is not in the local cache never will be.

    Raises:
        Problems: it failed for good; the cause is chained.
    """
    start, attempt = time.monotonic(), 0
    while True:
        attempt += 1
        try:
            return load()
        except (Problems, torch.OutOfMemoryError):
            raise
        except _FAILURES as error:
            transient = not offline and _is_transient(error)
            waited = time.monotonic() - start
            if not transient or attempt == NUM_ATTEMPTS or waited > RETRY_BUDGET_S:
                if kind == FOLDER:
                    found = _unreadable(error, model)
                elif transient:
                    why = f"the hub could not be reached (attempt {attempt}: {_first_line(error)})"
                    found = _nowhere(model, why)
                elif offline:
                    found = _nowhere(model, OFFLINE)
                else:
                    access = "Check the spelling; for private or gated models run hf auth login"
                    found = _nowhere(model, f"the hub answered: {_first_line(error)}", access)
                raise no_model(model, *found) from error
            delay = first_delay_s * 2 ** (attempt - 1)
            logger.warning(
                "Loading model=%r failed (attempt %d of %d): %s. Trying again in %.0f s.",
                model, attempt, NUM_ATTEMPTS, _first_line(error), delay,
            )  # fmt: skip
            time.sleep(delay)


def _unreadable(error: Exception, folder: str) -> tuple[str, str]:
    """(reason, remedy) of a folder that cannot be loaded."""
    if "backend tokenizer" in str(error):
        held = ", ".join(sorted(os.listdir(folder))[:6])
        return f"the folder has no tokenizer (it holds {held})", "Save it there, too"
    # The first line of torch's own recommends to run what the file holds.
    is_pickle = isinstance(error, pickle.UnpicklingError)
    why = "its weights are no pickle of tensors alone" if is_pickle else _first_line(error)
    return f"the folder cannot be loaded ({why})", "Save model and tokenizer there again"


def _nowhere(model: str, why: str, access: str = "") -> tuple[str, str]:
    """(reason, remedy) for a hub id that is neither a folder nor available from the hub."""
    access = access or (
        f"Give a local folder (hf download {model} --local-dir FOLDER, on a machine with "
        "network), or fill the cache there and set HF_HUB_OFFLINE=1"
    )
    reason = f"there is no such folder (looked in {os.getcwd()!r}) and {why}"
    return reason, f"{did_you_mean_folder(model)} {access}".lstrip()


def _is_transient(error: BaseException) -> bool:
    """True where the same call may succeed a moment later."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(
            seen, (ConnectionError, TimeoutError, socket.gaierror, LocalEntryNotFoundError)
        ):
            return True
        if isinstance(seen, HfHubHTTPError):
            status = getattr(seen.response, "status_code", None)
            return status is None or status == 429 or status >= 500
        if isinstance(seen, OSError) and seen.errno in _TRANSIENT_ERRNO:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}".rstrip(".: ")


def num_embeddings(model: str | os.PathLike) -> int:
    """Rows of the model's embedding, all of which it may sample; often more than tokens."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        network: Any = build_from_dotted(value)[0]
        return network.get_input_embeddings().num_embeddings
    return text_config(model).vocab_size


def num_positions(model: str | os.PathLike) -> int | None:
    """Tokens that the model reads at most, each row whatever the others of its batch are; None
    where its config names no limit."""
    config = text_config(model)
    limits = (getattr(config, "max_position_embeddings", None), longrope_border(config))
    return min((limit for limit in limits if limit is not None), default=None)


def longrope_border(config: Any) -> int | None:
    """Positions up to which longrope keeps to its short factors; None for other embeddings. Beyond
    it one longer row has all rows of its batch rotated by other factors."""
    settings = getattr(config, "rope_parameters", None) or {}
    # One dictionary, or one for each type of layer.
    each = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    borders = [
        part.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        for part in each
        if part.get("rope_type") == "longrope"
    ]
    return min((border for border in borders if border is not None), default=None)


def model_config(model: str | os.PathLike) -> Any:
    """The config of `model` (folder, hub id or dotted path)."""
    kind, value = source_kind(model)
    if kind == DOTTED:
        return build_from_dotted(value)[0].config
    return load_with_retries(lambda: AutoConfig.from_pretrained(value), value, kind)


def text_config(source: Any) -> Any:
    """The config of what writes text in `source`: a model setting, a model or its config."""
    if isinstance(source, (str, os.PathLike)):
        source = model_config(source)
    return getattr(source, "config", source).get_text_config(decoder=True)


def is_multimodal(source: Any) -> bool:
    """Whether the config of what writes text is only a part of the config of `source`, a model or
    its config."""
    config = getattr(source, "config", source)
    return text_config(config) is not config


REFERENCE, TEACHER = "reference.model", "teacher"  # settings of models beside the policy
_OTHERWISE = {
    REFERENCE: "Leave reference out",
    TEACHER: "Take a teacher of the same family, or train on its texts with SFT",
}


def check_vocabulary(
    setting: str, model: str | os.PathLike, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises Problems where the model of a setting, `REFERENCE` or `TEACHER`, reads the policy's
    `tokenizer` otherwise; see `vocabulary_difference`."""
    difference = vocabulary_difference(model, tokenizer, "its")
    require(not difference, setting, str(model), "have the vocabulary of the policy", difference,
            _OTHERWISE[setting])  # fmt: skip


def vocabulary_difference(
    model: str | os.PathLike, tokenizer: PreTrainedTokenizerBase, whose: str
) -> str:
    """The first id of `tokenizer` that `model` reads as another token, or has no embedding for, as
    a clause about `whose` token it is; "" without one.

    A model without a tokenizer is asked for the number of its embeddings alone.
    """
    vocabulary, own = tokenizer.get_vocab(), _tokens_by_id(model)
    for i, token in sorted((i, token) for token, i in vocabulary.items()):
        if own.get(i, token) != token:
            return f"{whose} token {i} is {own[i]!r}, not {token!r}"
    rows, largest = num_embeddings(model), max(vocabulary.values())
    return f"{whose} largest id is {rows - 1}, not {largest}" if largest >= rows else ""


def _tokens_by_id(model: str | os.PathLike) -> dict[int, str]:
    """The token of each id in the model's own tokenizer; {} without one."""
    kind, value = source_kind(model)
    try:
        tokenizer: Any = (
            build_from_dotted(value)[1]
            if kind == DOTTED
            else load_with_retries(lambda: AutoTokenizer.from_pretrained(value), value, kind)
        )
    except Problems:
        return {}
    return {i: token for token, i in tokenizer.get_vocab().items()}


def check_lengths(
    positions: int | None, *, max_prompt_len: int, max_new_tokens: int,
    model: str = "the model", longest_prompt: int | None = None,
) -> None:  # fmt: skip
    """Raises ValueError where prompt and completion can be longer than `positions`.

    `longest_prompt`: tokens of the longest prompt of the data, where that is known: shorter ones
    need no room for `max_prompt_len`.
    """
    longest = min(max_prompt_len, longest_prompt or max_prompt_len)
    if positions is None or longest + max_new_tokens <= positions:
        return
    reason = f"{model} reads {positions} tokens, of prompt and completion together"
    if longest_prompt:
        reason = f"the longest prompt has {longest_prompt} tokens, and {reason}"
    require(positions > max_new_tokens, "max_new_tokens", max_new_tokens,
            f"be at most {positions - min(longest, positions - 1)}", reason)  # fmt: skip
    rule = f"be at most {positions - max_new_tokens} with max_new_tokens={max_new_tokens}"
    raise Problems("env_config.max_prompt_len", rule, reason, value=max_prompt_len)


class TruncatedWeightsError(Problems):
    """A safetensors file that ends before its tensors do."""


def num_elements(file: Path) -> int:
    """The number of elements in a safetensors file, from its header.

    Raises:
        TruncatedWeightsError: the file is shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, size))
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise _truncated(file, size, 8 + length)
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    needed = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    if size < needed:
        raise _truncated(file, size, needed)
    return sum(math.prod(entry["shape"]) for entry in tensors)


def num_parameters(folder: str | os.PathLike) -> int | None:
    """Parameters of the model in `folder`; None without safetensors files."""
    files = sorted(Path(folder).expanduser().glob("*.safetensors"))
    return sum(num_elements(file) for file in files) if files else None


def _truncated(file: Path, size: int, needed: int) -> TruncatedWeightsError:
    rule = f"have at least {needed} bytes, as its header says"
    return TruncatedWeightsError("truncated", rule, f"it has {size}", "Copy it again", str(file))
