"""Tenants' shares and bounds as they are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.tenant_policy import TenantPolicy, parse_policies
from kvrelay.config import load
from kvrelay.errors import ConfigError


def test_each_tenant_has_its_own_terms_and_everyone_else_the_stars() -> None:
    policies = parse_policies(
        "search:weight=3, max_queued=64 ;\n batch: priority=-50,max_wait_s=7.5;*:max_queued_tokens=2000;plain:"
    )
    assert policies.of("search") == TenantPolicy(weight=3.0, max_queued=64)
    assert policies.of("batch") == TenantPolicy(priority=-50, max_wait_s=7.5)
    assert policies.of("default") == policies.of("anyone") == TenantPolicy(max_queued_tokens=2000)
    assert policies.of("plain") == TenantPolicy()
    assert policies.weight("search") == 3.0
    assert parse_policies("a:ttft_s=1.5,itl_s=0.05,max_prompt_tokens=900,daily_tokens=1000000").of("a") == TenantPolicy(
        ttft_s=1.5, itl_s=0.05, max_prompt_tokens=900, daily_tokens=1_000_000
    )


def test_nothing_is_said_of_anyone() -> None:
    assert parse_policies("").of("default") == TenantPolicy(
        weight=1.0,
        max_queued=0,
        max_queued_tokens=0,
        max_wait_s=0.0,
        priority=0,
        ttft_s=0.0,
        itl_s=0.0,
        max_prompt_tokens=0,
        daily_tokens=0,
        prompt_tokens_by_model={},
    )


def test_a_name_may_have_colons() -> None:
    assert parse_policies("spiffe://a:b:weight=2").weight("spiffe://a:b") == 2.0
    policy = parse_policies("a:b: max_prompt_tokens@llama3:8b=900, weight=2").of("a:b")
    assert policy == TenantPolicy(weight=2.0, prompt_tokens_by_model={"llama3:8b": 900})


def test_prompts_are_bounded_by_model() -> None:
    text = "a:max_prompt_tokens=900,max_prompt_tokens@small=100,max_prompt_tokens@large=0"
    limits = parse_policies(text).of("a").prompt_limits
    assert [limits.of(model) for model in ("small", "large", "other")] == [100, 0, 900]
    assert parse_policies(text).of("b").prompt_limits.of("small") == 0


def test_terms_for_a_model_that_is_not_served_are_refused() -> None:
    config = CoordinatorConfig(model=Path("small"), models="large=x", tenants="a:max_prompt_tokens@large=5")
    config.check()
    for given, message in (
        (
            {"tenants": "*:max_prompt_tokens@smal=5"},
            "tenants has '*': max_prompt_tokens: 'smal' is no model that is served; 'small', 'large' are",
        ),
        (
            {"max_prompt_tokens_by_model": "large=5;smal=6"},
            "max_prompt_tokens_by_model: 'smal' is no model that is served; 'small', 'large' are",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            replace(config, **given).check()  # type: ignore[arg-type]
        assert caught.value.message == message


def test_parts_go_by_weight_and_what_is_left_is_nobodys() -> None:
    assert parse_policies("").parts(256) == {}
    assert parse_policies("a:weight=2;b:").parts(100) == {"a": 50, "b": 25}
    assert parse_policies("a:;*:weight=0.5").parts(100) == {"a": 66}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("search", "tenants has 'search': a name, a colon and terms are needed, such as search:weight=3"),
        ("a:weight=0", "tenants has 'a:weight=0': weight is 0; allowed is 0.01 to 100"),
        ("a:weight=nan", "weight is nan; allowed is 0.01 to 100"),
        ("a:weight=x", "weight is 'x'; allowed is a number"),
        ("a:max_queued=1.5", "max_queued is '1.5'; allowed is a whole number"),
        ("a:max_queued=-1", "max_queued is -1; allowed is at least 0, where 0 sets no bound"),
        ("a:max_wait_s=inf", "max_wait_s is inf; allowed is at least 0"),
        ("a:ttft_s=inf", "ttft_s is inf; allowed is at least 0, where 0 sets no target"),
        ("a:itl_s=-1", "itl_s is -1; allowed is at least 0, where 0 sets no target"),
        ("a:daily_tokens=-1", "daily_tokens is -1; allowed is at least 0, where 0 sets no bound"),
        ("a:max_prompt_tokens=x", "max_prompt_tokens is 'x'; allowed is a whole number"),
        ("a:max_prompt_tokens@m=x", "max_prompt_tokens@m is 'x'; allowed is a whole number"),
        ("a:max_prompt_tokens@m=-1", "max_prompt_tokens@m is -1; allowed is at least 0, where 0 sets no bound"),
        ("a:max_prompt_tokens@m=1,max_prompt_tokens@m=2", "max_prompt_tokens@m is given twice"),
        ("a:weight@m=1", "'weight@m' is no term of a tenant; allowed are weight, max_queued,"),
        ("a:priority=101", "priority is 101; allowed is [-100, 100]"),
        (
            "a:wieght=1",
            "'wieght' is no term of a tenant; allowed are weight, max_queued, max_queued_tokens,",
        ),
        ("a:;a:weight=2", "tenants has 'a' twice"),
        ("a:weight=1,weight=2", "tenants has 'a:weight=1,weight=2': weight is given twice"),
        (":weight=2", "tenant is ''; allowed are 1 to 64 printable characters"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_policies(text)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:max_queued=9", "tenants has 'a': max_queued is 9, over the 8 of max_queue for all"),
        ("*:max_queued=9", "tenants has '*': max_queued is 9, over the 8 of max_queue for all"),
        ("a:;b:max_wait_s=2.5", "tenants has 'b': max_wait_s is 2.5, over the 2 of max_queue_wait_s for all"),
    ],
)
def test_a_bound_that_could_never_hold_is_refused(text: str, message: str) -> None:
    config = CoordinatorConfig(model=Path("m"), max_queue=8, max_queue_wait_s=2.0, tenants=text)
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert message in caught.value.message
    replace(config, tenants="a:max_queued=8,max_wait_s=2").check()


def test_the_configuration_takes_them_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text('[coordinator]\ntenants = """\nsearch:weight=3\nbatch:priority=-50\n"""\n')
    for argv, environ in (
        (["--tenants", "search:weight=3;batch:priority=-50"], {}),
        ([], {"KVRELAY_COORDINATOR_TENANTS": "search:weight=3;batch:priority=-50"}),
        (["--config", str(file)], {}),
    ):
        config = load(CoordinatorConfig, "coordinator", ["--model", "m", *argv], environ)
        config.check()
        policies = parse_policies(config.tenants)
        assert (policies.weight("search"), policies.of("batch").priority) == (3.0, -50)
    with pytest.raises(ConfigError, match="tenants has"):
        load(CoordinatorConfig, "coordinator", ["--model", "m", "--tenants", "x"], {}).check()
