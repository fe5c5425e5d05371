"""`rllib export`: a trained model as a folder of its own, or on Hugging Face's hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rllib_llm.cli.session import new_folder, user_errors
from rllib_llm.shared.errors import Problems, require

HUB = "hub:"


def export(
    run: Annotated[str, Argument(help="Folder or URL of a run, a stage, a trial or a checkpoint.")],
    to: Annotated[str, Option("--to", help="A new FOLDER, or hub:OWNER/NAME.")],
    private: Annotated[bool, Option(
        "--private", help="A new repository on the hub is seen by its owner alone.")] = False,
) -> None:  # fmt: skip
    """Write a run's model with its card, adapters merged, to a folder or to the hub.

    The hub takes the token of `hf auth login`, or HF_TOKEN.
    """
    with user_errors():
        from rllib_llm.checkpoints.folder import find_model
        from rllib_llm.runs.results import copy_model

        source = Path(find_model(run))
        rule = "be the folder of a run, stage, trial or checkpoint"
        require(source.is_dir(), "run", run, rule, "it is not there", "Check the path")
        if not to.startswith(HUB):
            folder = new_folder("--to", to, "files of another model would mix with these")
            copy_model(source, folder)
            print(folder)
            return
        from huggingface_hub import HfApi, errors

        hub = HfApi()
        refused = errors.HfHubHTTPError, errors.HFValidationError, errors.LocalTokenNotFoundError
        with tempfile.TemporaryDirectory() as made:
            copy_model(source, Path(made))
            try:
                address = hub.create_repo(to.removeprefix(HUB), private=private, exist_ok=True)
                hub.upload_folder(repo_id=address.repo_id, folder_path=Path(made),
                                  commit_message="Model and card from rllib_llm")  # fmt: skip
            except (*refused, OSError) as error:
                raise Problems("--to", "be a repository that you may write to",
                               " ".join(str(error).split()),
                               "Log in with `hf auth login`, or set HF_TOKEN", to
                               ) from error  # fmt: skip
        print(address)
