"""What users of others suffered from, tried here. The numbers are of their issues; those that are
not here have a test beside what they are about."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from rllib_llm.algorithms.grpo import GRPOConfig
from rllib_llm.conversations.chat_format import ChatFormat
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.conversations.proof import MORE, USER
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.examples import calculator
from rllib_llm.shared import columns
from tests.algorithms import tiny_runs as tiny
from tests.conversations.scripted import ADD_CALL, add, roll, settings
from tests.conversations.templates import family_tokenizer


def letter_by_letter(chat_format, text):
    """Ids that decode to `text` and are not those that it encodes to."""
    return [token for letter in text for token in chat_format.encode(letter)]


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_what_was_sampled_is_never_encoded_again(family):
    """TRL #5224, #5144, #5242; prime-rl #1334; rllm #816: decoding a turn and encoding it for the
    next gives other tokens than those that were sampled."""
    chat_format = ChatFormat(family_tokenizer(family))
    end = chat_format.encode(chat_format.turn_end)[-1]
    said = [*letter_by_letter(chat_format, "the sum of two numbers"), end]
    if family != "mistral":  # whose tokenizer writes a space before each of the letters
        assert chat_format.encode(chat_format.tokenizer.decode(said)) != said
    conversation = Conversation(chat_format)
    conversation.append_messages([USER])
    prompt = conversation.token_ids
    conversation.append_sampled(said, [-0.5] * len(said))
    conversation.append_messages([MORE])
    assert conversation.token_ids[: len(prompt) + len(said)] == prompt + said
    conversation.append_sampled([end], [-0.5])
    row = conversation.rows()[0]
    assert row.prompt_ids == prompt and row.completion_ids[: len(said)] == said
    assert row.loss_mask[: len(said)] == [True] * len(said)


class Patient(ConversationEnv):
    """Asks three times."""

    def respond(self, conversation):
        return Response("Again.", reward=1.0, done=conversation.num_turns == 3)


def test_no_answer_stands_twice():
    """NeMo-RL #2821: the assistant's turn was in the history and in the next prompt."""
    env = Patient(settings())
    attempts, _, policy = roll(env, "One.", "Two.", "Three.", num_prompts=1, num_completions=1)
    text = env.tokenizer.decode(attempts[0].conversation.token_ids)
    assert [text.count(word) for word in ("One.", "Two.", "Three.")] == [1, 1, 1]
    assert policy.asked(0, 2).count("One.") == 1
    env.close()


def test_a_conversation_that_is_too_long_keeps_its_beginning():
    """verl #6313: it lost its beginning in place of its end."""
    env = Patient(settings(max_tokens=60))
    attempts, judged, _ = roll(env, "Yes. " * 30)
    for row in range(len(judged.columns[columns.ROW_ID])):
        mask = judged.columns[columns.PROMPT_MASK][row]
        prompt = judged.columns[columns.PROMPT_IDS][row][mask].tolist()
        assert prompt == list(attempts[row].conversation.nodes[0].token_ids)
    assert {attempt.truncated for attempt in attempts} == {"tokens"}
    # No turn was over, and so none was rewarded: it is the policy's doing, and earned nothing.
    assert judged.columns[columns.SCORES].tolist() == [0.0] * 4
    assert bool(judged.columns[columns.VALID].all())
    env.close()


def test_what_a_tool_said_is_not_learnt_from_in_a_row_that_was_cut_off():
    """TRL #4976: the mask of truncated completions took the tool's tokens in."""
    env = ConversationEnv(settings(tools=[add], reward_functions=lambda completions: [1.0] * 4))
    attempts, judged, _ = roll(env, ADD_CALL, "It is...")
    assert {attempt.truncated for attempt in attempts} == {"tokens"}
    said = env.tokenizer.decode(
        judged.columns[columns.COMPLETION_IDS][0][judged.columns[columns.LOSS_MASK][0]]
    )
    assert said == f"{ADD_CALL}<|im_end|>It is"
    exists, learnt = (judged.columns[n] for n in (columns.COMPLETION_MASK, columns.LOSS_MASK))
    assert not bool((learnt & ~exists).any()) and not bool(judged.columns[columns.FINISHED].any())
    env.close()


def test_environments_that_wait_for_each_other_do_not_lock_up():
    """verifiers #1801: more blocking calls than threads in the pool, and nobody goes on."""
    together = threading.Barrier(80, timeout=60)

    class Waiting(ConversationEnv):
        def respond(self, conversation):
            together.wait()
            return Response(done=True, reward=1.0)

    env = Waiting(settings())
    _, judged, _ = roll(env, "Yes.", num_completions=40)
    assert bool(judged.columns[columns.VALID].all()) and len(judged.columns[columns.VALID]) == 80
    env.close()


class Mortal(calculator.Calculator):
    """Takes its whole process along in the midst of a conversation, once."""

    defaults = {**calculator.Calculator.defaults, "marker": ""}

    def respond(self, conversation):
        marker = Path(self.settings["marker"])
        if not marker.exists():
            marker.touch()
            os._exit(1)
        return Response(done=True, reward=float(len(conversation.reply.content)))


def config(marker):
    return (
        GRPOConfig()
        .language_model(model=calculator.MODEL)
        .environment(f"{__name__}:Mortal", env_config={"marker": str(marker)})
        .sampling(max_new_tokens=12, num_completions=4, log_samples_every=0)
        .training(train_batch_size_per_learner=16, minibatch_size=16, ref_kl_coeff=0.0)
    )


@pytest.mark.slow  # samplers in processes of their own
@pytest.mark.usefixtures("ray_session")
def test_a_replica_that_dies_in_a_conversation_is_replaced_and_nothing_is_lost(tmp_path):
    """prime-rl #3139, verifiers #2131: an environment's server died, and the run hung in silence.
    Here another sampler has the same conversations: the weights are those of a run without it."""
    with_death, without = tmp_path / "died", tmp_path / "did not"
    without.touch()
    with tiny.built(config(without)) as algorithm:
        algorithm.train()
        expected = tiny.weights(algorithm)
    with tiny.built(config(with_death).env_runners(num_env_runners=2)) as algorithm:
        result = algorithm.train()
        found = tiny.weights(algorithm)
    assert with_death.exists()
    assert result["faults"]["requests_retried"] == 1
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)
