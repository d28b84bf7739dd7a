"""What a coordinator can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.model_list import add_model, parse_models
from coordinator.prefix_index import MAX_BLOCKS
from coordinator.prompt_limits import PromptLimits, parse_tokens_by_model
from coordinator.tenant_policy import parse_policies
from kvrelay.address import MAX_PORT
from kvrelay.errors import ConfigError
from kvrelay.option import option
from kvrelay.role_config import RoleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(RoleConfig):
    model: Path | None = option(
        None, "GGUF file or Hugging Face directory whose tokenizer and chat template are used; needed without models"
    )
    model_name: str = option("", "name that clients ask for model by; default: the file's or directory's")
    models: str = option(
        "",
        "several models to serve, beside model or instead of it, as NAME=PATH with semicolons between; each node says "
        "by its own model_name which of them it serves",
    )
    http_port: int = option(
        8000,
        "port of OpenAI's API over HTTP, on the same host; 0 takes any free one, -1 is off",
        minimum=-1,
        maximum=MAX_PORT,
    )
    max_queue: int = option(
        256, "answers that may wait for room, of each model, n of a request for n; more are turned away", minimum=1
    )
    max_queued_tokens: int = option(
        0,
        "tokens that waiting answers of a model may want in all, uncached ones of prompts and max_tokens; 0: no bound",
        minimum=0,
    )
    max_queue_wait_s: float = option(60.0, "longest wait of a request for room", unit="s", minimum=0.1)
    tenants: str = option(
        "",
        "tenants' shares and bounds, as NAME:KEY=VALUE,... with semicolons between; * is everyone not named. Keys: "
        "weight (of the share of tokens while others wait, 1), max_queued, max_queued_tokens, max_wait_s (0: as for "
        "all), priority (of requests that name none, -100 to 100, 0), ttft_s and itl_s (targets of requests that name "
        "none, 0: none), max_prompt_tokens and max_prompt_tokens@MODEL (for that model instead), daily_tokens (of "
        "prompts and answers, a day of UTC), max_open (answers that wait or are computed; 0: no bound)",
    )
    max_prompt_tokens: int = option(0, "longest prompt that is taken; 0: what the model takes", minimum=0)
    max_prompt_tokens_by_model: str = option(
        "",
        "longest prompt that is taken of single models, in place of max_prompt_tokens, as NAME=TOKENS with semicolons "
        "between; 0: what the model takes",
    )
    reserve: str = option(
        "full",
        "KV set aside for an answer when it is admitted: full is for all of max_tokens (or as decode nodes are set), "
        "expected for as much as the tenant's answers took lately; what gets longer grows, and the youngest gives way "
        "where there is no room",
        choices=("full", "expected"),
    )
    reserve_quantile: float = option(
        0.9,
        "with --reserve expected, the part of a tenant's last answers that would have fitted",
        minimum=0.01,
        maximum=1,
    )
    default_max_tokens: int = option(256, "tokens generated when a request does not say", minimum=1)
    max_retries: int = option(3, "attempts beyond the first when nodes fail", minimum=0)
    placement: str = option(
        "cost",
        "where requests go: cost is to the nodes where they cost least time, by what nodes measure; load is to those "
        "with least to do, less what they have cached, and what nodes take is not predicted",
        choices=("cost", "load"),
    )
    local_tail_tokens: int = option(
        32,
        "prompt tokens not cached on the decode node up to which it computes them itself while it has not measured how "
        "fast it does; then what costs less is done; 0: it never computes prompts",
        minimum=0,
    )
    prefix_index_blocks: int = option(
        MAX_BLOCKS,
        "cached blocks that are known by node, of each model's prefill and decode nodes; a million take about 130 MB",
        minimum=1,
    )
    # A node that is gone is found in less than 5 s by its broken streams. This is for one that hangs, and longer than
    # an interpreter may be busy: meanwhile keepalive, answered below it, says that all is well.
    member_timeout_s: float = option(
        12.0, "silence of a node, its connection alive or not, after which it is taken for dead", unit="s", minimum=0.1
    )
    no_node_wait_s: float = option(
        5.0, "longest wait of an accepted request while no node of a role it needs is ready", unit="s", minimum=0.1
    )
    max_kept_bytes: int = option(
        64 * 2**20,
        "bytes of answers to requests with keep_s, kept to be read again; the oldest complete ones go first; 0: none",
        unit="bytes",
        minimum=0,
    )
    response_cache_bytes: int = option(
        0,
        "bytes of complete answers to requests with temperature 0, given again to the same tenant's same request; 0: "
        "each is computed",
        unit="bytes",
        minimum=0,
    )
    response_cache_ttl_s: float = option(
        300.0, "how long after it was computed such an answer is given", unit="s", minimum=0.1
    )
    cluster_secret_file: str = option(
        "",
        "file with a secret, the same for all coordinators, that enters the name of every cached block, so that nobody "
        "can compute one from its tokens; after a change nothing cached before is found; none: no secret",
        unit="file",
    )
    cluster_port: int = option(
        -1,
        "port that nodes join by, so that no client can; 0 takes any free one, -1 leaves them to port; needed where "
        "callers are known",
        minimum=-1,
        maximum=MAX_PORT,
    )
    tls_cert: str = option(
        "", "certificate of the clients' ports, gRPC and HTTP, with tls_key: TLS there; none: in the clear", unit="file"
    )
    tls_key: str = option("", "the key of tls_cert", unit="file")
    api_keys_file: str = option(
        "",
        "file of API keys as `kvrelay keys new` writes them, read anew when it changes; with it no call is answered "
        "without one (or a token), but health; none, and no jwks_file: everyone is the tenant default",
        unit="file",
    )
    jwks_file: str = option(
        "",
        "JSON Web Key Set, read anew when it changes: its issuer's tokens are taken as API keys are",
        unit="file",
    )
    jwt_issuer: str = option("", "what tokens must name as issuer; needed with jwks_file")
    jwt_audience: str = option("", "what tokens must name as audience; needed with jwks_file")
    jwt_tenant_claim: str = option("tenant", "claim of a token that names the tenant")
    request_timeout_s: float = option(600.0, "longest life of a request", unit="s", minimum=0.1)

    def model_paths(self) -> dict[str, Path]:
        """Of all models to serve, by name. Raises ConfigError."""
        paths: dict[str, Path] = {}
        if self.model is not None:
            add_model(paths, self.model_name or self.model.absolute().name.removesuffix(".gguf"), self.model)
        elif self.model_name:
            raise ConfigError(
                f"model_name is {self.model_name!r}, and there is no model that it would name: give --model"
            )
        for name, path in parse_models(self.models).items():
            add_model(paths, name, path)
        if not paths:
            raise ConfigError("--model is missing: a GGUF file or a Hugging Face directory; or several by --models")
        return paths

    def prompt_limits(self) -> PromptLimits:
        """What holds for every tenant. Raises ConfigError."""
        try:
            limits = PromptLimits(self.max_prompt_tokens, parse_tokens_by_model(self.max_prompt_tokens_by_model))
            limits.check_models(self.model_paths())
        except ConfigError as error:
            raise ConfigError(f"max_prompt_tokens_by_model: {error.message}") from error
        return limits

    def check(self) -> None:
        """Raises ConfigError where fields contradict each other."""
        self.model_paths()
        self._check_tokens()
        if (self.api_keys_file or self.jwks_file) and self.cluster_port < 0:
            raise ConfigError(
                "cluster_port is missing: with api_keys_file or jwks_file every call at port is checked, and nodes, "
                "which have no keys, join by a port of their own"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key belong together, and one of them is missing")
        if self.peer_ca and self.cluster_port < 0:
            raise ConfigError(
                "cluster_port is missing: with peer_ca nodes show certificates, which clients at port have none of"
            )
        policies = parse_policies(self.tenants)
        policies.check_within(self.max_queue, self.max_queue_wait_s)
        policies.check_models(self.model_paths())
        self.prompt_limits()

    def _check_tokens(self) -> None:
        for name, value in (
            ("jwt_issuer", self.jwt_issuer),
            ("jwt_audience", self.jwt_audience),
            ("jwt_tenant_claim", self.jwt_tenant_claim),
        ):
            if self.jwks_file and not value:
                raise ConfigError(f"{name} is missing: with jwks_file it says which tokens are meant for this cluster")
        if not self.jwks_file and (self.jwt_issuer or self.jwt_audience):
            raise ConfigError("jwt_issuer and jwt_audience say which tokens are taken, and no jwks_file checks any")
