"""From what a client writes to token ids, and what may not pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvrelay.errors import InvalidRequestError, OverloadedError, PromptTooLongError
from kvrelay.inference import ChatMessage, ChatPrompt, Prompt, TextPrompt
from kvrelay.matchers import Matchers
from kvrelay.structured import StructuredOutput
from kvrelay.tokenizer import Tokenizer
from kvrelay.types import check_token_id

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")
THREAD_CHARS = 8_192  # longer texts are tokenized in a thread: about 2 ms of the event loop's time
MESSAGE_CHARS = 32  # about what a template writes around a message
NUM_THREADS = 2  # more long texts than that wait: tokenizing must not take every core from what runs
MAX_LONG_TEXTS = 64  # in the threads or waiting for one; more are turned away
LONG_TEXT_RETRY_S = 1.0
MAX_CHARS = 4 * 2**20  # of a text that is tokenized for no model: no model's prompt is that long


class LongTexts:
    """The threads in which long texts, of whatever model, are tokenized."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._num_texts = 0

    def close(self) -> None:
        """Texts that wait for a thread are given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, encode: Callable[[], Sequence[int]]) -> Sequence[int]:
        """Raises OverloadedError if too many wait."""
        if self._num_texts >= MAX_LONG_TEXTS:
            raise OverloadedError(
                f"{MAX_LONG_TEXTS} long texts are being tokenized, the most this coordinator takes; try again later",
                retry_after_s=LONG_TEXT_RETRY_S,
            )
        self._num_texts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        finally:
            self._num_texts -= 1


class Text:
    """A model's tokenizer, and the bounds on what it is given."""

    def __init__(self, tokenizer: Tokenizer, long_texts: LongTexts, matchers: Matchers | None = None) -> None:
        """`matchers` are None where no answer can be held to anything."""
        self.tokenizer = tokenizer
        self.long_texts = long_texts
        self._matchers = matchers

    async def check_structured(self, structured: StructuredOutput) -> None:
        """Raises InvalidRequestError with the reason, or OverloadedError, where no answer can be held to it."""
        if self._matchers is None:
            raise InvalidRequestError(
                f"{structured.kind} is refused: this model's tokenizer has no end-of-sequence token"
            )
        await self._matchers.make(structured)

    async def prompt_ids(
        self, prompt: Prompt | None, vocab_size: int, max_model_len: int | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt, at least one. Raises InvalidRequestError, or OverloadedError if too many are long.

        One that cannot possibly fit into `max_model_len` tokens is a PromptTooLongError before more work is done on it.
        """
        if prompt is None:
            raise InvalidRequestError("the request has no prompt; set one of text, token_ids or chat")
        if isinstance(prompt, TextPrompt):
            token_ids = await self._encode(prompt, max_model_len)
        elif isinstance(prompt, ChatPrompt):
            token_ids = await self._encode_chat(prompt, max_model_len)
        else:
            token_ids = prompt.token_ids
            if max_model_len is not None and len(token_ids) > max_model_len:
                raise PromptTooLongError(f"the prompt has {len(token_ids)} tokens; the model takes {max_model_len}")
            check_token_ids("token_ids", token_ids, vocab_size)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; it needs at least one token")
        return tuple(token_ids)

    def decode(self, token_ids: Sequence[int], vocab_size: int) -> str:
        """Raises InvalidRequestError for ids outside the vocabulary."""
        check_token_ids("token_ids", token_ids, vocab_size)
        return self.tokenizer.decode(token_ids)

    async def _encode(self, prompt: TextPrompt, max_model_len: int | None) -> Sequence[int]:
        text = prompt.text
        if not text:
            return ()
        self._check_length(text, max_model_len)
        add_bos = prompt.add_bos and self.tokenizer.add_bos
        return await self._run(len(text), lambda: self.tokenizer.encode(text, add_bos=add_bos))

    async def _encode_chat(self, chat: ChatPrompt, max_model_len: int | None) -> Sequence[int]:
        check_messages(chat.messages)
        num_chars = len(chat.tools) + sum(map(_num_chars, chat.messages))
        return await self._run(num_chars, lambda: self._encode_rendered(chat, max_model_len))

    def _encode_rendered(self, chat: ChatPrompt, max_model_len: int | None) -> Sequence[int]:
        text = self.tokenizer.render_chat(chat)
        self._check_length(text, max_model_len)
        return self.tokenizer.encode(text, add_bos=False)  # a template writes its own BOS

    async def _run(self, num_chars: int, encode: Callable[[], Sequence[int]]) -> Sequence[int]:
        if num_chars <= THREAD_CHARS:
            return encode()
        return await self.long_texts.run(encode)

    def _check_length(self, text: str, max_model_len: int | None) -> None:
        most = MAX_CHARS if max_model_len is None else max_model_len * self.tokenizer.max_chars_per_token
        if len(text) > most:
            whose = "a text to tokenize" if max_model_len is None else f"a prompt of {max_model_len} tokens"
            raise PromptTooLongError(f"the text has {len(text)} characters; {whose} has {most} at most")


def _num_chars(message: ChatMessage) -> int:
    return MESSAGE_CHARS + len(message.content) + sum(len(call.arguments) for call in message.tool_calls)


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
