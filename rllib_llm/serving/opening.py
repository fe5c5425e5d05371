"""A service made from its settings."""

from __future__ import annotations

import logging

from rllib_llm.checkpoints.model_folder import find_model
from rllib_llm.modules.pretrained import load_tokenizer
from rllib_llm.serving.engine_host import EngineHost, open_thread
from rllib_llm.serving.engine_process import EngineProcess
from rllib_llm.serving.service import Service
from rllib_llm.serving.settings import ServeSettings


def show_log() -> None:
    """Writes what the server logs, a line of JSON for each request, to standard error."""
    parent = logging.getLogger("rllib_llm.serving")
    if not parent.handlers:
        parent.addHandler(logging.StreamHandler())
    parent.setLevel(logging.INFO)
    parent.propagate = False


def open_service(settings: ServeSettings) -> Service:
    """Loads the model that the settings name: a checkpoint, trial, Hugging Face folder or hub id,
    or the dotted path of a function.

    Raises:
        UserError: the folder holds no model.
        ModelSourceError: nothing can be loaded from it.
    """
    source = find_model(settings.model)
    tokenizer = load_tokenizer(source, chat_template=settings.chat_template)
    host: EngineHost
    if settings.engine_process:
        host = EngineProcess(settings, source)
    else:
        host = open_thread(settings, source)
    return Service(host, tokenizer, settings, source=source)
