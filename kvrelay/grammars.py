"""What answers are held to, compiled for one tokenizer. No torch."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from kvrelay.errors import InvalidRequestError, ModelFileError, StructureError
from kvrelay.matcher import Matcher, reason
from kvrelay.structured import MAX_REGEX_BYTES, StructuredOutput, StructureKind
from kvrelay.tokenizer import Tokenizer

NUM_KEPT = 16  # compiled ones, the latest used: a client sends the same schema again and again
MAX_GBNF_BYTES = 8_192  # its translation takes time with the square of the rules' number
# Between two tokens of a JSON text: a space, or a new line and its indentation. Without a bound a model may write
# nothing but spaces until max_tokens.
JSON_WHITESPACE = r"(\x20|\x0A[\x20\x09]{0,40})"

# What compiling, and then one step of one answer, may take: without them a regular expression of 40 KB took 1.7 GB.
_LONG_STRING = re.compile(rf'"(?:[^"\\]|\\.){{{MAX_REGEX_BYTES + 1}}}', re.DOTALL)
_LIMITS = LLParserLimits(
    initial_lexer_fuel=50_000,
    max_lexer_states=10_000,
    max_grammar_size=200_000,
    max_items_in_row=1_000,  # an object takes four for each property that may be left out
    step_lexer_fuel=100_000,
    step_max_items=10_000,
    verbose_errors=False,
)


class Grammars:
    """May be used by several threads at once; what compiles leaves the interpreter to the others.

    A text that nobody vouches for needs a thread with the stack that `Matchers` gives its own: each rule of a chain
    takes a frame of it.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], *, num_kept: int = NUM_KEPT) -> None:
        """`eos_token_ids` are the model's; `num_kept` compiled ones stay.

        Raises ModelFileError where the tokenizer has none of them.
        """
        ending = [token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size]
        if not ending:
            raise ModelFileError("the tokenizer has no end-of-sequence token")
        self._tokenizer = LLTokenizer(_Vocabulary(tokenizer, ending), eos_token=ending)  # type: ignore[arg-type]
        self._num_kept = num_kept
        self._kept: OrderedDict[StructuredOutput, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, structured: StructuredOutput, token_ids: Sequence[int] = ()) -> Matcher:
        """For an answer that has `token_ids` already.

        Raises InvalidRequestError with the reason when it cannot be compiled, or nothing conforms to it.
        """
        matcher = self._find(structured) or self._compile(structured)
        matcher.advance(token_ids)
        return matcher

    def _find(self, structured: StructuredOutput) -> Matcher | None:
        with self._lock:
            kept = self._kept.get(structured)
            if kept is None:
                return None
            self._kept.move_to_end(structured)
            return kept.copy()

    def _compile(self, structured: StructuredOutput) -> Matcher:
        raw = LLMatcher(self._tokenizer, _grammar(structured), log_level=0, limits=_LIMITS)
        if raw.is_error():
            raise _refused(structured, raw.get_error())
        matcher = Matcher(raw)
        try:
            matcher.copy().mask()
        except StructureError as error:
            raise _refused(structured, f"no answer conforms to it, or it is too complex: {error.message}") from error
        with self._lock:
            self._kept[structured] = matcher.copy()
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        return matcher


def _grammar(structured: StructuredOutput) -> str:
    """In llguidance's own terms. Raises InvalidRequestError."""
    match structured.kind:
        case StructureKind.JSON_SCHEMA:
            return _of_schema(structured, structured.text)
        case StructureKind.JSON_OBJECT:
            return _of_schema(structured, '{"type": "object"}')
        case StructureKind.REGEX:
            return LLMatcher.grammar_from_regex(structured.text)
        case StructureKind.CHOICE:
            texts = (json.dumps(text, ensure_ascii=False) for text in structured.choices)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
        case StructureKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark(structured))


def _of_schema(structured: StructuredOutput, schema: str) -> str:
    if schema.strip() == "true":
        schema = "{}"
    if not schema.lstrip().startswith("{"):
        raise _refused(structured, "it is no JSON object, as a schema has to be")
    if _LONG_STRING.search(schema):
        raise _refused(structured, f"a string in it, which may be a pattern, has over {MAX_REGEX_BYTES} characters")
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": JSON_WHITESPACE})
    except ValueError as error:
        raise _refused(structured, str(error)) from error


def _lark(structured: StructuredOutput) -> str:
    """A grammar in either notation, in Lark's."""
    text = structured.text
    if is_lark_syntax(text):
        return text
    num_bytes = len(text.encode("utf-8"))
    if num_bytes > MAX_GBNF_BYTES:
        raise _refused(
            structured, f"it has {num_bytes} bytes; in GBNF at most {MAX_GBNF_BYTES} are allowed: write it as Lark"
        )
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the translator raises nothing narrower
        raise _refused(structured, f"it is neither Lark (a rule `start: ...`) nor GBNF: {error}") from error


def _refused(structured: StructuredOutput, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{structured.kind} is refused: {reason(why)}")


class _Vocabulary:
    """A tokenizer as llguidance asks for one."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = [token_id for token_id, text in enumerate(self.tokens) if not text]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(decoded, add_bos=False)
