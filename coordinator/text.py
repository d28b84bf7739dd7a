"""From what a client writes to token ids, and what may not pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrelay.errors import InvalidRequestError, UnknownModelError
from kvrelay.inference import ChatMessage, ChatPrompt, Prompt, TextPrompt
from kvrelay.tokenizer import Tokenizer
from kvrelay.types import check_token_id

CHAT_ROLES = ("system", "user", "assistant")
THREAD_CHARS = 8_192  # longer texts are tokenized in a thread: about 2 ms of the event loop's time


class Text:
    """The served model's name and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, model_name: str) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name

    def check_model(self, name: str) -> None:
        """Raises UnknownModelError."""
        if name and name != self.model_name:
            raise UnknownModelError(f"model {name!r} is not served here; {self.model_name!r} is")

    async def prompt_ids(self, prompt: Prompt | None, vocab_size: int) -> tuple[int, ...]:
        """Token ids of a prompt, at least one. Raises InvalidRequestError."""
        if prompt is None:
            raise InvalidRequestError("the request has no prompt; set one of text, token_ids or chat")
        if isinstance(prompt, TextPrompt):
            token_ids = await self._encode(prompt.text)
        elif isinstance(prompt, ChatPrompt):
            token_ids = await self._encode_chat(prompt.messages)
        else:
            token_ids = prompt.token_ids
            check_token_ids("token_ids", token_ids, vocab_size)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        return tuple(token_ids)

    def decode(self, token_ids: Sequence[int], vocab_size: int) -> str:
        """Raises InvalidRequestError for ids outside the vocabulary."""
        check_token_ids("token_ids", token_ids, vocab_size)
        return self.tokenizer.decode(token_ids)

    async def _encode(self, text: str) -> Sequence[int]:
        if not text:
            return ()
        if len(text) <= THREAD_CHARS:
            return self.tokenizer.encode(text, add_bos=self.tokenizer.add_bos)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_bos=self.tokenizer.add_bos)

    async def _encode_chat(self, messages: Sequence[ChatMessage]) -> Sequence[int]:
        check_messages(messages)
        if sum(len(message.content) for message in messages) <= THREAD_CHARS:
            return self.tokenizer.encode_chat(messages)
        return await asyncio.to_thread(self.tokenizer.encode_chat, messages)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError naming the first id outside [0, vocab_size)."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        for token_id in token_ids:
            check_token_id(name, token_id, vocab_size)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequestError for an empty conversation or a role that is not served."""
    if not messages:
        raise InvalidRequestError("chat has no messages; send at least one")
    for index, message in enumerate(messages):
        if message.role not in CHAT_ROLES:
            raise InvalidRequestError(
                f"message {index} has the role {message.role[:64]!r}; allowed are {', '.join(CHAT_ROLES)}"
            )
