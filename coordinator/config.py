"""What a coordinator can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvrelay.config import RoleConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(RoleConfig):
    model: Path = option(help="GGUF file or Hugging Face directory whose tokenizer and chat template are used")
    model_name: str = option("", "name that clients ask for; default: the file's or directory's")
    max_queue: int = option(
        256, "answers that may wait for room, n of a request for n; more are turned away", minimum=1
    )
    max_queue_wait_s: float = option(60.0, "longest wait of a request for room", unit="s", minimum=0.1)
    default_max_tokens: int = option(256, "tokens generated when a request does not say", minimum=1)
    max_retries: int = option(3, "attempts beyond the first when nodes fail", minimum=0)
    local_tail_tokens: int = option(
        32, "prompt tokens not cached on the decode node up to which it computes them itself", minimum=0
    )
    member_timeout_s: float = option(3.0, "silence after which a node is taken for dead", unit="s", minimum=0.1)
    request_timeout_s: float = option(600.0, "longest life of a request", unit="s", minimum=0.1)
