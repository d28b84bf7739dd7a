"""Finds gRPC messages, and the KV frames in them, in one direction of an HTTP/2 connection. Plain data, no I/O.

HTTP/2 is parsed, not searched: a frame header may stand anywhere in a message, and a slab may hold any bytes.
See docs/wire.md for KV frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvrelay.kv.frame import HEADER_BYTES, MAGIC

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # what a client says first
DATA, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0x0, 0x3, 0x4, 0x6, 0x8  # kinds of frames: RFC 9113, section 6
END_STREAM = 0x1  # a flag of DATA

_FRAME_HEADER_BYTES = 9
_MESSAGE_PREFIX_BYTES = 5  # of gRPC: a flag, and the message's length as big-endian u32
_PAYLOAD_BYTES_AT = 16  # in a KV frame's header
HEAD_BYTES = _PAYLOAD_BYTES_AT + 4  # of a message or KV frame, to know it by


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
    """Where in a gRPC message a stream stands: the first bytes of a part as far as they came, or what is left of it;
    and how much of the message follows that part. A part is a KV frame, or a whole message of another kind."""

    head: bytes = b""
    num_left: int = 0
    num_after: int = 0


@dataclass(frozen=True, slots=True)
class PartStart:
    """A part's first bytes, and where in the payload it begins (its message, if it is the first): below 0 if in an
    earlier one. `before` is the state of the stream at `cut`."""

    offset: int
    head: bytes
    is_first: bool
    before: ScanState

    @property
    def cut(self) -> int:
        """Up to where the payload may pass without the part."""
        return max(0, self.offset)

    @property
    def kv_kind(self) -> int | None:
        """The FrameKind's code, of a KV frame."""
        return self.head[len(MAGIC) + 1] if _is_frame(self.head) else None

    @property
    def kv_payload_offset(self) -> int:
        """Of the KV frame's own payload, in the DATA payload or in those that follow it."""
        return self.offset + self.is_first * _MESSAGE_PREFIX_BYTES + HEADER_BYTES


@dataclass(slots=True)
class _Scan:
    payload: bytes
    state: ScanState
    at: int = 0
    starts: list[PartStart] = field(default_factory=list)


def scan(state: ScanState, payload: bytes) -> tuple[list[PartStart], ScanState]:
    """The parts whose first bytes end in the payload of one DATA frame, given the state of its stream; and the state
    after."""
    run = _Scan(payload, state)
    while run.at < len(payload):
        left = run.state.num_left
        if left:
            step = min(left, len(payload) - run.at)
            run.state = replace(run.state, num_left=left - step)
            run.at += step
        else:
            _take_head(run, state)
    return run.starts, run.state


def _take_head(run: _Scan, state: ScanState) -> None:
    """Reads more of a part's first bytes, and notes it when they are all there."""
    head, num_after = run.state.head, run.state.num_after
    wanted = _head_bytes(head, num_after) - len(head)
    head += run.payload[run.at : run.at + wanted]
    run.at += min(wanted, len(run.payload) - run.at)
    run.state = replace(run.state, head=head)
    if len(head) < _head_bytes(head, num_after):
        return
    is_first, offset = num_after == 0, run.at - len(head)
    body, num_bytes = (head[_MESSAGE_PREFIX_BYTES:], _message_bytes(head)) if is_first else (head, num_after)
    before = state if offset < 0 else ScanState(num_after=num_after)
    run.starts.append(PartStart(offset, body, is_first, before))
    part_bytes = min(num_bytes, _frame_bytes(body)) if _is_frame(body) else num_bytes
    run.state = ScanState(b"", part_bytes - len(body), num_bytes - part_bytes)


def _head_bytes(head: bytes, num_after: int) -> int:
    """How much must be read before it is known what the part is, as far as `head` tells."""
    if num_after:
        return min(HEAD_BYTES, num_after)
    if len(head) < _MESSAGE_PREFIX_BYTES:
        return _MESSAGE_PREFIX_BYTES
    return _MESSAGE_PREFIX_BYTES + min(HEAD_BYTES, _message_bytes(head))


def _is_frame(body: bytes) -> bool:
    return len(body) == HEAD_BYTES and body.startswith(MAGIC)


def _frame_bytes(body: bytes) -> int:
    return HEADER_BYTES + int.from_bytes(body[_PAYLOAD_BYTES_AT:HEAD_BYTES], "little")


def _message_bytes(head: bytes) -> int:
    return int.from_bytes(head[1:_MESSAGE_PREFIX_BYTES], "big")
