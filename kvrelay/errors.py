"""Every failure kvrelay tells a caller about, with its status on each door.

One tree, one table: an error class names its code, gRPC status, HTTP status and whether the same request may
succeed if sent again. Messages say what was wrong and what is allowed or to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum


class Status(Enum):
    """gRPC status codes by name, so that pure code can name one without importing grpc."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    DATA_LOSS = "DATA_LOSS"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class KVRelayError(Exception):
    """Root of the tree; a bare one is a fault of ours.

    `retry_after_s` is advice for retryable errors: seconds until another try makes sense; 0 gives none.
    """

    code = "internal"
    status = Status.INTERNAL
    http_status = 500
    retryable = False

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequestError(KVRelayError):
    """A field is out of its range."""

    code = "invalid_request"
    status = Status.INVALID_ARGUMENT
    http_status = 400


class PromptTooLongError(InvalidRequestError):
    """Prompt and answer together exceed the model's length."""

    code = "context_length_exceeded"


class NeverFitsError(InvalidRequestError):
    """The request needs more KV blocks than any node of the cluster has."""

    code = "exceeds_kv_capacity"


class StructureError(InvalidRequestError):
    """What the answer is held to lets no token follow, or became too complex on the way."""

    code = "structured_output_failed"


class UnauthenticatedError(KVRelayError):
    """The caller proves to be nobody: no credential, or one that does not hold."""

    code = "unauthenticated"
    status = Status.UNAUTHENTICATED
    http_status = 401


class PermissionDeniedError(KVRelayError):
    """The caller is known, and may not do this."""

    code = "permission_denied"
    status = Status.PERMISSION_DENIED
    http_status = 403


class UnknownModelError(KVRelayError):
    """No node serves a model of this name."""

    code = "model_not_found"
    status = Status.NOT_FOUND
    http_status = 404


class NotFoundError(KVRelayError):
    """A request, reservation or lease that does not exist, or no longer does."""

    code = "not_found"
    status = Status.NOT_FOUND
    http_status = 404


class UnimplementedError(KVRelayError):
    """A call that another server's protocol has and this one does not serve."""

    code = "unimplemented"
    status = Status.UNIMPLEMENTED
    http_status = 501


class DuplicateRequestError(KVRelayError):
    """A request of this id is running."""

    code = "duplicate_request_id"
    status = Status.ALREADY_EXISTS
    http_status = 409


class OverloadedError(KVRelayError):
    """No room now: a queue is full, waiting took too long, or blocks are not to be had."""

    code = "overloaded"
    status = Status.RESOURCE_EXHAUSTED
    http_status = 429
    retryable = True


class BudgetSpentError(OverloadedError):
    """The tenant has used up what it may in a day."""

    code = "budget_spent"


class TargetOutOfReachError(OverloadedError):
    """No node, with nothing beside the request, would keep the target it names: the same one need not be sent again."""

    code = "target_out_of_reach"
    retryable = False


class UnavailableError(KVRelayError):
    """A peer is gone, not ready or draining."""

    code = "unavailable"
    status = Status.UNAVAILABLE
    http_status = 503
    retryable = True


class HandoffFailedError(UnavailableError):
    """KV did not get from a prefill node to a decode node: told by the first, and no sign that it is broken itself."""

    code = "handoff_failed"


class DeadlineError(KVRelayError):
    """A wait ran into its deadline."""

    code = "deadline_exceeded"
    status = Status.DEADLINE_EXCEEDED
    http_status = 504
    retryable = True


class CancelledError(KVRelayError):
    """The client, or Cancel on its behalf, ended the request."""

    code = "cancelled"
    status = Status.CANCELLED
    http_status = 499


class StaleError(KVRelayError):
    """Meant for another process instance, an ended reservation or an older attempt."""

    code = "stale"
    status = Status.FAILED_PRECONDITION
    http_status = 409
    retryable = True


class AlreadyCommittedError(StaleError):
    """The reservation has its KV: an earlier handoff got through, even if its sender never heard of it."""

    code = "already_committed"


class AnswerDiffersError(KVRelayError):
    """Sent again, a request got other tokens than those that its caller has already."""

    code = "answer_differs"
    status = Status.ABORTED
    http_status = 409


class ForeignBlockError(KVRelayError):
    """KV of another model or layout."""

    code = "foreign_block"
    status = Status.FAILED_PRECONDITION
    http_status = 409


class CorruptBlockError(KVRelayError):
    """A block or frame that fails its length, hash or checksum."""

    code = "corrupt_block"
    status = Status.DATA_LOSS
    http_status = 502
    retryable = True


class BadLogitsError(KVRelayError):
    """The model gave NaN or infinity for a sequence; its KV is in doubt, and no other sequence's."""

    code = "bad_logits"


class ModelFileError(KVRelayError):
    """A model file that is missing, truncated, or of an architecture or shape that is not served."""

    code = "bad_model_file"
    status = Status.FAILED_PRECONDITION
    http_status = 500


class ConfigError(KVRelayError):
    """A flag, environment variable or file key that is unknown or out of range."""

    code = "bad_config"
    status = Status.FAILED_PRECONDITION
    http_status = 500


def error_of(code: str, message: str, *, retryable: bool, retry_after_s: float = 0.0) -> KVRelayError:
    """The error that had this code. One that is not known here gives a KVRelayError that carries it."""
    error = ERRORS_BY_CODE.get(code, KVRelayError)(message, retry_after_s=retry_after_s)
    if error.code != code:
        error.code, error.retryable = code, retryable
    return error


def _tree(root: type[KVRelayError]) -> Iterator[type[KVRelayError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


ERRORS_BY_CODE = {cls.code: cls for cls in _tree(KVRelayError)}
