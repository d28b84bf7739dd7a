"""Messages of kvstore.proto survive the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequestError
from kvrelay.kv.store_messages import (
    BlockReport,
    BlockSelection,
    PutBegin,
    StoreNamespace,
    StoreReport,
    TenantReport,
    TierReport,
    WorkReport,
)
from kvrelay.pb import kvstore_pb2
from kvrelay.rpc import convert_kvstore
from kvrelay.types import BlockHash, Tier
from tests.support.messages import numbers, tenants, texts, ttls, u32, u64

hashes = st.binary(min_size=32, max_size=32).map(BlockHash)
namespaces = st.builds(StoreNamespace, texts, texts)
tier_reports = st.builds(TierReport, u64, u64, u64, u64, u64)
tenant_reports = st.builds(TenantReport, tenants, u64, u64, u64, u64)
store_reports = st.builds(
    StoreReport,
    *(tier_reports, tier_reports, u64, u64, u64, u64, u64, u64),
    st.lists(tenant_reports, max_size=3).map(tuple),
    u64,
    st.booleans(),
)
block_reports = st.builds(
    BlockReport,
    *(hashes, hashes, u32, texts, tenants, st.sampled_from([Tier.MEMORY, Tier.DISK]), u64, numbers),
    st.none() | numbers,
    numbers,
)


@st.composite
def put_begins(draw: st.DrawFn) -> PutBegin:
    parents = draw(st.lists(hashes, max_size=4).map(tuple))
    indexes = tuple(draw(st.lists(u32, min_size=len(parents), max_size=len(parents))))
    return PutBegin(draw(namespaces), draw(tenants), draw(ttls), parents, indexes)


@given(put_begins())
def test_the_beginning_of_a_put(begin: PutBegin) -> None:
    assert convert_kvstore.put_begin_from_bytes(convert_kvstore.put_begin_to_bytes(begin)) == begin


@given(store_reports)
def test_stats(report: StoreReport) -> None:
    wire = convert_kvstore.store_report_to_pb(report).SerializeToString()
    assert convert_kvstore.store_report_from_pb(kvstore_pb2.StatsReply.FromString(wire)) == report


@given(st.lists(block_reports, max_size=3))
def test_a_page_of_a_list(blocks: list[BlockReport]) -> None:
    wire = convert_kvstore.list_reply_to_pb(blocks).SerializeToString()
    assert convert_kvstore.list_reply_from_pb(kvstore_pb2.ListReply.FromString(wire)) == blocks


@given(u64, u64, u64)
def test_how_far_work_is(num_done: int, num_total: int, num: int) -> None:
    verify = WorkReport(num_done, num_total, num_corrupt=num)
    compact = WorkReport(num_done, num_total, num_freed_bytes=num)
    assert convert_kvstore.work_report_from_pb(convert_kvstore.verify_reply_to_pb(verify)) == verify
    assert convert_kvstore.work_report_from_pb(convert_kvstore.compact_reply_to_pb(compact)) == compact


@pytest.mark.parametrize(
    "selection",
    [
        BlockSelection(tenant="acme"),
        BlockSelection(unused_s=0.0),
        BlockSelection("acme", "ab" * 32, bytes(range(32)), 3_600.0),
    ],
)
def test_what_a_delete_means(selection: BlockSelection) -> None:
    wire = convert_kvstore.delete_request_to_pb(selection).SerializeToString()
    assert convert_kvstore.delete_request_from_pb(kvstore_pb2.DeleteRequest.FromString(wire)) == selection


def test_a_delete_of_everything_has_to_be_meant() -> None:
    with pytest.raises(InvalidRequestError, match="a delete needs to say which blocks"):
        convert_kvstore.delete_request_from_pb(kvstore_pb2.DeleteRequest())


def test_a_put_of_a_client_that_knows_no_tenants_is_the_default_ones() -> None:
    wire = kvstore_pb2.PutBegin(namespace=kvstore_pb2.StoreNamespace(model_fingerprint="m", layout_fingerprint="l"))
    assert convert_kvstore.put_begin_from_bytes(wire.SerializeToString()) == PutBegin(StoreNamespace("m", "l"))
