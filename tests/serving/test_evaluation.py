"""A run's policy evaluated through the server is what the run says of itself."""

from __future__ import annotations

import pytest
from ray.rllib.algorithms import Algorithm

from rllib_llm.serving.http_server import open_service
from rllib_llm.serving.settings import ServeSettings
from tests.algorithms import tiny_runs as tiny
from tests.serving.tiny_server import running

pytestmark = pytest.mark.usefixtures("ray_session")


TEXTS = {"extra_body": {"return_token_ids": True}}
TOKENS = {"endpoint": "tokens"}


@pytest.mark.parametrize(
    ("duration", "how", "settings"), [(6, {}, TEXTS), (9, {"explore": True}, TOKENS)],
    ids=["greedy, by texts", "sampled, by tokens"],
)  # fmt: skip
def test_evaluation_through_the_server_equals_evaluation_in_the_run(
    tmp_path, duration, how, settings
):
    config = tiny.grpo().evaluation(
        evaluation_interval=1, evaluation_duration=duration, evaluation_config=how
    )
    with tiny.built(config) as algorithm:
        algorithm.train()
        in_run = algorithm.train()["eval"]
        algorithm.save_to_path(str(tmp_path / "checkpoint"))
    service = open_service(
        ServeSettings(model=str(tmp_path / "checkpoint"), name="run", engine_process=False)
    )
    with running(service) as address:
        server = {"base_url": f"{address}/v1", "served_model": "run@0.0", **settings}
        asked = {**how, "engine": "openai", "engine_settings": server}
        changed = config.copy(copy_frozen=False).evaluation(evaluation_config=asked)
        restored = Algorithm.from_checkpoint(str(tmp_path / "checkpoint"), config=changed)
        try:
            restored.evaluate()
            served = restored.eval_metrics
        finally:
            restored.stop()
    names = [name for name in in_run if name.startswith(("scores", "rewards", "output_length"))]
    assert len(names) > 2
    assert {name: served[name] for name in names} == {name: in_run[name] for name in names}
