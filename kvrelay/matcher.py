"""How far one answer has come in what it is held to, and which tokens may follow. No torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from llguidance import LLMatcher

from kvrelay.errors import StructureError

MAX_REASON_CHARS = 300
# Processor time that one answer may take of an engine, at first and with each token: a hundred times what is usual. An
# ambiguous grammar takes more with the square of the answer's length, and everyone in the batch waits for it.
BUDGET_S = 0.5
BUDGET_TOKEN_S = 0.002


class Matcher:
    """One answer's. Its state follows from the grammar and the tokens so far, and from nothing else: one made anew
    elsewhere from both goes on as this one would. Belongs to one thread at a time."""

    def __init__(self, raw: LLMatcher, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` tells the processor time of the calling thread, in seconds."""
        self._raw = raw
        self._clock = clock
        self._left_s = BUDGET_S

    def copy(self) -> Matcher:
        """For another answer, from the same place on."""
        return Matcher(self._raw.deep_copy(), self._clock)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the answer's next tokens. A token that may not stand there is told by `mask`."""
        began = self._clock()
        self._raw.consume_tokens(list(token_ids))
        self._left_s += BUDGET_TOKEN_S * len(token_ids) - (self._clock() - began)

    def mask(self) -> bytes:
        """Which tokens may follow: a bit for each id, the lowest first, of the tokenizer's vocabulary. An
        end-of-sequence token is among them where the answer is complete.

        Raises StructureError when none may, or when finding out takes more than it may.
        """
        if self._left_s < 0:
            raise StructureError("the answer cannot go on as it has to: finding out what may follow takes too long")
        began = self._clock()
        mask = self._raw.compute_bitmask()
        self._left_s -= self._clock() - began
        if self._raw.is_error():
            raise StructureError(f"the answer cannot go on as it has to: {reason(self._raw.get_error())}")
        return mask


def reason(text: str) -> str:
    """An error of llguidance in one line, without its dumps of state and the text that it points into."""
    cause = re.search(r"^error: .+$", text, re.MULTILINE)  # of a regular expression, which is shown before it
    if cause is not None:
        text = cause[0].removeprefix("error: ")
    for dump in ("<state>", "<non-verbose/>", "<backtrace>", "\n   1 |"):
        text = text.partition(dump)[0]
    words = " ".join(text.split())[:MAX_REASON_CHARS]
    return "nothing may follow" if words.startswith("NoExtension") else words
