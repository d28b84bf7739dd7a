"""Log lines name role and instance, as text or JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvrelay import log


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_text_lines() -> None:
    out = io.StringIO()
    log.setup("info", "text", "decode-node", "1f2e", stream=out)

    logging.getLogger("kvrelay.x").info("granted %d blocks", 3, extra={"request_id": "r1"})
    logging.getLogger("kvrelay.x").debug("not shown")

    time, rest = out.getvalue().rstrip("\n").split(" ", 1)
    assert rest == "INFO decode-node 1f2e kvrelay.x: granted 3 blocks request_id=r1"
    assert len(time) == len("2026-01-02T03:04:05.678Z")


def test_json_lines_carry_extras_and_exceptions() -> None:
    out = io.StringIO()
    log.setup("warning", "json", "decode-node", "1f2e", stream=out)

    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("kvrelay.x").exception("failed", extra={"request_id": "r1", "role": "liar"})

    line = json.loads(out.getvalue())
    assert (line["level"], line["role"], line["instance"]) == ("error", "decode-node", "1f2e")
    assert (line["logger"], line["message"], line["request_id"]) == ("kvrelay.x", "failed", "r1")
    assert "ValueError: bad" in line["exception"]
    assert out.getvalue().count("\n") == 1
