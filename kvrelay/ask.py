"""`kvrelay ask` and `kvrelay status`: a question to a running cluster, and a look at it, from the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvrelay.client import AnswerEvent, AsyncClient
from kvrelay.errors import InvalidRequestError, KVRelayError, UnavailableError
from kvrelay.rpc.convert_inference import ClusterStatus, NodeReport
from kvrelay.types import (
    ChatMessage,
    ChatPrompt,
    GeneratedToken,
    Prompt,
    RequestAccepted,
    RequestFinished,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    TokensGenerated,
)

DEFAULT_ADDRESS = "127.0.0.1:7400"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main_ask(argv: Sequence[str]) -> int:
    """Streams an answer to stdout, then a line of facts; 1 with one line on stderr when there is no answer."""
    options = _ask_parser().parse_args(argv)
    return _run("ask", options.address, lambda: _ask(options))


def main_status(argv: Sequence[str]) -> int:
    """Prints the cluster as the coordinator sees it; 1 with one line on stderr when it cannot be asked."""
    options = _status_parser().parse_args(argv)
    return _run("status", options.address, lambda: _status(options))


def _run(command: str, address: str, work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    try:
        asyncio.run(work())
    except UnavailableError as error:
        reason = error.message
        if "connect" in reason.lower():
            reason = f"no coordinator answers at {address}; start a cluster with `kvrelay up`, or name it by --address"
        return _fail(command, reason)
    except KVRelayError as error:
        return _fail(command, error.message)
    except BrokenPipeError:
        sys.stderr.close()  # else the interpreter complains of stdout when it exits
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _fail(command: str, reason: str) -> int:
    sys.stderr.write(f"kvrelay {command}: {reason}\n")
    return EXIT_FAILED


# ask


async def _ask(options: argparse.Namespace) -> None:
    prompt, sampling = _prompt(options), _sampling(options)
    async with AsyncClient(options.address) as client:
        events = client.generate(
            prompt, sampling, request_id=options.request_id, model=options.model, timeout_s=options.timeout
        )
        answer = await _collect(events, show=not options.json)
    if options.json:
        _write(json.dumps(describe(answer), ensure_ascii=False) + "\n")
    else:
        _write(f"\n\n{facts(answer)}\n")


@dataclass(slots=True)
class ClientAnswer:
    """What came, and when by this process's clock; `gaps_s` lie between tokens that follow each other."""

    started_at: float
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    accepted: RequestAccepted | None = None
    finished: RequestFinished | None = None
    last_token_at: float = 0.0

    def add(self, event: TokensGenerated, now: float) -> None:
        self.text += event.text
        if not event.tokens:
            return
        if not self.tokens:
            self.first_token_s = now - self.started_at
        else:
            num_tokens = len(event.tokens)
            self.gaps_s += [(now - self.last_token_at) / num_tokens] * num_tokens
        self.tokens += event.tokens
        self.last_token_at = now


async def _collect(events: AsyncIterator[AnswerEvent], *, show: bool) -> ClientAnswer:
    answer = ClientAnswer(time.monotonic())
    async for event in events:
        match event:
            case RequestAccepted():
                answer.accepted = event
            case TokensGenerated():
                answer.add(event, time.monotonic())
                if show and event.text:
                    _write(event.text)
            case RequestFinished():
                answer.finished = event
    return answer


def facts(answer: ClientAnswer) -> str:
    """The line under an answer."""
    finished = answer.finished
    assert finished is not None
    usage, cached = finished.usage, finished.usage.cached
    tiers = ", ".join(f"{getattr(cached, tier)} {tier}" for tier in _TIERS if getattr(cached, tier))
    p50, p95 = percentiles(answer.gaps_s)
    parts = [
        f"{usage.prompt_tokens} prompt tokens ({f'cached: {tiers}' if tiers else 'none cached'})",
        f"{usage.completion_tokens} tokens out ({finished.reason.value})",
        f"TTFT {_ms(answer.first_token_s)}",
        f"inter-token p50 {_ms(p50)}, p95 {_ms(p95)}",
        f"KV handed over {_size(finished.handoff_bytes)}",
    ]
    if finished.retries:
        parts.append(f"retries {finished.retries}")
    return "[" + " | ".join(parts) + "]"


