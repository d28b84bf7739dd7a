"""`kvrelay chat`: a conversation with a running cluster from the command line."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvrelay.client import AnswerEvent, Client
from kvrelay.client_answer import ClientAnswer, describe, facts
from kvrelay.client_command import EXIT_FAILED, check_timeout, explain_failure, make_parser, refuse, run_blocking, write
from kvrelay.errors import InvalidRequestError, KVRelayError
from kvrelay.inference import ChatMessage, ChatPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams

PROMPT = "> "
CLEAR, LEAVE = "/clear", "/exit"
_NO_VOCABULARY = 2**32  # what only the model can check is left to it


class Conversation:
    """What was said so far; a turn whose answer did not come whole is as if it had not been."""

    def __init__(self, system: str = "") -> None:
        self._system = (ChatMessage("system", system),) if system else ()
        self._turns: tuple[ChatMessage, ...] = ()

    def ask(self, text: str) -> ChatPrompt:
        """All of it, with one more turn at its end."""
        return ChatPrompt((*self._system, *self._turns, ChatMessage("user", text)))

    def answered(self, text: str, answer: str) -> None:
        self._turns += (ChatMessage("user", text), ChatMessage("assistant", answer))

    def clear(self) -> None:
        """All but the system message."""
        self._turns = ()


class Chat:
    """Turns, each answered as it streams; text streams unless `options` ask for JSON. `num_failed` counts turns that
    had no answer."""

    def __init__(self, client: Client, options: argparse.Namespace, sampling: SamplingParams) -> None:
        self._client = client
        self._options = options
        self._sampling = sampling
        self._conversation = Conversation(options.system)
        self.num_failed = 0

    def run(self, read: Callable[[], str | None]) -> None:
        """Until `read` has no more, or the word to leave. Ctrl-C ends the answer under way, and the chat elsewhere."""
        while (text := read()) is not None:
            match text.strip():
                case "":
                    continue
                case word if word == LEAVE:
                    return
                case word if word == CLEAR:
                    self._conversation.clear()
                case word:
                    self._turn(word)

    def _turn(self, text: str) -> None:
        try:
            answer = self._answer(text)
        except KVRelayError as error:
            self.num_failed += 1
            sys.stderr.write(f"kvrelay chat: {explain_failure(error, self._options.address)}\n")
        except KeyboardInterrupt:
            write("\n[interrupted; the turn is forgotten]\n")
        else:
            self._conversation.answered(text, answer.choices[0].text)
            self._show(answer)

    def _answer(self, text: str) -> ClientAnswer:
        answer = ClientAnswer(time.monotonic())
        options = self._options
        events = self._client.generate(
            self._conversation.ask(text),
            self._sampling,
            model=options.model,
            cache_salt=options.cache_salt,
            timeout_s=options.timeout,
        )
        for event in events:
            answer.add(event, time.monotonic())
            if not options.json:
                _write_text(event)
        return answer

    def _show(self, answer: ClientAnswer) -> None:
        if self._options.json:
            write(json.dumps(describe(answer), ensure_ascii=False) + "\n")
        else:
            write(f"\n\n{facts(answer)}\n\n")


def main(argv: Sequence[str]) -> int:
    """The exit status: 1, after one line on stderr each, when the cluster cannot be asked or a turn had no answer; 2
    when the command line makes no sense."""
    options = parser().parse_args(argv)
    given = {name: getattr(options, name) for name in ("temperature", "max_tokens", "seed")}
    sampling = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    try:
        sampling.validate(_NO_VOCABULARY)
        check_timeout(options.timeout)
    except InvalidRequestError as error:
        return refuse("chat", error.message)
    failed = False

    def converse() -> None:
        nonlocal failed
        with Client(options.address) as client:
            client.get_model(options.model)  # so that nobody writes a question to a cluster that is not there
            if sys.stdin.isatty() and not options.json:
                write(f"{CLEAR} begins anew, {LEAVE} or Ctrl-D leaves, Ctrl-C ends an answer\n")
            chat = Chat(client, options, sampling)
            chat.run(_read_turn)
            failed = chat.num_failed > 0

    status = run_blocking("chat", options.address, converse)
    return status or (EXIT_FAILED if failed else 0)


def _write_text(event: AnswerEvent) -> None:
    if isinstance(event, TokensGenerated):
        write(event.text)


def _read_turn() -> str | None:
    """A line of stdin, edited as the terminal's own; None at the end."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and the arrow keys
    try:
        return input(PROMPT)
    except EOFError:
        write("\n")
        return None


def parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "chat",
        f"Talk to a running cluster, a line a turn; {CLEAR} begins anew, {LEAVE} or the end of the input leaves. Under "
        "each answer stands how much of the conversation was cached.",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="system message before the first turn")
    parser.add_argument("--model", default="", metavar="NAME", help="served model; default: the only one")
    parser.add_argument("--json", action="store_true", help="print one JSON object a turn instead")
    parser.add_argument("--cache-salt", metavar="TEXT", help="share cached KV only with requests that give the same")
    parser.add_argument("--temperature", type=float, metavar="X", help="0: greedy, up to 2; default 1")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer; default: the coordinator's")
    parser.add_argument("--seed", type=int, metavar="N", help="for the same answers again; default: chosen")
    parser.add_argument("--timeout", type=float, metavar="S", help="give a turn up after so many seconds")
    return parser
