"""In which folder a trial of Tune works."""

from __future__ import annotations

import os

import pytest
import ray
from ray.train._internal.storage import StorageContext

from rllib_llm.algorithms.sft import SFT
from tests.algorithms import tiny_runs as tiny


class Idle(SFT):
    def setup(self, config):
        self.works_in = os.getcwd()


@ray.remote
class Process:
    """Of a trial, as Tune starts it where Ray runs without settings of ours."""

    def working_folder(self, storage, wanted: str | None) -> tuple[str, str]:
        started_in = os.getcwd()
        os.environ.pop("RAY_CHDIR_TO_TRIAL_DIR", None)
        if wanted is not None:
            os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = wanted
        return started_in, Idle(config=tiny.sft().to_dict(), storage=storage).works_in


@pytest.fixture
def storage(tmp_path):
    context = StorageContext(str(tmp_path), experiment_dir_name="run")
    context.trial_dir_name = "trial"
    return context


@pytest.mark.slow  # scripts in processes of their own
@pytest.mark.usefixtures("ray_session")
def test_relative_paths_mean_the_folder_of_the_script(storage):
    process = Process.remote()
    started_in, works_in = ray.get(process.working_folder.remote(storage, None))
    assert works_in == started_in
    started_in, works_in = ray.get(process.working_folder.remote(storage, "1"))
    assert works_in != started_in and works_in.endswith("trial")  # who asks for it gets Tune's
