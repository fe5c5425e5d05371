"""rllib_llm/Chat-v0: conversations with another model, on a server with OpenAI's interface.

    env_config: {base_url: "http://localhost:8000/v1", model_name: my-player, system_of_player: ...}

The task's prompt opens the conversation in the other player's name. From then on it is asked for
its words with the two sides exchanged: what the policy said is its user's. What a conversation is
worth, reward functions and judges say. A player that does not answer makes the rollout invalid.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from rllib_llm.conversations.chat_format import Messages
from rllib_llm.conversations.conversation import Conversation
from rllib_llm.envs.conversation import ConversationEnv, Response
from rllib_llm.envs.rlhf import EnvConfigError
from rllib_llm.shared.openai_client import OpenAIClient, ServerError

_EXCHANGED = {"user": "assistant", "assistant": "user"}


class ChatEnv(ConversationEnv):
    """The other player answers every turn without complete tool calls."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "base_url": None,  # of the player's server, up to the version
        "model_name": None,  # the server's name for the player
        "system_of_player": None,  # what it is told first; {columns} of the task are filled in
        "player_settings": None,  # further ones of its requests: temperature, max_tokens, ...
        "client_settings": None,  # of `OpenAIClient`: timeout_s, max_attempts, api_key_env, ...
        "last_words": None,  # words of the player that end the conversation
    }

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        super().__init__(env_config)
        if not self.settings["model_name"]:
            raise EnvConfigError(
                "env_config['model_name']=None must be a name: the server is asked for the player "
                "by it. Set it to what GET /v1/models lists."
            )
        self._client  # noqa: B018  (a wrong address is refused before anything is sampled)

    @functools.cached_property
    def _client(self) -> OpenAIClient:
        return OpenAIClient(self.settings["base_url"], **(self.settings["client_settings"] or {}))

    async def respond(self, conversation: Conversation) -> Response:
        body = {
            **(self.settings["player_settings"] or {}),
            "model": self.settings["model_name"],
            "messages": self._seen_by_player(conversation),
        }
        asked = self._client.submit("chat/completions", body, _words)
        try:
            words = await asyncio.wrap_future(asked)
        except ServerError as error:
            return Response(invalid=f"the other player did not answer: {error}")
        last = self.settings["last_words"]
        return Response(words, done=last is not None and last in words)

    def _seen_by_player(self, conversation: Conversation) -> Messages:
        """The conversation from the other player's side, without the policy's tool calls and
        results."""
        system = self.settings["system_of_player"]
        messages: Messages = []
        if system is not None:
            messages.append({"role": "system", "content": system.format(**conversation.task)})
        for message in conversation.messages:
            if message["role"] in _EXCHANGED and message["content"]:
                said = {"role": _EXCHANGED[message["role"]], "content": message["content"]}
                messages.append(said)
        return messages

    def close(self) -> None:
        """Closes the connections to the server as well."""
        self._client.close()
        super().close()


def _words(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"] or "")
