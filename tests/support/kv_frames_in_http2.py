"""Finds KV frames in the bytes of one direction of an HTTP/2 connection that carries gRPC. Plain data, no I/O.

HTTP/2 is parsed, not searched: a frame header may stand anywhere in a message, and a slab may hold any bytes.
See docs/wire.md for KV frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.kv.frame import HEADER_BYTES, MAGIC

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # what a client says first
DATA, RST_STREAM = 0x0, 0x3  # kinds of frames: RFC 9113, section 6
END_STREAM = 0x1  # a flag of DATA

_FRAME_HEADER_BYTES = 9
_MESSAGE_PREFIX_BYTES = 5  # of gRPC: a flag, and the message's length as big-endian u32
_KV_START_BYTES = len(MAGIC) + 2  # magic, version, kind


@dataclass(frozen=True, slots=True)
class Http2Frame:
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    def encode(self) -> bytes:
        head = len(self.payload).to_bytes(3, "big") + bytes((self.kind, self.flags))
        return head + self.stream_id.to_bytes(4, "big") + self.payload

    def split(self, at: int) -> tuple[Http2Frame, Http2Frame]:
        """Two DATA frames that say the same; the flags (END_STREAM) stay with the second."""
        first = Http2Frame(self.kind, 0, self.stream_id, self.payload[:at])
        return first, Http2Frame(self.kind, self.flags, self.stream_id, self.payload[at:])


class Http2Reader:
    """Cuts a byte stream into frames. The preface of a client passes as `prefix`."""

    def __init__(self, *, from_client: bool) -> None:
        self._num_preface_bytes = len(PREFACE) if from_client else 0
        self._pending = bytearray()

    def feed(self, data: bytes) -> tuple[bytes, list[Http2Frame]]:
        """What precedes the first frame, and the frames that are complete."""
        self._pending += data
        prefix = bytes(self._pending[: self._num_preface_bytes])
        del self._pending[: len(prefix)]
        self._num_preface_bytes -= len(prefix)
        frames, at = [], 0
        while len(self._pending) - at >= _FRAME_HEADER_BYTES:
            begin = at + _FRAME_HEADER_BYTES
            end = begin + int.from_bytes(self._pending[at : at + 3], "big")
            if end > len(self._pending):
                break
            kind, flags = self._pending[at + 3], self._pending[at + 4]
            stream_id = int.from_bytes(self._pending[at + 5 : begin], "big") & 0x7FFFFFFF
            frames.append(Http2Frame(kind, flags, stream_id, bytes(self._pending[begin:end])))
            at = end
        del self._pending[:at]
        return prefix, frames


@dataclass(frozen=True, slots=True)
class ScanState:
    """Where in a gRPC message a stream stands: its first bytes as far as they came, or what is left of it."""

    head: bytes = b""
    num_left: int = 0


@dataclass(frozen=True, slots=True)
class KVFrameStart:
    """`offset` is where in the payload the message begins: below 0 if in an earlier one. `kind` is a FrameKind's code.
    `before` is the state of the stream at `cut`."""

    offset: int
    kind: int
    before: ScanState

    @property
    def cut(self) -> int:
        """Up to where the payload may pass without the frame."""
        return max(0, self.offset)

    @property
    def payload_offset(self) -> int:
        """Of the KV frame's own payload, in the DATA payload or in those that follow it."""
        return self.offset + _MESSAGE_PREFIX_BYTES + HEADER_BYTES


@dataclass(slots=True)
class _Scan:
    payload: bytes
    head: bytes
    num_left: int
    at: int = 0
    starts: list[KVFrameStart] = field(default_factory=list)


def scan(state: ScanState, payload: bytes) -> tuple[list[KVFrameStart], ScanState]:
    """The KV frames that begin in the payload of one DATA frame, given the state of its stream; and the state after."""
    run = _Scan(payload, state.head, state.num_left)
    while run.at < len(payload):
        if run.num_left:
            step = min(run.num_left, len(payload) - run.at)
            run.num_left -= step
            run.at += step
        else:
            _take_head(run, state)
    return run.starts, ScanState(run.head, run.num_left)


def _take_head(run: _Scan, state: ScanState) -> None:
    """Reads more of a message's first bytes, and judges them when they are all there."""
    wanted = _head_bytes(run.head) - len(run.head)
    run.head += run.payload[run.at : run.at + wanted]
    run.at += min(wanted, len(run.payload) - run.at)
    if len(run.head) < _head_bytes(run.head):
        return
    body, offset = run.head[_MESSAGE_PREFIX_BYTES:], run.at - len(run.head)
    if len(body) == _KV_START_BYTES and body.startswith(MAGIC):
        run.starts.append(KVFrameStart(offset, body[-1], state if offset < 0 else ScanState()))
    run.num_left = _message_bytes(run.head) - len(body)
    run.head = b""


def _head_bytes(head: bytes) -> int:
    """How much of a message must be read before it is known what it is, as far as `head` tells."""
    if len(head) < _MESSAGE_PREFIX_BYTES:
        return _MESSAGE_PREFIX_BYTES
    return _MESSAGE_PREFIX_BYTES + min(_KV_START_BYTES, _message_bytes(head))


def _message_bytes(head: bytes) -> int:
    return int.from_bytes(head[1:_MESSAGE_PREFIX_BYTES], "big")
