"""Configuration: precedence of its sources, errors that name what is allowed, help and docs from one declaration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.byte_size import parse_size, show_size
from kvrelay.config import load, markdown_table, parser
from kvrelay.errors import ConfigError
from kvrelay.option import option
from kvrelay.role_config import NodeConfig, RoleConfig
from kvrelay.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(RoleConfig):
    path: Path = option(help="directory of the disk tier")
    memory_bytes: int = option(2**30, "size of the memory tier", unit="bytes", minimum=1)
    compress: bool = option(False, "compress slabs")
    upstream: str = option("", "store to fill from", unit="host:port")
    mirrors: tuple[str, ...] = option((), "stores to copy to", unit="host:port")
    mode: str = option("lru", "which block goes first", choices=("lru", "fifo"))


def load_store(*argv: str, **environ: str) -> StoreConfig:
    return load(StoreConfig, "kvstore", ["--path", "/blocks", *argv], environ)


def test_defaults_hold_when_nothing_is_given() -> None:
    config = load_store()

    assert config == StoreConfig(path=Path("/blocks"))
    assert (config.host, config.port, config.metrics_port, config.grace_s) == ("127.0.0.1", 0, -1, 30.0)
    assert (config.memory_bytes, config.compress, config.mode) == (1_073_741_824, False, "lru")


@pytest.mark.parametrize(
    ("sources", "port"),
    [
        ({"flag", "own", "shared", "role table", "common table"}, 1),
        ({"own", "shared", "role table", "common table"}, 2),
        ({"shared", "role table", "common table"}, 3),
        ({"role table", "common table"}, 4),
        ({"common table"}, 5),
        (set(), 0),
    ],
)
def test_flags_win_over_environment_over_file_over_default(tmp_path: Path, sources: set[str], port: int) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text(
        ("[kvstore]\nport = 4\n" if "role table" in sources else "")
        + ("[common]\nport = 5\n" if "common table" in sources else "")
    )
    environ = {"KVRELAY_KVSTORE_PORT": "2"} if "own" in sources else {}
    environ |= {"KVRELAY_PORT": "3"} if "shared" in sources else {}
    argv = ["--port", "1"] if "flag" in sources else []

    assert load_store(*argv, "--config", str(file), **environ).port == port


def test_the_file_may_be_named_by_the_environment_and_holds_typed_values(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text('[kvstore]\nmemory_bytes = "3MiB"\ncompress = true\ngrace_s = 5\nmode = "fifo"\n')

    config = load_store(KVRELAY_CONFIG=str(file))

    assert (config.memory_bytes, config.compress, config.grace_s, config.mode) == (3_145_728, True, 5.0, "fifo")


def test_common_keys_that_only_other_roles_have_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text('[common]\nmodel = "/m.gguf"\nhost = "0.0.0.0"\n[decode-node]\nthreads = 2\n')

    assert load_store("--config", str(file)).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("on", True), ("FALSE", False), ("0", False), ("no", False)]
)
def test_booleans_from_the_environment(text: str, value: bool) -> None:
    assert load_store(KVRELAY_COMPRESS=text).compress is value


def test_booleans_as_flags() -> None:
    assert load_store("--compress", KVRELAY_COMPRESS="0").compress is True
    assert load_store("--no-compress", KVRELAY_COMPRESS="1").compress is False


@pytest.mark.parametrize(
    ("text", "addresses"), [("", ()), ("a:1", ("a:1",)), ("a:1,[::1]:2, b.c:3", ("a:1", "[::1]:2", "b.c:3"))]
)
def test_several_addresses(text: str, addresses: tuple[str, ...]) -> None:
    assert load_store("--mirrors", text).mirrors == addresses
    assert load_store(KVRELAY_MIRRORS=text).mirrors == addresses


def test_several_addresses_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text('[kvstore]\nmirrors = ["a:1", "b:2"]\n')

    assert load_store("--config", str(file)).mirrors == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port", "70000"], {}, "--port is '70000'; allowed is a whole number from 0 to 65535"),
        (["--port", "7e3"], {}, "--port is '7e3'; allowed is a whole number from 0 to 65535"),
        ([], {"KVRELAY_PORT": "-1"}, "KVRELAY_PORT is '-1'; allowed is a whole number from 0 to 65535"),
        (["--grace-s", "nan"], {}, "--grace-s is 'nan'; allowed is a number, at least 0"),
        (["--grace-s", "inf"], {}, "--grace-s is 'inf'; allowed is a number, at least 0"),
        (["--mode", "LRU"], {}, "--mode is 'LRU'; allowed is one of lru, fifo"),
        (
            ["--memory-bytes", "12 XB"],
            {},
            "--memory-bytes is '12 XB'; allowed is a size such as 4096, 512MiB or 2GiB, at least 1",
        ),
        (
            ["--memory-bytes", "0"],
            {},
            "--memory-bytes is '0'; allowed is a size such as 4096, 512MiB or 2GiB, at least 1",
        ),
        ([], {"KVRELAY_COMPRESS": "maybe"}, "KVRELAY_COMPRESS is 'maybe'; allowed is true or false"),
        (["--upstream", "store"], {}, "--upstream is 'store'; allowed is host:port, such as 127.0.0.1:7400"),
        (["--upstream", "http://a:7400"], {}, "--upstream is 'http://a:7400'; allowed is host:port, such as "),
        *(
            (["--mirrors", text], {}, f"--mirrors is {text!r}; allowed is host:port, or several different ones with ")
            for text in ("store", "a:1,", ",", "a:1;b:2", "a:1,b", "a:1,a:1", "a:1, ,b:2", "a:1,http://b:2")
        ),
        ([], {"KVRELAY_KVSTORE_MEMRY_BYTES": "1"}, "KVRELAY_KVSTORE_MEMRY_BYTES is no setting of kvstore; "),
        ([], {"KVRELAY_KVSTORE_MEMRY_BYTES": "1"}, "did you mean memory_bytes?"),
        ([], {"KVRELAY_KVSTORE_XYZZY": "1"}, "allowed are advertise, compress, grace_s, host, "),
        (["--memory", "1"], {}, "unrecognized arguments: --memory 1; `kvrelay kvstore --help` lists"),
        (["--port"], {}, "argument --port: expected one argument"),
        (["stray"], {}, "unrecognized arguments: stray"),
    ],
)
def test_bad_values_and_unknown_names_say_what_is_allowed(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_store(*argv, **environ)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[kvstore]\nprot = 1\n", "[kvstore] has an unknown key prot; did you mean port?"),
        ("[common]\nprot = 1\n", "[common] has an unknown key prot; did you mean port?"),
        ("[kvstor]\nport = 1\n", "has an unknown table or key kvstor; did you mean kvstore?"),
        ("port = 1\n", "has an unknown table or key port; allowed are common, coordinator, "),
        ("common = 1\n", "common is no table; write [common] and its keys below"),
        ("[kvstore]\nport = true\n", "[kvstore] port is True; allowed is a whole number from 0 to 65535"),
        ("[kvstore]\nport = 1.5\n", "[kvstore] port is 1.5; allowed is a whole number from 0 to 65535"),
        ("[kvstore]\nport = [1]\n", "[kvstore] port is [1]; allowed is a whole number from 0 to 65535"),
        ("[kvstore]\nmirrors = [7]\n", "[kvstore] mirrors is [7]; allowed is host:port, or several different ones "),
        ("[kvstore]\nhost = 7\n", "[kvstore] host is 7; allowed is text"),
        ("[kvstore]\ncompress = 7\n", "[kvstore] compress is 7; allowed is true or false"),
        ("[kvstore\n", "is not TOML: "),
    ],
)
def test_errors_in_a_file_name_table_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_store("--config", str(file))
    assert message in caught.value.message
    assert str(file) in caught.value.message


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*none\.toml: No such file"):
        load_store("--config", str(tmp_path / "none.toml"))


def test_a_missing_required_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--model is missing: a GGUF file or a Hugging Face directory$"):
        load(NodeConfig, "decode-node", [], {})


def test_environment_of_other_roles_and_clients_is_left_alone() -> None:
    environ = {"KVRELAY_DECODE_NODE_THREADS": "x", "KVRELAY_ADDRESS": "y", "KVRELAY_CACHE": "/z", "PATH": "/bin"}

    assert load_store(**environ) == StoreConfig(path=Path("/blocks"))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *(("0", 0), ("4096", 4096), ("1KiB", 1024), ("512MiB", 536_870_912), ("1.5 gib", 1_610_612_736), ("2B", 2)),
        *(("1 MB", 1_000_000), ("80GB", 80_000_000_000)),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 M", "1 Mb/s", "1e9", "1 MiB extra"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0"), (1000, "1000"), (2**30, "1GiB"), (1536 * 2**20, "1536MiB"), (2**40, "1TiB")]
)
def test_sizes_are_shown_exactly(num_bytes: int, text: str) -> None:
    assert show_size(num_bytes) == text


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(StoreConfig, "kvstore", ["--help"], {})
    text = " ".join(capsys.readouterr().out.split())

    assert caught.value.code == 0
    assert "usage: kvrelay kvstore" in text
    assert "--memory-bytes SIZE size of the memory tier (default: 1GiB)" in text
    assert "--path PATH directory of the disk tier (required)" in text
    assert "--mode {lru,fifo} which block goes first: lru, fifo (default: lru)" in text
    assert "--grace-s X time running requests get to finish after SIGTERM, in seconds (default: 30.0)" in text


def test_flags_are_not_to_be_abbreviated() -> None:
    assert parser(StoreConfig, "kvstore").allow_abbrev is False


def test_the_documentation_table_has_a_row_for_each_field() -> None:
    rows = markdown_table(StoreConfig, "kvstore").splitlines()

    assert rows[0] == "| flag | environment | default | meaning |"
    assert len(rows) == 2 + 10 + 6
    assert "| `--path` | `KVRELAY_KVSTORE_PATH` | required | directory of the disk tier |" in rows
    assert "| `--memory-bytes` | `KVRELAY_KVSTORE_MEMORY_BYTES` | `1GiB` | size of the memory tier |" in rows
    assert "| `--upstream` | `KVRELAY_KVSTORE_UPSTREAM` | none | store to fill from |" in rows
    assert "| `--compress` | `KVRELAY_KVSTORE_COMPRESS` | `false` | compress slabs |" in rows
    assert "| `--host` | `KVRELAY_HOST` |" in markdown_table(StoreConfig)


@pytest.mark.parametrize("role", list(Role))
def test_help_says_in_a_line_what_the_role_does(role: Role) -> None:
    description = parser(RoleConfig, role.value).description
    assert description
    assert len(description) < 80


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("127.0.0.1:7401", ("127.0.0.1:7401",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("redis://cache:6379", ("redis://cache:6379",)),
        ("a:1,redis://cache:6379", ("a:1", "redis://cache:6379")),
        ("", ()),
    ],
)
def test_kvstores_are_addresses_or_redis_urls(text: str, addresses: tuple[str, ...]) -> None:
    argv = ["--model", "m.gguf", "--kvstore", text]
    assert load(NodeConfig, "prefill-node", argv, {}).kvstore == addresses


@pytest.mark.parametrize(
    "text", ["redis://", "redis://cache", "http://cache:80", "a:1,a:1", "redis://a:1/0", "rediss://a:1"]
)
def test_what_is_no_kvstore_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed is host:port or redis://host:port, or several"):
        load(NodeConfig, "prefill-node", ["--model", "m.gguf", "--kvstore", text], {})
