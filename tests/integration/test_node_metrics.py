"""What both kinds of node show to whoever scrapes them, once they serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from decode_node.app import DecodeApp
from decode_node.config import DecodeConfig
from kvrelay.types import InstanceId
from prefill_node.app import PrefillApp
from prefill_node.config import PrefillConfig
from tests.support.hosting import hosted
from tests.support.tiny_model import make_tiny_model

NO_STORE = "127.0.0.1:1"


@pytest.mark.parametrize(("make_config", "make_app"), [(PrefillConfig, PrefillApp), (DecodeConfig, DecodeApp)])
async def test_a_node_shows_its_pool_and_its_use_of_the_kvstore(
    tmp_path: Path, make_config: type[PrefillConfig | DecodeConfig], make_app: type[PrefillApp | DecodeApp]
) -> None:
    model = make_tiny_model(tmp_path / "tiny", seed=3)
    config = make_config(model=model, dtype="float32", threads=1, num_blocks=8, kvstore=(NO_STORE,))
    registry = CollectorRegistry()

    async with hosted(make_app(config, InstanceId("node"), registry)):  # type: ignore[arg-type]
        assert registry.get_sample_value("kvrelay_kv_blocks", {"state": "free"}) == 8
        assert registry.get_sample_value("kvrelay_kv_evictions_total") == 0
        assert registry.get_sample_value("kvrelay_requests_running") == 0
        for name in ("failures", "corrupt", "offloaded", "dropped"):
            assert registry.get_sample_value(f"kvrelay_store_{name}_total") == 0
