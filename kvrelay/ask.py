"""`kvrelay ask`: a question to a running cluster from the command line."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvrelay.answer_printer import AnswerPrinter
from kvrelay.client import AnswerEvent, AsyncClient
from kvrelay.client_answer import ClientAnswer, describe, facts
from kvrelay.client_command import check_timeout, make_parser, refuse, run, write
from kvrelay.duration import ttl_argument
from kvrelay.errors import InvalidRequestError, KVRelayError
from kvrelay.inference import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from kvrelay.sampling import SamplingParams
from kvrelay.structured_arguments import add_structured_arguments, structured_of

_COUNTS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs")


def main(argv: Sequence[str]) -> int:
    """Streams an answer to stdout, then a line of facts. With one line on stderr: 1 when there is no answer, 2 when
    the command line makes no sense."""
    options = parser().parse_args(argv)
    try:
        _check(options)
        prompt, sampling = _prompt(options), _sampling(options)
    except InvalidRequestError as error:
        return refuse("ask", error.message)
    return run("ask", options.address, lambda: _ask(options, prompt, sampling))


async def _ask(options: argparse.Namespace, prompt: Prompt, sampling: SamplingParams) -> None:
    printer = None if options.json else AnswerPrinter(options.n, write)
    async with AsyncClient(options.address) as client:
        events = client.generate(
            prompt,
            sampling,
            request_id=options.request_id,
            model=options.model,
            n=options.n,
            cache_salt=options.cache_salt,
            public_cache=options.public_cache,
            cache_ttl_s=options.cache_ttl,
            priority=options.priority,
            ttft_target_s=options.ttft_target,
            itl_target_s=options.itl_target,
            best_effort=options.best_effort,
            keep_s=options.keep_s,
            timeout_s=options.timeout,
        )
        answer = await _collect(events, printer)
    if options.json:
        write(json.dumps(describe(answer), ensure_ascii=False) + "\n")
    else:
        write(f"\n\n{facts(answer)}\n")


async def _collect(events: AsyncIterator[AnswerEvent], printer: AnswerPrinter | None) -> ClientAnswer:
    answer = ClientAnswer(time.monotonic())
    try:
        async for event in events:
            answer.add(event, time.monotonic())
            if printer is not None:
                printer.add(event)
    except KVRelayError:
        if printer is not None:
            printer.break_line()  # the error gets a line of its own
        raise
    return answer


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3", "[1, 2, 3]" or "@FILE" that holds either. Raises InvalidRequestError."""
    source = text
    if text.startswith("@"):
        try:
            source = Path(text[1:]).read_text("utf-8")
        except OSError as error:
            raise InvalidRequestError(f"cannot read the token ids in {text[1:]}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"the token ids in {text[1:]} are no UTF-8 text: {error}") from error
    words = [word for word in re.split(r"[,\s\[\]]+", source) if word]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < 2**32):
            raise InvalidRequestError(f"{word[:40]!r} is no token id; give whole numbers such as 1,2,3 or @FILE")
    return tuple(map(int, words))


def _check(options: argparse.Namespace) -> None:
    check_timeout(options.timeout)
    asked = GenerateRequest(
        None,
        n=options.n,
        priority=options.priority,
        ttft_target_s=options.ttft_target,
        itl_target_s=options.itl_target,
        request_id=options.request_id,
        keep_s=options.keep_s,
    )
    asked.check_n()
    asked.check_keep()
    asked.check_priority()
    asked.check_targets()
    if options.logprobs and not options.json:
        raise InvalidRequestError("--logprobs are only shown by --json; add it, or leave them out")


def _prompt(options: argparse.Namespace) -> Prompt:
    if options.prompt_ids is not None:
        if options.prompt is not None or options.system:
            raise InvalidRequestError("--prompt-ids is the whole prompt; leave the text and --system out")
        return TokenPrompt(parse_ids(options.prompt_ids))
    if options.prompt is None:
        raise InvalidRequestError('ask something: kvrelay ask "..." ("-" reads the question from stdin)')
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not (text if options.raw else text.strip()):
        raise InvalidRequestError('the question is empty; write one: kvrelay ask "Why is the sky blue?"')
    if options.raw:
        if options.system:
            raise InvalidRequestError("--system needs the chat template, which --raw skips")
        return TextPrompt(text)
    system = (ChatMessage("system", options.system),) if options.system else ()
    return ChatPrompt((*system, ChatMessage("user", text)))


