"""Inter-token times of a decode node's running answers while a long prompt's KV is handed to it.

The node is a real process that may use every core; who sends and who looks at the clock have all but the first, and the
sender gives way there: neither would be on this machine.
"""

from __future__ import annotations

import time

from bench.engine.table import percentile
from bench.handoff.pace import FULL, MB, NONE, name_of
from bench.handoff.plan import JITTER, JITTER_LOADS, PREFILL_PACE, SENDER_NICENESS, Setting, command, start
from bench.handoff.roles import role
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import BLOCK_TOKENS, info_of

BATCH = 8
PROMPT_TOKENS = 64
ANSWER_BLOCKS = 300  # an answer's share of the pool: more than it may come to
SETTLE_S = 0.3  # of decoding before the gaps count


def measure(setting: Setting, samples: Samples, seed: int) -> None:
    """One round. Raises WorkerFailedError."""
    num_handed_over = setting.effort.jitter_tokens // BLOCK_TOKENS
    num_blocks = BATCH * ANSWER_BLOCKS + num_handed_over + 1
    shape = str(setting.model)
    with role("decode-node", setting.model, num_blocks) as decode:
        asking = {"decode": decode.address, "vocab_size": info_of(shape).vocab_size, "seed": seed}
        sending = {"shape": shape, "num_blocks": num_handed_over, "port": int(decode.address.rpartition(":")[2])}
        sending |= {"peer_pid": 0}
        words = command("sender", sending, niceness=SENDER_NICENESS)
        with (
            start("the client", command("client", asking), cpus=setting.other_cpus) as client,
            start("the sender", words, cpus=setting.other_cpus) as sender,
        ):
            client.read()
            sender.read()
            for bytes_per_s in JITTER_LOADS:
                client.ask(do="begin", num_tokens=PROMPT_TOKENS, batch=BATCH)
                if bytes_per_s != NONE:
                    sender.ask(do="load", bytes_per_s=bytes_per_s)
                time.sleep(SETTLE_S)
                gaps_s = client.ask(do="gaps", seconds=setting.effort.jitter_s)["gaps_s"]
                line = name_of(bytes_per_s)
                for percent in (50, 99):
                    samples.add(JITTER, line, f"p{percent} ms", 1e3 * percentile(gaps_s, percent))
                if bytes_per_s != NONE:
                    samples.add(JITTER, line, "MB/s handed over", sender.ask(do="unload")["bytes_per_s"] / MB)
                client.ask(do="end")


def bars() -> list[Bar]:
    base = (JITTER, name_of(NONE), "p99 ms")
    return [
        Bar(f"inter-token p99 at {name_of(load)}, over no handoff", (JITTER, name_of(load), "p99 ms"), base, most=1.2)
        for load in (PREFILL_PACE, FULL)
    ]
