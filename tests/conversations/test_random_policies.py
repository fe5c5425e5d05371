"""Random policies against tools, replies and judges that do what they may not: rows hold what was
sampled and nothing else, judges see what is stored, and no failure reaches another rollout."""

from __future__ import annotations

import copy
import random
import time

import pytest

from rllib_llm.engines.protocol import Ended
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.conversation_rollouts import judge, run_rollouts
from rllib_llm.shared import columns
from tests.conversations.scripted import settings
from tests.conversations.templates import FAMILIES, family_tokenizer
from tests.conversations.test_rollouts import changes_all, note
from tests.conversations.test_template_shapes import OPENERS, SHAPES, tokenizer_for
from tests.conversations.test_tool_calls import WRITTEN

TOKENIZERS = {name: (family_tokenizer, (name,)) for name in FAMILIES} | {
    f"{name} (shape)": (tokenizer_for, of) for name, of in (OPENERS | SHAPES).items()
}
RAISED = [KeyError("k"), SystemExit(3), GeneratorExit(), StopIteration(4), RecursionError()]
GIVEN = [b"\xff", None, float("nan"), object(), {1: {2}}, "\ud800", "<|im_end|></s>", 10**5000]


def add(a: int) -> str:
    """Does what it likes.

    Args:
        a: what.
    """
    if a % 3 == 0:
        raise RAISED[a % len(RAISED)]
    time.sleep(0.2 * (a % 7 == 1))
    return GIVEN[a % len(GIVEN)]


class Answers(ConversationEnv):
    """Goes on, ends, or fails."""

    async def respond(self, conversation):
        chance = random.Random(len(conversation.token_ids)).random()
        if chance < 0.1:
            raise ValueError("it is broken")
        return Response("More." if chance < 0.5 else (), done=chance >= 0.5, reward=0.5)


class RandomPolicy:
    """Says calls, parts of calls and any tokens, each with a log-prob of its own."""

    def __init__(self, chat_format, source):
        self.chat_format, self.source = chat_format, source
        self.said, self.asked, self.count = {}, {}, 0

    def _words(self):
        other = self.source.choice([*WRITTEN])
        call = WRITTEN.get(self.chat_format.syntax if self.source.random() < 0.7 else other, "")
        call = call.replace("1", str(self.source.randrange(30)))
        call = self.source.choice([call, call.replace("add", "note"), call.replace('"a"', '"b"')])
        cut = self.source.randrange(len(call) + 1)
        return self.source.choice([call, call, call + call, call[:cut], call[cut:], "<think>", ""])

    async def complete(self, token_ids, room, row, turn):
        source, num = self.source, len(self.chat_format.tokenizer)
        ids = self.chat_format.encode(self._words())
        for _ in range(source.choice([0, 0, 1, 12])):
            ids.insert(source.randrange(len(ids) + 1), source.randrange(num))
        stops = self.chat_format.stop_token_ids
        ids = [token for token in ids if token not in stops][: room - 1]
        ids += [source.choice(stops)] if source.random() < 0.9 or not ids else []
        logprobs = [-1e-3 * (self.count + i) for i in range(len(ids))]
        self.count += len(ids)
        self.asked.setdefault(row, []).append([*token_ids, *ids])
        self.said.setdefault(row, []).append((ids, logprobs))
        return Ended(0, ids, logprobs, [turn] * len(ids), source.choice(["stop"] * 9 + ["length"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_what_was_sampled_and_judges_see_what_is_stored(name, seed):
    source = random.Random(f"{name} {seed}")
    make, of = TOKENIZERS[name]
    seen = []

    def looks(completions, prompts, **columns):
        seen.extend([*p, *c] for p, c in zip(prompts, completions, strict=True))
        return [float(len(c)) for c in completions]

    row = {"prompt": "1 + 2?", "answer": "3", "deep": {"list": [1], "tuple": ([2],), "set": {3}}}
    env = Answers(settings(
        tokenizer=make(*of), prompts=[row], tools=[add, note],
        reward_functions=[changes_all, looks],
        tool_timeout_s=0.1, max_turns=5, max_tokens=4000, history=source.choice(["fork", "keep"]),
    ))  # fmt: skip
    policy = RandomPolicy(env.chat_format, source)
    attempts = run_rollouts(
        env, env.tasks.rows(0, 1), positions=range(1), num_completions=12,
        complete=policy.complete, max_new_tokens=200,
    )  # fmt: skip
    stored = [copy.deepcopy(attempt.conversation.messages) for attempt in attempts]
    judged = judge(env, attempts, int(env.tokenizer.pad_token_id))
    env.close()
    assert {a.invalid for a in attempts} <= {"", "ValueError: it is broken"}
    valid = [not attempt.invalid for attempt in attempts]
    assert seen[: sum(valid)] == [m for m, ok in zip(stored, valid, strict=True) if ok]
    assert [attempt.conversation.messages for attempt in attempts] == stored
    for attempt in attempts:
        said = policy.said[attempt.row_id]
        rows = attempt.conversation.rows()
        assert all(r.prompt_ids + r.completion_ids in policy.asked[attempt.row_id] for r in rows)
        learnt = [
            pair for r in rows
            for pair, own in zip(zip(r.completion_ids, r.logprobs, strict=True), r.loss_mask,
                                 strict=True) if own
        ]  # fmt: skip
        assert learnt == [p for ids, logs in said for p in zip(ids, logs, strict=True)]
    num_sampled = sum(len(ids) for said in policy.said.values() for ids, _ in said)
    assert int(judged.columns[columns.LOSS_MASK].sum()) == num_sampled
