"""rllib_llm/TwentyQuestions-v0: the policy asks about a number and guesses it, turn by turn.

The game master answers "Higher.", "Lower." or "Right."; each question costs a little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.conversation import ConversationEnv, Response

_NUMBER = re.compile(r"-?\d+")


class TwentyQuestions(ConversationEnv):
    """A number from 1 to `highest` is to be found in `max_turns` questions."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "highest": 100,
        "max_turns": 20,
        "cost": 0.02,  # of a question
        "eval_fraction": 0.1,
    }

    def rows(self) -> Sequence[Mapping[str, Any]]:
        highest = int(self.settings["highest"])
        ask = f"I think of a number from 1 to {highest}. Which?"
        return [{"prompt": ask, "secret": secret} for secret in range(1, highest + 1)]

    def respond(self, conversation: Conversation) -> Response:
        assert conversation.reply is not None, "somebody has asked"
        found = _NUMBER.search(conversation.reply.content)
        cost = -float(self.settings["cost"])
        if found is None:
            return Response("Say a number.", reward=cost)
        guess, secret = int(found.group()), conversation.task["secret"]
        if guess == secret:
            return Response("Right.", reward=1.0, done=True, metrics={"found": 1.0})
        answer = "Higher." if guess < secret else "Lower."
        return Response(answer, reward=cost, metrics={"found": 0.0})
