"""What a request carries from one attempt to the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.answer import Answer
from coordinator.request import AcceptedRequest, RequestState, capped, may_succeed_elsewhere
from coordinator.tenants import CacheScope
from kvrelay import errors
from kvrelay.cluster import ModelInfo
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.kv.layout import KVLayout
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import CachedTokens, RequestId

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=2)
MODEL = ModelInfo("m", "aa", "llama", 100, 300, (2,), LAYOUT, "float32", "plain")
SCOPE = CacheScope(b"salt", "acme", 60.0)
SAMPLING = SamplingParams(max_tokens=4, seed=9, stop=("x",))


class NoText:
    def token_bytes(self, token_id: int) -> bytes:
        return b""


def state() -> RequestState:
    accepted = AcceptedRequest(RequestId("r"), RequestId("r#1"), (5, 6, 7), SAMPLING, MODEL, SCOPE)
    return RequestState(accepted, Answer(NoText(), SAMPLING, (2,)), 10.0)


def test_resumed_request_asks_for_the_rest() -> None:
    request = state()
    request.begin_attempt()
    request.answer.add([GeneratedToken(8)])
    assert request.has_begun
    request.begin_attempt()
    assert not request.has_begun
    node_request = request.node_request()
    assert node_request.token_ids == (5, 6, 7, 8)
    assert (node_request.num_prompt_tokens, node_request.request_id, node_request.tenant_salt) == (3, "r#1", b"salt")
    assert (node_request.tenant, node_request.cache_ttl_s) == ("acme", 60.0)
    assert (node_request.sampling.seed, node_request.sampling.max_tokens, node_request.sampling.stop) == (9, 4, ())
    assert request.num_positions == 7  # prompt and whole answer, as in the first attempt
    root = chain_root("aa", LAYOUT.fingerprint, b"salt")
    assert request.hashes() == block_hashes(root, [5, 6, 7, 8], 2)


@pytest.mark.parametrize(
    ("expected_tokens", "num_answered", "now"),
    [
        (0, 0, 0),
        (40, 0, 3 + 40),
        (40, 10, 3 + 40),
        (40, 30, 3 + 30 + 16),
        (2, 0, 3 + 16),
        (2, 55, 3 + 60),
        (400, 0, 63),
    ],
)
def test_what_is_set_aside_is_as_expected_and_at_least_some_more_than_there_is(
    expected_tokens: int, num_answered: int, now: int
) -> None:
    sampling = replace(SAMPLING, max_tokens=60)
    accepted = replace(state().accepted, sampling=sampling, expected_tokens=expected_tokens)
    request = RequestState(accepted, Answer(NoText(), sampling, ()), 10.0)
    request.answer.add([GeneratedToken(8)] * num_answered)
    assert request.num_positions_now == now
    assert request.num_positions == 63


def test_cached_tokens_are_those_of_the_attempt_that_began_the_answer() -> None:
    request = state()
    request.begin_attempt()
    request.note_cached(CachedTokens(device=2))
    request.begin_attempt()
    request.note_cached(CachedTokens(memory=1))
    assert request.account.cached == CachedTokens(memory=1)
    request.answer.add([GeneratedToken(8)])
    request.begin_attempt()
    request.note_cached(CachedTokens(device=4))
    assert request.account.cached == CachedTokens(memory=1)


def test_cached_tokens_never_exceed_the_prompt() -> None:
    assert capped(CachedTokens(4, 4, 4), 20) == CachedTokens(4, 4, 4)
    assert capped(CachedTokens(4, 4, 4), 7) == CachedTokens(4, 3, 0)
    assert capped(CachedTokens(9, 1, 1), 7) == CachedTokens(7, 0, 0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.UnavailableError, True),
        (errors.StaleError, True),
        (errors.CorruptBlockError, True),
        (errors.CancelledError, True),  # a node that shuts down
        (errors.NotFoundError, True),  # a lease that lapsed
        (errors.InvalidRequestError, False),
        (errors.ForeignBlockError, False),
        (errors.NeverFitsError, False),
        (errors.KVRelayError, False),
    ],
)
def test_what_another_node_may_do_better(error: type[errors.KVRelayError], expected: bool) -> None:
    assert may_succeed_elsewhere(error("why")) is expected
