"""What a coordinator can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.tenant_policy import parse_policies
from kvrelay.config import RoleConfig, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(RoleConfig):
    model: Path = option(help="GGUF file or Hugging Face directory whose tokenizer and chat template are used")
    model_name: str = option("", "name that clients ask for; default: the file's or directory's")
    max_queue: int = option(
        256, "answers that may wait for room, n of a request for n; more are turned away", minimum=1
    )
    max_queued_tokens: int = option(
        0,
        "tokens that waiting answers may want in all, uncached ones of prompts and max_tokens; 0: no bound",
        minimum=0,
    )
    max_queue_wait_s: float = option(60.0, "longest wait of a request for room", unit="s", minimum=0.1)
    tenants: str = option(
        "",
        "tenants' shares and bounds, as NAME:KEY=VALUE,... with semicolons between; * is everyone not named. Keys: "
        "weight (of the share of tokens while others wait, 1), max_queued, max_queued_tokens, max_wait_s (0: as for "
        "all), priority (of requests that name none, -100 to 100, 0)",
    )
    default_max_tokens: int = option(256, "tokens generated when a request does not say", minimum=1)
    max_retries: int = option(3, "attempts beyond the first when nodes fail", minimum=0)
    local_tail_tokens: int = option(
        32,
        "prompt tokens not cached on the decode node up to which it computes them itself while it has not measured how "
        "fast it does; then what costs less is done; 0: it never computes prompts",
        minimum=0,
    )
    # A node that is gone is found in less than 5 s by its broken streams. This is for one that hangs, and longer than
    # an interpreter may be busy: meanwhile keepalive, answered below it, says that all is well.
    member_timeout_s: float = option(
        12.0, "silence of a node, its connection alive or not, after which it is taken for dead", unit="s", minimum=0.1
    )
    no_node_wait_s: float = option(
        5.0, "longest wait of an accepted request while no node of a role it needs is ready", unit="s", minimum=0.1
    )
    cluster_secret_file: str = option(
        "",
        "file with a secret, the same for all coordinators, that enters the name of every cached block, so that nobody "
        "can compute one from its tokens; after a change nothing cached before is found; none: no secret",
        unit="file",
    )
    request_timeout_s: float = option(600.0, "longest life of a request", unit="s", minimum=0.1)

    def check(self) -> None:
        """Raises ConfigError where fields contradict each other."""
        parse_policies(self.tenants).check_within(self.max_queue, self.max_queue_wait_s)
