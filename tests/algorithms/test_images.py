"""Runs whose prompts show images: samplers and learners see the same, wherever they are."""

from __future__ import annotations

import pytest

from rllib_llm import GRPOConfig, PPOPtxConfig
from rllib_llm.shared import columns
from tests.data.test_image_prompts import image, saved, says_shade

pytestmark = pytest.mark.usefixtures("ray_session")

ROWS = [{"image": image(shade), "prompt": "c?", "shade": shade} for shade in (0, 255)]
ROWS += [{"image": None, "prompt": "c?", "shade": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("gemma3"))


def run(config, folder):
    """Metrics of the learners in the first iteration, and the batch that they were given."""
    algorithm = (
        config.language_model(model=str(folder))
        .rewards(functions=[says_shade])
        .sampling(max_new_tokens=3, num_completions=4)
        .training(lr=1e-3, train_batch_size_per_learner=12, minibatch_size=12, ref_kl_coeff=0.1)
        .build_algo()
    )
    given, update = [], algorithm.update_learners
    algorithm.update_learners = lambda batch, *args: given.append(batch) or update(batch, *args)
    try:
        return algorithm.train(), given[0]
    finally:
        algorithm.stop()


SETTINGS = {
    "here": {},
    "remote": {"num_env_runners": 1},
    "lockstep": {"max_staleness": 1, "schedule": "lockstep"},
    "streams": {"max_staleness": 1, "schedule": "free"},
    "streams from afar": {
        "max_staleness": 1, "schedule": "free", "in_flight": "recompute", "num_env_runners": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n != "here" else n
                                  for n in SETTINGS])  # fmt: skip
def test_learners_see_what_samplers_saw(name, folder):
    settings = dict(SETTINGS[name])
    config = GRPOConfig().prompts(data=ROWS, max_prompt_len=32)
    config.env_runners(num_env_runners=settings.pop("num_env_runners", 0))
    if settings:
        config = config.streaming(**settings).training(off_policy="decoupled")
    results, batch = run(config, folder)
    # The same weights give the same log-probs, if they see the same.
    assert results["sampler"]["logprob_gap"] < 1e-5
    assert abs(results["objective"]["kl"]) < 1e-4  # of a reference that sees it, too
    rows = batch[columns.IMAGE_ROW]
    assert len(rows) == 12 and len(batch["image/pixel_values"]) == int(rows.max()) + 1 <= 3
    groups = batch[columns.GROUP].tolist()
    assert len({*zip(groups, rows.tolist(), strict=True)}) == len({*groups})


@pytest.mark.slow
@pytest.mark.parametrize("num_samplers", [0, 2])
def test_each_of_several_environments_shows_its_own(num_samplers, folder):
    """A conversation beside single completions, one of them in the second sampler alone."""
    chats = [{**row, "prompt": [{"role": "user", "content": "c?"}]} for row in ROWS]
    own = {"num_env_runners": 1} if num_samplers else {}
    config = GRPOConfig().env_runners(num_env_runners=num_samplers).environments(
        chats={"env": "rllib_llm/Conversation-v0", "env_config": {
            "prompts": chats, "reward_functions": [says_shade]}, **own},
        light={"prompts": {"data": ROWS[1:2], "max_prompt_len": 32}, "weight": 2, **own},
    )  # fmt: skip
    results, batch = run(config, folder)
    assert {*batch[columns.ENVIRONMENT].tolist()} == {0, 1}
    assert results["sampler"]["logprob_gap"] < 1e-5
    assert abs(results["objective"]["kl"]) < 1e-4


@pytest.mark.slow
def test_conversations_are_learnt_with_their_images(folder):
    rows = [{**row, "prompt": [{"role": "user", "content": "c?"}]} for row in ROWS]
    config = GRPOConfig().environment("rllib_llm/Conversation-v0", env_config={"prompts": rows})
    results, batch = run(config, folder)
    assert results["sampler"]["logprob_gap"] < 1e-5
    assert len(batch["image/pixel_values"]) <= 3


@pytest.mark.slow
def test_values_and_pretraining_texts_see_images(folder):
    texts = [{"image": image(9), "prompt": "c?", "completion": "ab"}]
    config = PPOPtxConfig().prompts(data=ROWS, max_prompt_len=32)
    config = config.training(critic="shared", ptx_coeff=1.0, ptx_data=texts, ptx_batch_size=2,
                             ptx_max_length=64)  # fmt: skip
    results, _ = run(config, folder)
    assert results["sampler"]["logprob_gap"] < 1e-5
    assert 0 < results["loss"]["ptx_avg"] < 100
