"""What the last chunk still has to do, and the time to the first token through a handoff and without one.

One prefill node and one decode node, real processes of one thread each; the colocated node is the same decode node,
which computes the prompt itself.
"""

from __future__ import annotations

from bench.handoff.plan import TAIL, Setting, command, start
from bench.handoff.roles import role
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import BLOCK_TOKENS, info_of

TAIL_MS = "handoff tail, ms"
HANDED_OVER = "first token through a handoff, s"
COLOCATED = "first token, colocated, s"
WARM_UP_TOKENS = 64


def measure(setting: Setting, samples: Samples, seed: int) -> None:
    """One round. Raises WorkerFailedError."""
    longest = max(setting.effort.tail_tokens)
    num_blocks = 2 * -(-longest // BLOCK_TOKENS)
    vocab_size = info_of(str(setting.model)).vocab_size
    with (
        role("prefill-node", setting.model, num_blocks) as prefill,
        role("decode-node", setting.model, num_blocks) as decode,
    ):
        task = {"prefill": prefill.address, "decode": decode.address, "metrics_port": prefill.metrics_port}
        task |= {"vocab_size": vocab_size, "seed": seed}
        with start("the client", command("client", task)) as client:
            client.read()
            for what in ("handoff", "colocated"):
                client.ask(do=what, num_tokens=WARM_UP_TOKENS)
            for num_tokens in setting.effort.tail_tokens:
                report = client.ask(do="handoff", num_tokens=num_tokens)
                alone = client.ask(do="colocated", num_tokens=num_tokens)
                column = column_of(num_tokens)
                samples.add(TAIL, TAIL_MS, column, 1e3 * report["tail_s"])
                samples.add(TAIL, HANDED_OVER, column, report["ttft_s"])
                samples.add(TAIL, COLOCATED, column, alone["ttft_s"])


def column_of(num_tokens: int) -> str:
    return f"{num_tokens:,} tokens"


def bars(setting: Setting) -> list[Bar]:
    columns = [column_of(num_tokens) for num_tokens in setting.effort.tail_tokens]
    flat = Bar(
        f"handoff tail, {columns[-1]} over {columns[0]}", (TAIL, TAIL_MS, columns[-1]), (TAIL, TAIL_MS, columns[0]),
        most=2.0,
    )  # fmt: skip
    return [
        flat,
        *(
            Bar(
                f"first token over colocated, {column}",
                (TAIL, HANDED_OVER, column),
                (TAIL, COLOCATED, column),
                most=1.1,
            )
            for column in columns
        ),
    ]
