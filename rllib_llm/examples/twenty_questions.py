"""rllib_llm/TwentyQuestions-v0: the policy asks about a number and guesses it, turn by turn.

The game master answers "Higher.", "Lower." or "Right."; each question costs a little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.settings import declared
from rllib_llm.shared.setting import Settings, setting

_NUMBER = re.compile(r"-?\d+")


class Game(Settings):
    """How hard the game is, and what a question costs."""

    highest: int = setting(100, "the highest number to be found", least=2)
    cost: float = setting(0.02, "the cost of a question")


class TwentyQuestions(ConversationEnv):
    """A number from 1 to `highest` is to be found in `max_turns` questions."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **declared(Game),
        "max_turns": 20,
        "eval_fraction": 0.1,
    }

    def rows(self) -> Sequence[Mapping[str, Any]]:
        highest = self.settings["highest"]
        ask = f"I think of a number from 1 to {highest}. Which?"
        return [{"prompt": ask, "secret": secret} for secret in range(1, highest + 1)]

    def respond(self, conversation: Conversation) -> Response:
        assert conversation.reply is not None, "the policy has asked"
        found = _NUMBER.search(conversation.reply.content)
        cost = -self.settings["cost"]
        if found is None:
            return Response("Say a number.", reward=cost)
        guess, secret = int(found.group()), conversation.task["secret"]
        if guess == secret:
            return Response("Right.", reward=1.0, done=True, metrics={"found": 1.0})
        answer = "Higher." if guess < secret else "Lower."
        return Response(answer, reward=cost, metrics={"found": 0.0})
