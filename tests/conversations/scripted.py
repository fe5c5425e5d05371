"""A policy that says what a test wants it to say, and sees what an engine would see."""

from __future__ import annotations

from rllib_llm.engines.protocol import Ended
from rllib_llm.envs.conversation_rollouts import judge, run_rollouts
from tests.conversations.templates import family_tokenizer

ADD_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


class ScriptedPolicy:
    """Says `turns` one after the other; a text that ends with "..." is cut off there."""

    def __init__(self, env, *turns):
        self.env, self.turns = env, turns
        self.seen = []  # (row, turn, token ids) of each completion asked for

    def asked(self, row=0, turn=0):
        """Returns the text that a completion was asked for with, whoever asked first."""
        found = [ids for of, at, ids in self.seen if (of, at) == (row, turn)]
        assert len(found) == 1, f"{len(found)} completions of row {row}, turn {turn}"
        return self.env.tokenizer.decode(found[0])

    async def complete(self, token_ids, room, row, turn):
        self.seen.append((row, turn, list(token_ids)))
        text = self.turns[min(turn, len(self.turns) - 1)]
        if callable(text):
            text = text(row)
        chat_format = self.env.chat_format
        is_cut = text.endswith("...")
        ids = chat_format.encode(text.removesuffix("...") + chat_format.turn_end * (not is_cut))
        finish = "length" if is_cut or len(ids) > room else "stop"
        ids = ids[:room]
        return Ended(0, ids, [-0.5] * len(ids), [3] * len(ids), finish)


def settings(**changes):
    """Settings of an environment of two tasks, without a model."""
    return {
        "tokenizer": family_tokenizer("chatml"), "prompts": [{"prompt": "1 + 2?", "answer": "3"},
        {"prompt": "2 + 2?", "answer": "4"}], "shuffle": False, **changes,
    }  # fmt: skip


def roll(env, *turns, num_prompts=2, num_completions=2, max_new_tokens=400):
    """The attempts and the judged batch of a scripted policy."""
    policy = ScriptedPolicy(env, *turns)
    attempts = run_rollouts(
        env, env.tasks.rows(0, num_prompts), positions=range(num_prompts),
        num_completions=num_completions, complete=policy.complete, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    return attempts, judge(env, attempts, 0), policy
