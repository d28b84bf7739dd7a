from kvstore.quotas import Quotas
from kvstore.tenants import Tenants


def tenants_of(capacity_bytes: int, held: dict[str, int], **quotas: int) -> Tenants:
    tenants = Tenants(capacity_bytes, Quotas(by_tenant=quotas))
    for name, num_bytes in held.items():
        tenants.add(num_bytes, name).queue.enter(name.encode(), reused=False)
        tenants.settle(name)
        tenants.check()
    return tenants


def gives_way(tenants: Tenants, num_bytes: int, tenant: str) -> bytes | None:
    queue = tenants.gives_way(num_bytes, tenant)
    return None if queue is None else queue.pop()


def test_whoever_holds_most_gives_way() -> None:
    assert gives_way(tenants_of(100, {"a": 10, "b": 60, "c": 30}), 10, "c") == b"b"


def test_at_equal_holdings_whoever_wants_more_gives_way() -> None:
    assert gives_way(tenants_of(90, {"a": 30, "b": 30, "c": 30}), 1, "b") == b"b"


def test_a_quota_is_paid_for_by_its_owner() -> None:
    tenants = tenants_of(100, {"a": 10, "b": 60}, a=12)
    assert gives_way(tenants, 2, "a") == b"b"
    assert gives_way(tenants, 3, "a") == b"a"
    assert tenants.fits(2, "a")
    assert not tenants.fits(3, "a")
    assert not tenants.could_fit(13, "a")


def test_who_has_nothing_that_may_go_is_passed_over() -> None:
    tenants = tenants_of(100, {"a": 10, "b": 60})
    tenants["b"].queue.pop()
    tenants.settle("b")
    tenants.check()
    assert gives_way(tenants, 1, "b") == b"a"
    tenants.settle("a")
    assert gives_way(tenants, 1, "c") is None


def test_nobody_gives_way_where_nobody_is() -> None:
    assert gives_way(tenants_of(100, {}), 1, "a") is None
    assert gives_way(tenants_of(100, {}, a=5), 6, "a") is None