def _sampling(options: argparse.Namespace) -> SamplingParams:
    """What was given; the coordinator has defaults for the rest."""
    names = [entry.name for entry in fields(SamplingParams) if entry.name != "structured"]
    given: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given["structured"] = structured_of(options)
    given["stop"] = tuple(given.get("stop", ()))
    given["stop_token_ids"] = parse_ids(given.get("stop_token_ids", ""))
    given["logit_bias"] = dict(given.get("logit_bias", ()))
    for name in _COUNTS:
        if not 0 <= given.get(name, 0) < (2**64 if name == "seed" else 2**32):
            raise InvalidRequestError(f"{name} is {given[name]}; it cannot be negative nor that large")
    return SamplingParams(**given)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        [parsed] = parse_ids(token_id)
        return parsed, float(value)
    except (InvalidRequestError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias; write ID=X, such as 42=-1.5") from error


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """`cache_salt`, `public_cache` and `cache_ttl`: whose cached KV a prompt may find, and how long its own is kept."""
    caching = parser.add_argument_group("with whom cached KV is shared, and for how long")
    scope = caching.add_mutually_exclusive_group()
    scope.add_argument("--cache-salt", metavar="TEXT", help="only with requests that give the same; default: no salt")
    scope.add_argument(
        "--public-cache", default="", metavar="NAME", help="with every tenant that names the same; default: none"
    )
    caching.add_argument(
        "--cache-ttl",
        type=ttl_argument,
        metavar="TIME",
        help="time a kvstore keeps the prompt's blocks after their last use: 5m, 1h or none (no end); default: the "
        "tenant's",
    )


def parser() -> argparse.ArgumentParser:
    parser = make_parser("ask", "Ask a running cluster; the answer streams, then a line of facts follows.")
    parser.add_argument("prompt", nargs="?", metavar="TEXT", help='the question; "-" reads it from stdin')
    parser.add_argument("--system", default="", metavar="TEXT", help="system message before it")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, without chat template")
    parser.add_argument("--prompt-ids", metavar="IDS", help="token ids instead of text: 1,2,3 or @FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead")
    parser.add_argument("--model", default="", metavar="NAME", help="served model; default: the only one")
    parser.add_argument("--request-id", default="", metavar="ID", help="id to cancel by; default: one is chosen")
    parser.add_argument(
        "--keep-s",
        type=float,
        default=0.0,
        metavar="S",
        help="the request outlives a lost connection by so many seconds, and its answer its end: the same command with "
        "the same --request-id reads it from its beginning (what was cancelled, also by Ctrl-C, as cancelled); up to "
        "600; default 0",
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to ask for, up to 128; default 1")
    _add_scheduling_arguments(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    add_cache_arguments(parser)
    _add_drawing_arguments(parser)
    add_structured_arguments(parser)
    return parser


def _add_scheduling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="go before your requests of less, -100 to 100; default: your usual",
    )
    parser.add_argument(
        "--ttft-target",
        type=float,
        metavar="S",
        help="refuse it at once where the first token would take more seconds; default: your usual",
    )
    parser.add_argument(
        "--itl-target", type=float, metavar="S", help="the same, of the seconds between two tokens on average"
    )
    parser.add_argument(
        "--best-effort", action="store_true", help="run it also where that is out of reach, after your others"
    )


def _add_drawing_arguments(parser: argparse.ArgumentParser) -> None:
    drawing = parser.add_argument_group("how tokens are drawn, and when the answer ends")
    for flag, kind, text in (
        ("--max-tokens", int, "tokens to generate at most"),
        ("--min-tokens", int, "nothing ends the answer before so many tokens"),
        ("--temperature", float, "0 is greedy; up to 2; default 1"),
        (
            "--seed",
            int,
            "the same seed draws the same tokens where logits are equal; in bfloat16: nodes with --weights dtype",
        ),
        ("--top-k", int, "keep the k likeliest tokens; 0 keeps all"),
        ("--top-p", float, "keep the smallest set with this mass, in (0, 1]"),
        ("--min-p", float, "drop tokens under this share of the likeliest one's probability, in [0, 1]"),
        ("--repetition-penalty", float, "over 1 makes seen tokens rarer, in (0, 10]"),
        ("--presence-penalty", float, "taken once from generated tokens' logits, in [-2, 2]"),
        ("--frequency-penalty", float, "taken per occurrence from generated tokens' logits, in [-2, 2]"),
        ("--logprobs", int, "with --json: this many top log-probabilities a token, up to 20"),
    ):
        drawing.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=text)
    drawing.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the answer")
    drawing.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    drawing.add_argument("--stop-token-ids", metavar="IDS", help="token ids that end the answer: 1,2,3")
    drawing.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="added to a token's logit; may be repeated"
    )
