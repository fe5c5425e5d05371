"""Conversations whose first messages show images: what is read, sampled and learnt from."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import AutoProcessor

from rllib_llm.conversations.conversation import training_columns
from rllib_llm.engines.engine_loop import EngineLoop
from rllib_llm.engines.params import SamplingParams
from rllib_llm.engines.torch_engine import TorchEngine
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.conversation_rollouts import judge, run_rollouts
from rllib_llm.modules.images import files_text, images_of, with_images
from rllib_llm.modules.logprobs import score_completions
from rllib_llm.modules.pretrained import load_causal_lm
from rllib_llm.rollouts.conversation_sampler import completer
from rllib_llm.shared import columns
from tests.data.test_image_prompts import asked, image, saved


class Asks(ConversationEnv):
    """Asks once more, then ends."""

    def respond(self, conversation):
        if conversation.num_turns == 1:
            return Response("b?")
        return Response(done=True, reward=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("gemma3"))


@pytest.mark.parametrize(
    "task",
    [
        {"image": image(9), "prompt": "c?"},
        {"image": image(9), "messages": [{"role": "user", "content": "c?"}]},
        {"messages": [asked("c?", {"image": image(9)})]},
    ],
    ids=["text", "column", "part"],
)
def test_turns_are_sampled_and_learnt_with_the_images_of_the_first(task, folder):
    rows = [task, {"messages": [{"role": "user", "content": "a?"}], "image": None}]
    rows[1] = {"prompt": "a?"} if "prompt" in task else rows[1]
    reference = {"model": str(folder), "dtype": "float32"}
    env = Asks({"prompts": rows, "model": str(folder), "shuffle": False, "max_concurrent": 3,
                "reference": reference})  # fmt: skip
    model = load_causal_lm(str(folder), dtype="float32").eval()
    params = SamplingParams(
        pad_token_id=0, max_new_tokens=4, stop_token_ids=env.chat_format.stop_token_ids
    )
    with contextlib.closing(EngineLoop(TorchEngine(model, version=0))) as loop:
        attempts = run_rollouts(
            env, env.tasks.rows(0, 2), positions=[5, 7], num_completions=3,
            complete=completer(loop, params, 5), max_new_tokens=4,
        )  # fmt: skip
    judged = judge(env, attempts, 0)
    batch = judged.columns
    files = zip(batch[columns.GROUP].tolist(), judged.texts[columns.IMAGES], strict=True)
    assert {*files} == {(5, files_text([image(9)])), (7, "")}  # for the store
    env.close()
    processor = AutoProcessor.from_pretrained(folder)
    read = processor(text=["[u]<boi>c?[a]"], images=[[image(9)]], add_special_tokens=False,
                     return_tensors="pt")  # fmt: skip
    ids, mask = batch[columns.PROMPT_IDS][0], batch[columns.PROMPT_MASK][0]
    assert ids[mask].tolist() == read["input_ids"][0].tolist()
    assert {attempt.conversation.num_turns for attempt in attempts} >= {2}
    own = {columns.POSITION: (batch[columns.GROUP] - 5) // 2}  # of several environments
    given = with_images(batch | own, lambda positions, _: env.images_at(positions))
    shown = images_of(given)
    assert set(shown.images) == {0}  # one copy for the group
    assert torch.equal(shown.images[0]["pixel_values"], read["pixel_values"])
    with torch.no_grad():
        scored = score_completions(
            model, *(given[name] for name in (
                columns.PROMPT_IDS, columns.PROMPT_MASK, columns.COMPLETION_IDS, columns.LOSS_MASK
            )), shown=shown,
        ).logprobs  # fmt: skip
    torch.testing.assert_close(
        scored, batch[columns.SAMPLER_LOGPROBS].where(batch[columns.LOSS_MASK], 0.0),
        rtol=1e-5, atol=2e-5,
    )  # fmt: skip
    # The reference is the policy, and sees the same.
    found = batch[columns.REF_LOGPROBS].where(batch[columns.LOSS_MASK], 0.0)
    torch.testing.assert_close(found, scored, rtol=1e-5, atol=2e-5)
    assert columns.IMAGE_ROW in training_columns(attempts, 0)
