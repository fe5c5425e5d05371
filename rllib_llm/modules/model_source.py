"""Sources of models: local folders, Hugging Face hub ids, dotted paths."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError

from rllib_llm.shared.dotted import import_dotted
from rllib_llm.shared.errors import SettingError
from rllib_llm.shared.storage import is_url, local_copy

logger = logging.getLogger(__name__)

FOLDER, HUB, DOTTED = "folder", "hub", "dotted"
ALLOWED = (
    "a local folder that holds config.json and weights, a hub id such as 'org/name', or a dotted "
    "path 'package.module.function' to a function returning (model, tokenizer)"
)
NUM_ATTEMPTS = 3
FIRST_DELAY_S = 1.0
# The hub client has retries of its own; past this time further ones only keep the user waiting.
RETRY_BUDGET_S = 20.0

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_POLICY_FOLDER = os.path.join("learner_group", "learner", "rl_module", "default_policy")
_TRANSIENT_ERRNO = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT}

T = TypeVar("T")


class ModelSourceError(SettingError):
    """A `model` setting from which no model can be loaded."""

    def __init__(self, model: Any, reason: str, remedy: str, *, name: str = "model"):
        super().__init__(name=name, value=model, rule=f"be {ALLOWED}", reason=reason, remedy=remedy)


def source_kind(model: str | os.PathLike, *, name: str = "model") -> tuple[str, str]:
    """Returns (kind, value): kind is "folder", "hub" or "dotted"; `~` is expanded, and a URL's
    contents are copied into a folder.

    `name` is the setting to blame in messages. A hub is not asked.

    Raises:
        ModelSourceError: an empty or mistyped value, a file, a missing folder, or a folder
            without config.json.
    """
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        reason = "it is empty" if model == "" else f"it is a {type(model).__name__}"
        raise ModelSourceError(model, reason, "Give the name as text", name=name)
    value = os.path.expanduser(os.fspath(model))
    if is_url(value):
        value = str(local_copy(value))
    if os.path.isdir(value):
        _check_folder(value, name)
        return FOLDER, value
    if os.path.exists(value):
        raise ModelSourceError(model, "it is a file", "Name the folder that holds it", name=name)
    if _DOTTED.fullmatch(value):
        return DOTTED, value
    if not _HUB_ID.fullmatch(value):
        raise ModelSourceError(
            model,
            f"there is no such folder (looked in {os.getcwd()!r})",
            "Check the path; write it absolute if the run starts elsewhere",
            name=name,
        )
    return HUB, value


def _check_folder(folder: str, name: str) -> None:
    held = sorted(os.listdir(folder))
    if "config.json" in held:
        return
    if "adapter_config.json" in held:
        reason = "it holds a PEFT adapter without its base model"
        remedy = "Merge it (PeftModel.merge_and_unload) and save the result with save_pretrained"
    elif os.path.isdir(os.path.join(folder, _POLICY_FOLDER)):
        reason = "it is an RLlib checkpoint, which holds the model further inside"
        remedy = f"Use {os.path.join(folder, _POLICY_FOLDER)!r}"
    else:
        shown = ", ".join(held[:6]) or "nothing"
        reason = f"the folder has no config.json (it holds {shown})"
        remedy = "Save model and tokenizer there with save_pretrained, or name the right folder"
    raise ModelSourceError(folder, reason, remedy, name=name)


def build_from_dotted(path: str, *, name: str = "model") -> tuple[Any, Any]:
    """Calls the function at `path` and returns its (model, tokenizer).

    Every process calls it again, for the policy as for the reference, and all must get the same
    weights: torch's CPU random state is set to a fixed seed for the call and restored after it.

    Raises:
        DottedPathError: nothing of that name can be imported.
        ModelSourceError: it is no function, or returns something else.
    """
    function = import_dotted(path, name=name)
    if not callable(function):
        raise ModelSourceError(
            path, f"it names a {type(function).__name__}", "Name a function", name=name
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        built = function()
    is_pair = isinstance(built, (tuple, list)) and len(built) == 2
    if not is_pair or not isinstance(built[0], torch.nn.Module):
        got = [type(part).__name__ for part in built] if is_pair else type(built).__name__
        raise ModelSourceError(
            path, f"the function returned {got}", "Return (model, tokenizer)", name=name
        )
    return built[0], built[1]


def load_with_retries(
    load: Callable[[], T],
    model: str,
    kind: str,
    *,
    name: str = "model",
    first_delay_s: float = FIRST_DELAY_S,
    offline: bool = hub_constants.HF_HUB_OFFLINE,
) -> T:
    """Returns load(), called again where the failure may pass, after a delay that doubles.

    offline: the hub may not be asked, so that what is not in the local cache never will be.

    Raises:
        ModelSourceError: it failed for good; the cause is chained.
    """
    start = time.monotonic()
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            return load()
        except ModelSourceError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            transient = not offline and _is_transient(error)
            waited = time.monotonic() - start
            if not transient or attempt == NUM_ATTEMPTS or waited > RETRY_BUDGET_S:
                reason, remedy = _explain(error, model, kind, attempt, transient, offline)
                raise ModelSourceError(model, reason, remedy, name=name) from error
            delay = first_delay_s * 2 ** (attempt - 1)
            logger.warning(
                "Loading %s=%r failed (attempt %d of %d): %s. Trying again in %.0f s.",
                name, model, attempt, NUM_ATTEMPTS, _first_line(error), delay,
            )  # fmt: skip
            time.sleep(delay)
    raise AssertionError("the loop above returns or raises")


def _explain(
    error: Exception, model: str, kind: str, attempt: int, transient: bool, offline: bool
) -> tuple[str, str]:
    """(reason, remedy) of a failure that is final."""
    if kind == FOLDER:
        return (
            f"the folder cannot be loaded ({_first_line(error)})",
            "Save model and tokenizer there again with save_pretrained",
        )
    if transient or offline:
        how = "it is not in the local cache and HF_HUB_OFFLINE is set"
        if transient:
            how = f"the hub could not be reached ({attempt} attempts; {_first_line(error)})"
        return (
            f"there is no such folder (looked in {os.getcwd()!r}) and {how}",
            f"Give a local folder (hf download {model} --local-dir FOLDER, on a machine with "
            "network), or fill the cache there and set HF_HUB_OFFLINE=1",
        )
    return (
        f"there is no such folder (looked in {os.getcwd()!r}) and the hub answered: "
        f"{_first_line(error)}",
        "Check the spelling; for private or gated models run hf auth login",
    )


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
    return f"{type(error).__name__}: {text}".rstrip(".:")
