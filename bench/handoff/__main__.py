"""KV on its way from one node to another: how fast, at what cost, and what it does to all else: `make bench-handoff`.

Everything is loopback between processes. Rows, by the names that --rows takes:

  transfer          GB/s and CPU time from pool to pool, beside a raw socket, bare gRPC and Mooncake's TCP engine
  control           a unary call and a slow stream on the connection that carries a handoff; a decode loop beside it
  receiver-process  that decode loop, with KV received in its own process and in another that writes into its pool
  tail              what a handoff adds after a prompt's last chunk, and to the time to the first token
  jitter            inter-token times of running answers while a long prompt's KV arrives

In every round each is measured once, in fresh processes, before the next round begins, so that a drift of the machine
meets all of them. A figure is the median over the rounds, with the least and the greatest. bench/README.md says more.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.engine import machine
from bench.handoff import control, decode, jitter, tail, transfer
from bench.handoff.plan import (
    CONTROL,
    JITTER,
    MOONCAKE,
    QUICK,
    RECEIVER_PROCESS,
    ROWS,
    SENDER_NICENESS,
    TAIL,
    TRANSFER,
    Effort,
    Setting,
)
from bench.handoff.samples import Bar
from bench.options import make_parser
from bench.rounds import Part, Results, measure_all
from kvrelay.certificates import make_certificates
from kvrelay.demo_model import cache_directory, fetch, say_to_stderr

TITLES = {
    TRANSFER: "From pool to pool",
    CONTROL: "Small messages on the same connection",
    decode.DECODE: "A decode loop while KV arrives",
    TAIL: "What a handoff adds to a prompt",
    JITTER: "Inter-token times while KV arrives",
}


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # by exception: the workers end too
    directory = cache_directory() / "bench"
    output = options.json or directory / "results" / time.strftime("handoff-%Y%m%d-%H%M%S.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    results = Results({"machine": machine.describe()}, TITLES)
    effort = QUICK if options.quick else Effort()
    effort = replace(effort, num_rounds=options.repeat or effort.num_rounds)
    with _certificates() as tls:
        model = options.model or fetch()
        setting = Setting(effort, model, directory, tls, tuple(sorted(os.sched_getaffinity(0))))
        if TRANSFER in options.rows and not setting.mooncake.exists():
            results.not_run[MOONCAKE] = f"there is no {setting.mooncake}; `make bench-peers ARGS=mooncake` makes it"
        results.bars = _bars(options.rows, setting)
        try:
            measure_all(
                *(_parts(options.rows), setting, results),
                num_rounds=effort.num_rounds,
                wait_s=options.wait_s,
                output=output,
                say=say_to_stderr,
            )
        finally:  # also what there is when it is ended early
            print(_heading(setting, results) + "\n\n" + results.as_markdown())
            say_to_stderr(f"every sample is in {output}")
    return 0 if results.samples.values else 1


def _parts(rows: tuple[str, ...]) -> list[Part[Setting]]:
    """Of one round. The decode loop in one process is measured once, whichever of its two rows is wanted."""
    parts: dict[str, tuple[Part[Setting], ...]] = {
        TRANSFER: ((TRANSFER, lambda setting, samples, _: transfer.measure(setting, samples)),),
        CONTROL: (
            (CONTROL, lambda setting, samples, _: control.measure(setting, samples)),
            _decode(decode.ONE_PROCESS),
        ),
        RECEIVER_PROCESS: (_decode(decode.ONE_PROCESS), _decode(decode.RECEIVER_PROCESS)),
        TAIL: ((TAIL, tail.measure),),
        JITTER: ((JITTER, jitter.measure),),
    }
    return list({part[0]: part for row in rows for part in parts[row]}.values())


def _decode(mode: str) -> Part[Setting]:
    return f"decode, {mode}", lambda setting, samples, _: decode.measure(setting, samples, mode)


def _bars(rows: tuple[str, ...], setting: Setting) -> list[Bar]:
    bars = {
        TRANSFER: transfer.bars(),
        CONTROL: [*control.bars(), *decode.bars()],
        RECEIVER_PROCESS: decode.bars(),
        TAIL: tail.bars(setting),
        JITTER: jitter.bars(),
    }
    return list(dict.fromkeys(bar for row in rows for bar in bars[row]))


def _heading(setting: Setting, results: Results) -> str:
    about = results.about["machine"]
    cpus = f"CPU {', '.join(map(str, setting.other_cpus))}"
    return (
        f"KV between processes on {about['cpu']}, {about['cores']} cores, loopback; "
        f"{setting.effort.num_rounds} rounds; {setting.model.name} where something decodes.\n"
        f"In the decode loops the decoding thread has CPU {setting.engine_cpus[0]} and all else {cpus}, the sender at "
        f"niceness {SENDER_NICENESS}.\nUnder jitter sender (likewise) and client have {cpus}, the node any."
    )


@contextmanager
def _certificates() -> Iterator[tuple[Path, Path, Path]]:
    """Of a CA, a node and its key; files that live as long as the block."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_certificates(directory)
        yield directory / "ca.pem", directory / "decode-node.pem", directory / "decode-node.key"


def _options() -> argparse.Namespace:
    parser = make_parser("handoff", __doc__, ROWS, Effort().num_rounds)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two processes are measured beside each other, and there is one core")
    return options


if __name__ == "__main__":
    sys.exit(main())
