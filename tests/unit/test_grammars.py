"""What answers are held to: compiled, or refused with the reason and in time; the same wherever it is made anew."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading

import pytest
from llguidance import LLMatcher

from kvrelay.errors import InvalidRequestError, ModelFileError, OverloadedError, StructureError
from kvrelay.grammars import Grammars
from kvrelay.matcher import Matcher
from kvrelay.matchers import NUM_THREADS, Matchers, make_matchers
from kvrelay.structured import StructuredOutput, StructureKind
from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.held_answers import allowed, byte_grammars, byte_tokenizer, ids, regex, schema

PERSON = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.GRAMMAR, text)


def accepts(structured: StructuredOutput, text: str) -> bool:
    matcher = byte_grammars().matcher(structured, ids(text))
    try:
        return EOS_TOKEN_ID in allowed(matcher.mask())
    except StructureError:
        return False


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (schema(PERSON), ['{"name":"x"}', '{\n  "name": "x"\n}', '{"name": "é", "more": [1]}'], ["{}", '{"name": 1}']),
        (schema('{"type": "integer"}'), ["1", "-20"], ["1.5", "x", ""]),
        (StructuredOutput(StructureKind.JSON_OBJECT), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
        (regex("a+b?"), ["a", "aab"], ["b", "abb", ""]),
        (regex("^a$"), ["a"], ["ba"]),
        (StructuredOutput(StructureKind.CHOICE, choices=("a", "ab", '"\\')), ["a", "ab", '"\\'], ["b", "abb"]),
        (grammar('start: "x" n\nn: /[0-9]+/'), ["x1", "x42"], ["x", "1"]),
        (grammar('root ::= "x" n\nn ::= [0-9]+ | "(" n ")"'), ["x1", "x((2))"], ["x", "x((2)"]),
    ],
)
def test_an_answer_may_end_where_it_conforms(structured: StructuredOutput, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(structured, text)] == []
    assert [text for text in bad if accepts(structured, text)] == []


def test_nothing_but_the_end_follows_a_complete_answer() -> None:
    assert allowed(byte_grammars().matcher(regex("ab"), ids("ab")).mask()) == {EOS_TOKEN_ID}
    assert allowed(byte_grammars().matcher(regex("ab?"), ids("a")).mask()) == {EOS_TOKEN_ID, *ids("b")}


@pytest.mark.parametrize("structured", [schema(PERSON), regex("(a|bc)*[^a]{2}"), grammar('start: "(" start ")" | "x"')])
def test_a_matcher_made_anew_from_the_tokens_so_far_is_the_same(structured: StructuredOutput) -> None:
    """One that was asked for every mask on the way, one that got all tokens at once, and a copy."""
    draw, grown, tokens = random.Random(7), byte_grammars().matcher(structured), []
    for _ in range(60):
        mask = grown.mask()
        assert byte_grammars().matcher(structured, tokens).mask() == mask
        assert grown.copy().mask() == mask
        choices = sorted(allowed(mask) - {EOS_TOKEN_ID})
        if not choices:
            break
        tokens.append(draw.choice(choices))
        grown.advance(tokens[-1:])


def test_a_token_that_may_not_stand_there_fails_the_answer_and_no_other() -> None:
    matcher = byte_grammars().matcher(regex("ab"))
    other = matcher.copy()
    matcher.advance(ids("b"))
    with pytest.raises(StructureError, match=r"^the answer cannot go on as it has to: .*doesn't satisfy the grammar"):
        matcher.mask()
    assert allowed(other.mask()) == set(ids("a"))


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


REFUSED = {
    "no JSON": (schema("{"), "EOF while parsing"),
    "no schema": (schema("3"), "it is no JSON object"),
    "nothing conforms": (schema("false"), "it is no JSON object"),
    "a keyword that is not known": (schema('{"type": "object", "not": {}}'), 'Unimplemented keys: ["not"]'),
    "2,000 nested objects": (schema(nested(2_000)), "recursion limit exceeded"),
    "a schema that is itself": (schema('{"$ref": "#"}'), "no answer conforms to it"),
    "a cycle of names": (schema('{"$defs": {"N": {"$ref": "#/$defs/N"}}, "$ref": "#/$defs/N"}'), "no answer conforms"),
    "look-behind": (regex("(?<=x)*"), "look-around"),
    "5,000 parentheses": (regex("(" * 5_000), "unclosed group|nest"),
    "a range from end to start": (regex("[z-a]"), "invalid character class range"),
    "a rule that is itself": (grammar("root ::= root"), "no answer conforms to it"),
    "a rule that is itself, in Lark": (grammar("start: start"), "no answer conforms to it"),
    "neither Lark nor GBNF": (grammar("hello"), "it is neither Lark (a rule `start: ...`) nor GBNF: Expected ::="),
    "GBNF without its root": (grammar('a ::= "x"'), "No 'root' rule found"),
    "3,000 parentheses in GBNF": (grammar("root ::= " + "(" * 3_000), "recursion depth"),
    "much GBNF": (grammar("root ::= " + "a" * 8_192), "it has 8201 bytes; in GBNF at most 8192"),
    "much to take apart": (regex("a?" * 20_000), "initial lexer configuration (grammar) too big"),
    "a long pattern": (
        schema(json.dumps({"pattern": '\\"' * 16_385})),
        "a string in it, which may be a pattern, has over",
    ),
    "a rule that is not there": (grammar("start: missing"), "missing"),
}


@pytest.mark.parametrize(("structured", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_compiled_is_refused_with_the_reason(structured: StructuredOutput, words: str) -> None:
    pattern = words if "|" in words else re.escape(words)
    with pytest.raises(InvalidRequestError, match=rf"^{structured.kind} is refused: .*({pattern})") as refused:
        byte_grammars().matcher(structured)
    assert len(refused.value.message) < 400
    assert "\n" not in refused.value.message


LIST_IN_ITS_OWN = '{"$defs": {"L": {"type": "array", "items": {"$ref": "#/$defs/L"}}}, "$ref": "#/$defs/L"}'
BOUNDED = {
    "a list in its own list": schema(LIST_IN_ITS_OWN),
    "up to 2^64 - 1 items": schema(json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 2**64 - 1})),
    "2^63 items or more": schema(json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 2**63})),
    "a million characters": schema('{"type": "string", "minLength": 1000000}'),
    "backtracking": regex("(a+)+$"),
    "1,000 values": schema(json.dumps({"enum": [f"value{number}" for number in range(1_000)]})),
    "1,024 choices": StructuredOutput(StructureKind.CHOICE, choices=tuple("x" * 90 + str(n) for n in range(1_024))),
}


@pytest.mark.parametrize("structured", BOUNDED.values(), ids=BOUNDED.keys())
def test_what_is_large_only_when_written_out_is_served(structured: StructuredOutput) -> None:
    assert follow(byte_grammars().matcher(structured), 200) > 0


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (regex("((a{1,1000}){1,1000}){1,1000}"), "too many expressions"),
        (
            grammar('start: s\ns: s s s | s s | "a" | "b" |'),
            "takes too long|too many items|Too many items|has 1001 items",
        ),
    ],
    ids=["repetition of repetitions", "ambiguity without end"],
)
def test_what_grows_without_end_fails_in_time(structured: StructuredOutput, words: str) -> None:
    matcher = byte_grammars().matcher(structured)
    with pytest.raises(StructureError, match=words):
        follow(matcher, 2_000)


def follow(matcher: Matcher, num_tokens: int) -> int:
    """How many tokens followed, drawn at random; an end only where nothing else may follow."""
    draw = random.Random(3)
    for number in range(num_tokens):
        choices = sorted(allowed(matcher.mask()) - {EOS_TOKEN_ID})
        if not choices:
            return number
        matcher.advance([draw.choice(choices)])
    return num_tokens


def test_an_answer_may_not_take_an_engines_time_without_end() -> None:
    """Half a second, and 2 ms more with each token."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.2  # between any two readings
        return now

    raw = LLMatcher(byte_grammars()._tokenizer, LLMatcher.grammar_from_regex("a*"))
    matcher = Matcher(raw, clock)
    matcher.mask()
    matcher.advance(ids("a") * 100)  # takes as long again, and gives as much
    matcher.mask()
    matcher.copy().mask()  # has the same clock, and the time that one has at first
    matcher.mask()
    with pytest.raises(StructureError, match="finding out what may follow takes too long"):
        matcher.mask()


