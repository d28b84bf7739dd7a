import pytest

from kvrelay.errors import ConfigError
from kvstore.quotas import NO_BOUND, Quotas


def test_quotas_are_read_as_sizes_and_the_rest_has_the_default() -> None:
    quotas = Quotas.parse(1024, ["alice=2GiB", "a=b=1MiB", "carol=0"])
    assert quotas.of("alice") == 2 << 30
    assert quotas.of("a=b") == 1 << 20
    assert quotas.of("carol") == NO_BOUND
    assert quotas.of("bob") == 1024
    assert str(quotas) == "alice=2GiB, a=b=1MiB, carol=0, others 1KiB"


def test_without_any_quota_nobody_is_bounded() -> None:
    assert Quotas().of("anyone") == NO_BOUND
    assert str(Quotas()) == "others unbounded"


@pytest.mark.parametrize(
    ("default_bytes", "texts", "message"),
    [
        (0, ["alice"], "is not NAME=BYTES, such as alice=2GiB"),
        (0, ["=2GiB"], "is not NAME=BYTES"),
        (0, ["x" * 65 + "=1"], "is not NAME=BYTES"),
        (0, ["alice=much"], "'much' is not a size"),
        (0, ["alice=-1"], "'-1' is not a size"),
        (0, ["alice=1", "alice=2"], "tenant 'alice' has two quotas"),
        (-1, [], "a quota of -1 bytes is below 0"),
    ],
)
def test_what_is_no_quota_is_refused(default_bytes: int, texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Quotas.parse(default_bytes, texts)
