"""A decode loop's speed while KV arrives: in the process that decodes, or in one that writes into its pool.

Both have the same cores: the first is the decoding thread's, the others have event loops and sender.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.engine.launch import Worker
from bench.handoff.decoding import BATCH, NUM_AHEAD_STEPS, NUM_WARM_UP_STEPS, PROMPT_TOKENS
from bench.handoff.pace import MB, NONE, name_of
from bench.handoff.plan import DECODE_LOADS, SENDER_NICENESS, STEADY, Setting, command, start
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import BLOCK_TOKENS, info_of, num_blocks_of
from bench.handoff.shared_memory import pool_file

DECODE = "decode"
ONE_PROCESS = "one process"
RECEIVER_PROCESS = "receiver process, shared pool"
HANDOFF_BLOCKS = num_blocks_of("135M")


def measure(setting: Setting, samples: Samples, mode: str) -> None:
    """One round of one of the two. Raises WorkerFailedError."""
    with _processes(setting, mode) as (decoding, sender):
        for bytes_per_s in DECODE_LOADS:
            if bytes_per_s != NONE:
                sender.ask(do="load", bytes_per_s=bytes_per_s)
            report = decoding.ask(do="decode", num_steps=setting.effort.decode_steps)
            samples.add(DECODE, mode, f"steps/s, {name_of(bytes_per_s)}", report["steps_per_s"])
            if bytes_per_s != NONE:
                rate = sender.ask(do="unload")["bytes_per_s"]
                samples.add(DECODE, mode, f"MB/s that left, {name_of(bytes_per_s)}", rate / MB)
        if mode == RECEIVER_PROCESS:
            block = _decode_blocks(setting)
            if not decoding.ask(do="look", block=block)["written"]:
                raise AssertionError("what the receiver process wrote is not in the decoding one's pool")


@contextmanager
def _processes(setting: Setting, mode: str) -> Iterator[tuple[Worker, Worker]]:
    """Who decodes, and who sends."""
    own = _decode_blocks(setting)
    task = {"shape": str(setting.model), "model": str(setting.model), "engine_cpus": setting.engine_cpus}
    if mode == ONE_PROCESS:
        task |= {"num_blocks": own + HANDOFF_BLOCKS + 1}
        with (
            start("the decoding receiver", command("receiver", task), cpus=setting.other_cpus) as far,
            _sender(setting, far) as sender,
        ):
            yield far, sender
        return
    slab_bytes = info_of(str(setting.model)).layout.slab_bytes
    num_shared = HANDOFF_BLOCKS + 1
    with pool_file((own + num_shared + 1) * slab_bytes) as fd:  # and the scratch block behind
        task |= {"num_blocks": own, "num_extra_blocks": num_shared, "memory_fd": fd, "memory_offset": 0}
        receiving = {"shape": str(setting.model), "num_blocks": num_shared}
        receiving |= {"memory_fd": fd, "memory_offset": own * slab_bytes}
        cpus = setting.other_cpus
        with (
            start("the decoding process", command("receiver", task), cpus=cpus, pass_fds=(fd,)) as decoding,
            start("the receiver process", command("receiver", receiving), cpus=cpus, pass_fds=(fd,)) as far,
        ):
            decoding.read()
            with _sender(setting, far) as sender:
                yield decoding, sender


@contextmanager
def _sender(setting: Setting, far: Worker) -> Iterator[Worker]:
    """To `far`, once that is ready."""
    task = {"shape": str(setting.model), "num_blocks": HANDOFF_BLOCKS, "peer_pid": far.pid, **far.read()}
    words = command("sender", task, niceness=SENDER_NICENESS)
    with start("the sender", words, cpus=setting.other_cpus) as sender:
        sender.read()
        yield sender


def _decode_blocks(setting: Setting) -> int:
    """Of the sequences that decode."""
    num_tokens = PROMPT_TOKENS + NUM_WARM_UP_STEPS + setting.effort.decode_steps + NUM_AHEAD_STEPS
    return BATCH * -(-num_tokens // BLOCK_TOKENS)


def bars() -> list[Bar]:
    alone, steady = f"steps/s, {name_of(NONE)}", f"steps/s, {name_of(STEADY)}"
    return [
        Bar(f"{mode}: decode speed at 300 MB/s over alone", (DECODE, mode, steady), (DECODE, mode, alone), least=0.9)
        for mode in (ONE_PROCESS, RECEIVER_PROCESS)
    ]