def test_a_vocabulary_without_an_end_can_hold_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelFileError, match="no end-of-sequence token"):
        Grammars(byte_tokenizer(), (999,))
    assert make_matchers(byte_tokenizer(), ()) is None
    assert "no answer can be held to a schema or a grammar" in caplog.text


BOUND_S = 60.0  # of what comes at once


class SlowGrammars(Grammars):
    """Compiles nothing before it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()

    def matcher(self, structured: StructuredOutput, token_ids: object = ()) -> Matcher:
        self.begun.release()
        self.let_go.wait(BOUND_S)
        raise InvalidRequestError("let go")


async def test_what_takes_too_long_to_compile_is_refused() -> None:
    grammars = SlowGrammars()
    matchers = Matchers(grammars, limit_s=0.05, wait_limit_s=BOUND_S)
    try:
        with pytest.raises(
            InvalidRequestError, match=r"^regex is refused: it takes more than 0.05 s to compile; simpl"
        ):
            await matchers.make(regex("a"))
    finally:
        grammars.let_go.set()
        matchers.close()


async def test_who_finds_no_thread_may_come_again_and_delays_nobody() -> None:
    grammars = SlowGrammars()
    matchers = Matchers(grammars, limit_s=BOUND_S, wait_limit_s=BOUND_S)
    try:
        compiling = [asyncio.create_task(matchers.make(regex("a"))) for _ in range(NUM_THREADS)]
        for _ in compiling:
            assert await asyncio.to_thread(grammars.begun.acquire, timeout=BOUND_S)
        matchers._wait_limit_s = 0.05  # from now on: those before it may begin late on a busy machine
        with pytest.raises(OverloadedError):
            await matchers.make(regex("a"))
        grammars.let_go.set()
        results = await asyncio.gather(*compiling, return_exceptions=True)
        assert [str(result) for result in results] == ["let go"] * NUM_THREADS
        assert not grammars.begun.acquire(blocking=False)
    finally:
        grammars.let_go.set()
        matchers.close()


def chain_of_rules(length: int) -> StructuredOutput:
    return grammar("start: r0\n" + "".join(f"r{n}:r{n + 1}\n" for n in range(length)) + f'r{length}:"x"\n')


def chain_of_schemas(length: int) -> StructuredOutput:
    names = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return schema(json.dumps({"$defs": {**names, f"d{length}": {}}, "$ref": "#/$defs/d0"}, separators=(",", ":")))


@pytest.mark.parametrize("structured", [chain_of_rules(2_500), chain_of_schemas(1_900)], ids=["rules", "schemas"])
async def test_a_chain_as_long_as_its_text_may_be_is_compiled_and_ends_no_process(structured: StructuredOutput) -> None:
    """On a thread of the usual stack it would."""
    structured.validate()
    matchers = Matchers(byte_grammars(), limit_s=60.0)
    try:
        assert follow(await matchers.make(structured), 3) > 0
    finally:
        matchers.close()


async def test_the_tokens_so_far_are_taken_in() -> None:
    matchers = Matchers(byte_grammars())
    try:
        matcher = await matchers.make(regex("abc"), ids("ab"))
        assert allowed(matcher.mask()) == set(ids("c"))
    finally:
        matchers.close()
