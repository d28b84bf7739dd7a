"""Log lines that say which process wrote them. Prompts and answers are never logged, only their sizes."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup(level: str, format: str, role: str, instance_id: str, *, stream: TextIO | None = None) -> None:
    """Sends everything from `level` ("info") on to `stream` (default stderr) as "text" or "json" lines."""
    formatter: logging.Formatter
    formatter = JsonFormatter(role, instance_id) if format == "json" else TextFormatter(role, instance_id)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """2026-01-02T03:04:05.678Z INFO decode-node 1f2e3d4c logger: message key=value"""

    def __init__(self, role: str, instance_id: str) -> None:
        super().__init__()
        self._origin = f"{role} {instance_id}"

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {self._origin} {record.name}: {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in _extras(record).items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line; what a call passes as `extra` becomes keys of its own."""

    def __init__(self, role: str, instance_id: str) -> None:
        super().__init__()
        self._origin = {"role": role, "instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": _time(record), "level": record.levelname.lower(), **self._origin, "logger": record.name}
        fields["message"] = record.getMessage()
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({**_extras(record), **fields}, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
