"""Hostile bytes at every method of the store: an error, no file, no crash, no large allocation, and it serves on."""

from __future__ import annotations

import os
import pickle
import random
import resource
import struct
import zlib
from pathlib import Path

import grpc
import pytest

from kvrelay.kv import frame
from kvrelay.kv.frame import FrameKind, control_frame, encode
from kvrelay.kv.hashing import slab_checksum
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.rpc import raw
from kvrelay.rpc.channel import open_channel
from tests.support.fake_store import served_store

UNARY = ("Match", "Stats", "Pin", "Delete")
STREAMS = ("List", "Verify", "Compact")
GROWTH_BYTES = 50 << 20
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS)


class Planted:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (self._path, os.O_CREAT)


def hostile(planted: Path) -> list[bytes]:
    draw = random.Random(7)
    messages = [pickle.dumps(Planted(planted)), b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x7f", b"{}", bytes(100)]
    return messages + [draw.randbytes(draw.randrange(1, 2_000)) for _ in range(20)]


def frame_of_length(payload_bytes: int, kind: int = FrameKind.BLOCK) -> bytes:
    """A header that announces that much, with a right CRC, and 10 bytes behind it."""
    sound = encode(control_frame(FrameKind.BEGIN, b"0123456789"))
    fields = bytearray(sound[: frame.HEADER_BYTES - 4])
    fields[5] = kind
    fields[16:20] = struct.pack("<I", payload_bytes)
    return bytes(fields) + struct.pack("<I", zlib.crc32(fields)) + sound[frame.HEADER_BYTES :]


def peak_bytes() -> int:
    """Most memory that this process, which is the store too, ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


async def refused(call: grpc.aio.Call) -> grpc.StatusCode:
    """The status; of a stream, after all of it."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", [*UNARY, *STREAMS])
async def test_what_is_no_message_is_refused(method: str, tmp_path: Path) -> None:
    """Some of it happens to be a message, of no known fields: then it is one that asks for nothing."""
    planted = tmp_path / "planted"
    async with served_store() as served, open_channel(served.address) as channel:
        make = channel.unary_unary if method in UNARY else channel.unary_stream
        before = peak_bytes()
        codes = [await refused(make(f"/kvrelay.pb.KVStore/{method}")(message)) for message in hostile(planted)]
        assert set(codes) <= {grpc.StatusCode.OK, *REFUSED}
        assert codes[1] is codes[2] is grpc.StatusCode.INVALID_ARGUMENT
        assert served.store.held == {}
        async with StoreAdmin(served.address) as admin:
            assert (await admin.stats()).misses == 11, "it serves on"
        assert peak_bytes() - before < GROWTH_BYTES
    assert not planted.exists()


async def test_what_is_no_frame_is_refused(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    frames = [frame_of_length(size) for size in (2**32 - 1, 2**31, 100)]
    frames += [frame_of_length(10, kind) for kind in (0, 5, 255)]
    frames += [encode(control_frame(FrameKind.BEGIN, pickle.dumps(Planted(planted))))]
    async with served_store() as served, open_channel(served.address) as channel:
        before = peak_bytes()
        put = raw.stream_unary(channel, raw.KV_TRANSFER, "Put")
        get = raw.unary_stream(channel, raw.KV_TRANSFER, "Get")
        for message in (*hostile(planted), *frames):
            assert await refused(put(iter([message]))) in REFUSED, message[:80]
            assert await refused(get(message)) in REFUSED, message[:80]
        assert served.store.held == {}
        assert peak_bytes() - before < GROWTH_BYTES
    assert not planted.exists()


def test_the_planted_file_would_be_made(tmp_path: Path) -> None:
    os.close(pickle.loads(pickle.dumps(Planted(tmp_path / "planted"))))
    assert (tmp_path / "planted").exists()


def test_a_frame_of_the_right_length_and_kind_is_sound() -> None:
    [found] = frame.decode(frame_of_length(10, FrameKind.BEGIN), max_payload_bytes=100)
    assert (found.kind, found.checksum) == (FrameKind.BEGIN, slab_checksum(b"0123456789"))
