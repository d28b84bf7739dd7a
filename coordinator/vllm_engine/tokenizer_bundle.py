"""A model's tokenizer as one zip archive, for a gateway that tokenizes by itself."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvrelay.tokenizer_files import tokenizer_files

CHUNK_BYTES = 1_048_576
_EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's own: the same files make the same archive


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    data: bytes
    sha256: str  # of `data`, in hex

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """At most CHUNK_BYTES each; the last one has the archive's sha256, the others none."""
        for start in range(0, len(self.data), CHUNK_BYTES):
            is_last = start + CHUNK_BYTES >= len(self.data)
            yield self.data[start : start + CHUNK_BYTES], self.sha256 if is_last else ""


def make_bundle(path: Path) -> TokenizerBundle:
    """Of the model at `path`; takes some hundred milliseconds. Raises ModelFileError."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as writing:
        for name, content in sorted(tokenizer_files(path).items()):
            writing.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    data = archive.getvalue()
    return TokenizerBundle(data, hashlib.sha256(data).hexdigest())
