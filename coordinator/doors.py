"""The coordinator's doors: one for clients, and one for nodes where the two are told apart.

What a node may do, a client must not: who joins as a node is sent prompts. They have different ports rather than one
port and a check of each call, so that whoever cannot open a connection to the nodes' port, by a firewall or for want of
a certificate, reaches no code of ours there, and a mistake in what guards one door opens no other.
"""

from __future__ import annotations

from coordinator.auth import Authenticator, bearer
from coordinator.identity import Scope, caller
from coordinator.text import MAX_CHARS
from kvrelay.errors import PermissionDeniedError, UnauthenticatedError
from kvrelay.rpc.call_limits import CallLimits
from kvrelay.rpc.health import SERVICE_NAME as HEALTH
from kvrelay.rpc.interceptor import Guard, Metadata

CREDENTIAL_KEY = "authorization"
_INFERENCE = ("/kvrelay.pb.Inference/", "/vllm.grpc.engine.VllmEngine/")
_REFLECTION = ("/grpc.reflection.v1alpha.ServerReflection/", "/grpc.reflection.v1.ServerReflection/")
_JOIN = "/kvrelay.pb.Cluster/Join"

# A text has at most MAX_CHARS characters, of at most 4 bytes each in UTF-8; beside it there is little.
_MAX_PROMPT_BYTES = 4 * MAX_CHARS + 2**20
_SMALL = CallLimits(max_bytes=64 * 2**10, max_s=30.0)
_ASKING = CallLimits(_MAX_PROMPT_BYTES)  # its time is bounded by request_timeout_s
_TOKENIZING = CallLimits(_MAX_PROMPT_BYTES, max_s=60.0)
_LIMITS = {
    "/kvrelay.pb.Inference/Generate": _ASKING,
    "/kvrelay.pb.Inference/Tokenize": _TOKENIZING,
    "/kvrelay.pb.Inference/Detokenize": _TOKENIZING,
    "/vllm.grpc.engine.VllmEngine/Generate": _ASKING,
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": CallLimits(_SMALL.max_bytes, max_s=60.0),  # it is made at first
    "/kvrelay.pb.Cluster/GetStatus": _SMALL,
    _JOIN: CallLimits(),
}
_OTHERS = CallLimits(_MAX_PROMPT_BYTES)  # health is watched for as long as a caller likes


def limits_of_clients(method: str) -> CallLimits:
    """Of a call at the clients' port."""
    return _LIMITS.get(method, _SMALL if method.startswith(_INFERENCE) else _OTHERS)


def guard_of_clients(authenticator: Authenticator, *, nodes_join_here: bool) -> Guard:
    """Lets everyone ask for health, and else who proves to be someone with the scope that the call needs: ADMIN for
    what is not known to need less."""

    def guard(method: str, metadata: Metadata) -> None:
        if method.startswith(f"/{HEALTH}/"):
            return
        if method == _JOIN:
            if not nodes_join_here:
                raise PermissionDeniedError("nodes join by another port of this coordinator: its --cluster-port")
            return
        identity = authenticator.identify(_credential(metadata))
        identity.check(Scope.INFER if method.startswith((*_INFERENCE, *_REFLECTION)) else Scope.ADMIN)
        caller.set(identity)

    return guard


def _credential(metadata: Metadata) -> str | None:
    headers = [value for key, value in metadata if key == CREDENTIAL_KEY]
    if len(headers) > 1:
        raise UnauthenticatedError("the call has more than one authorization header")
    return bearer(str(headers[0])) if headers else None
