"""Progress of long work, for a person who watches: on stderr, and only where that is a terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Self


class ProgressBar:
    """`unit` is what is counted, such as "block". Does nothing where nobody watches or tqdm is not installed."""

    def __init__(self, title: str, unit: str) -> None:
        self._bar: Any = None
        if not sys.stderr.isatty():
            return
        with suppress(ModuleNotFoundError):
            from tqdm import tqdm

            self._bar = tqdm(desc=title, unit=f" {unit}", file=sys.stderr, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, num_done: int, num_total: int) -> None:
        """How far the work is now; the total may change on the way."""
        if self._bar is not None:
            self._bar.total = num_total
            self._bar.n = num_done
            self._bar.refresh()