def describe(answer: ClientAnswer) -> dict[str, Any]:
    """The object of --json. Times in seconds; those under "client" by this process's clock."""
    finished, accepted = answer.finished, answer.accepted
    assert finished is not None
    assert accepted is not None
    p50, p95 = percentiles(answer.gaps_s)
    result = {
        "request_id": accepted.request_id,
        "text": answer.text,
        "token_ids": [token.token_id for token in answer.tokens],
        "finish_reason": finished.reason.value,
        "stop_string": finished.stop_string,
        "seed": accepted.seed,
        "usage": {
            "prompt_tokens": finished.usage.prompt_tokens,
            "completion_tokens": finished.usage.completion_tokens,
            "cached_tokens": asdict(finished.usage.cached),
        },
        "timing": {
            **asdict(finished.timing),
            "client": {"first_token_s": answer.first_token_s, "inter_token_p50_s": p50, "inter_token_p95_s": p95},
        },
        "nodes": {"prefill": finished.prefill_node, "decode": finished.decode_node},
        "handoff_bytes": finished.handoff_bytes,
        "retries": finished.retries,
    }
    if any(token.logprobs for token in answer.tokens):
        result["logprobs"] = [asdict(token.logprobs) if token.logprobs else None for token in answer.tokens]
    return result


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 95th; zeros without values."""
    if len(values) < 2:
        value = values[0] if values else 0.0
        return value, value
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids of "1,2,3", "[1, 2, 3]" or "@FILE" that holds either. Raises InvalidRequestError."""
    source = text
    if text.startswith("@"):
        try:
            source = Path(text[1:]).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"cannot read the token ids in {text[1:]}: {error}") from error
    words = [word for word in re.split(r"[,\s\[\]]+", source) if word]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) < 2**32):
            raise InvalidRequestError(f"{word[:40]!r} is no token id; give whole numbers such as 1,2,3 or @FILE")
    return tuple(map(int, words))


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
    named = ((entry.name, getattr(options, entry.name)) for entry in fields(SamplingParams))
    given: dict[str, Any] = {name: value for name, value in named if value is not None}
    given["stop"] = tuple(given.get("stop", ()))
    given["stop_token_ids"] = parse_ids(given.get("stop_token_ids", ""))
    given["logit_bias"] = dict(given.get("logit_bias", ()))
    for name in _COUNTS:
        if not 0 <= given.get(name, 0) < (2**64 if name == "seed" else 2**32):
            raise InvalidRequestError(f"{name} is {given[name]}; it cannot be negative nor that large")
    return SamplingParams(**given)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    [parsed] = parse_ids(token_id) or (-1,)
    if parsed < 0:
        raise ValueError(text)
    return parsed, float(value)


_TIERS = ("device", "memory", "disk")
_COUNTS = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs")


def _ask_parser() -> argparse.ArgumentParser:
    parser = _parser("ask", "Ask a running cluster; the answer streams, then a line of facts follows.")
    parser.add_argument("prompt", nargs="?", metavar="TEXT", help='the question; "-" reads it from stdin')
    parser.add_argument("--system", default="", metavar="TEXT", help="system message before it")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands, without chat template")
    parser.add_argument("--prompt-ids", metavar="IDS", help="token ids instead of text: 1,2,3 or @FILE")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead")
    parser.add_argument("--model", default="", metavar="NAME", help="served model; default: the only one")
    parser.add_argument("--request-id", default="", metavar="ID", help="id to cancel by; default: one is chosen")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    drawing = parser.add_argument_group("how tokens are drawn, and when the answer ends")
    for flag, kind, text in (
        ("--max-tokens", int, "tokens to generate at most"),
        ("--min-tokens", int, "nothing ends the answer before so many tokens"),
        ("--temperature", float, "0 is greedy; up to 2; default 1"),
        ("--seed", int, "the same seed draws the same tokens"),
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
    return parser


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"kvrelay {command}", description=description, allow_abbrev=False)
    parser.add_argument(
        "--address",
        default=os.environ.get("KVRELAY_ADDRESS", DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help=f"of the coordinator; default: KVRELAY_ADDRESS, else {DEFAULT_ADDRESS}",
    )
    return parser


# status


async def _status(options: argparse.Namespace) -> None:
    async with AsyncClient(options.address) as client:
        status = await client.status()
    if options.json:
        _write(json.dumps(describe_status(status)) + "\n")
    else:
        _write(status_table(options.address, status) + "\n")


def describe_status(status: ClusterStatus) -> dict[str, Any]:
    """The object of --json."""
    return {
        "ready": status.ready,
        "num_queued": status.num_queued,
        "num_running": status.num_running,
        "nodes": [
            {
                "role": report.info.role.value,
                "address": report.info.address,
                "instance_id": report.info.instance_id,
                "model": report.info.model.name if report.info.model else None,
                **asdict(report.status),
                "age_s": report.age_s,
            }
            for report in status.nodes
        ],
    }


def status_table(address: str, status: ClusterStatus) -> str:
    state = "ready" if status.ready else "not ready"
    lines = [f"coordinator {address}: {state}, {status.num_running} running, {status.num_queued} queued"]
    if not status.nodes:
        return lines[0] + "\nno node has joined"
    rows = [_HEADER, *(_cells(report) for report in status.nodes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


_HEADER = ("ROLE", "ADDRESS", "STATE", "RUNNING", "WAITING", "RESERVED", "BLOCKS free/reserved/held/cached", "TOTAL")


def _cells(report: NodeReport) -> tuple[str, ...]:
    status, blocks = report.status, report.status.blocks
    state = "draining" if status.draining else "ready" if status.ready else "not ready"
    if not blocks.total:
        held = f"memory {_size(status.memory_bytes)}, disk {_size(status.disk_bytes)}"
        return (report.info.role.value, report.info.address, state, "-", "-", "-", held, "-")
    counts = f"{blocks.free}/{blocks.reserved}/{blocks.held}/{blocks.cached}"
    numbers = (status.num_running, status.num_waiting, status.num_reservations)
    return (report.info.role.value, report.info.address, state, *map(str, numbers), counts, str(blocks.total))


def _status_parser() -> argparse.ArgumentParser:
    parser = _parser("status", "Show a running cluster: its nodes, their KV blocks, what waits and runs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _size(num_bytes: int) -> str:
    """Rounded for people: "0 B", "1.4 MiB"."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{num_bytes} B" if size == num_bytes else f"{size:.1f} {units[0]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
