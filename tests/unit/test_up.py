"""`kvrelay up`: the right processes, started, watched and ended in order."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from coordinator.api_keys import new_key, parse_keys
from coordinator.identity import Scope
from kvrelay import up
from kvrelay.errors import ConfigError, UnauthenticatedError
from kvrelay.local_cluster import Limits, LocalCluster, Outcome
from kvrelay.locks import lock
from kvrelay.planned_roles import PlannedRole, check_ports, plan
from kvrelay.role_process import RoleProcess
from kvrelay.types import Role

FAKE_ROLE = Path(__file__).parent.parent / "support" / "launched_role.py"
DEADLINE_S = 20.0
PATIENT = Limits(start_s=DEADLINE_S)


def options(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return parser.parse_args(flags)


def value(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


# What is planned.


def test_the_default_cluster_is_one_of_each_role() -> None:
    roles = plan(options(), {"": Path("/m.gguf")}, Path("/data"))
    assert [(role.name, role.address, role.metrics_port) for role in roles] == [
        ("coordinator", "127.0.0.1:7400", 7500),
        ("kvstore", "127.0.0.1:7401", 7501),
        ("prefill-node", "127.0.0.1:7410", 7510),
        ("decode-node", "127.0.0.1:7420", 7520),
    ]
    assert value(roles[0].flags, "--model") == "/m.gguf"
    assert value(roles[1].flags, "--path") == "/data/kvstore"
    for node in roles[2:]:
        assert value(node.flags, "--coordinator") == "127.0.0.1:7400"
        assert value(node.flags, "--kvstore") == "127.0.0.1:7401"
        assert value(node.flags, "--dtype") == "bfloat16"


def test_a_new_start_makes_a_new_key_and_leaves_those_that_were_added(tmp_path: Path) -> None:
    first = lock(tmp_path, "127.0.0.1")
    added, line = new_key("acme", "one", frozenset({Scope.INFER}))
    with (tmp_path / "keys.toml").open("a") as file:
        file.write(line + "\n")
    second = lock(tmp_path, "127.0.0.1")
    keys = parse_keys((tmp_path / "keys.toml").read_bytes())
    assert (keys.identify(second.api_key, 0.0).name, keys.identify(added, 0.0).name) == ("up", "one")
    with pytest.raises(UnauthenticatedError):
        keys.identify(first.api_key, 0.0)


def test_a_secure_cluster_has_certificates_a_key_and_a_port_for_nodes(tmp_path: Path) -> None:
    locks = lock(tmp_path, "127.0.0.1")
    roles = plan(options("--secure", "--coordinators", "2"), {"": Path("/m.gguf")}, Path("/data"), locks)
    assert [role.cluster_port for role in roles] == [7600, 7602, None, None, None]
    for coordinator in roles[:2]:
        assert value(coordinator.flags, "--cluster-port") == str(coordinator.cluster_port)
        assert value(coordinator.flags, "--tls-cert") == f"{tmp_path}/door.pem"
    for role in roles:
        assert value(role.flags, "--peer-cert") == f"{tmp_path}/{role.role.value}.pem"
    for joining in roles[2:]:
        assert value(joining.flags, "--coordinator") == "127.0.0.1:7600,127.0.0.1:7602"
    up.check_settings([role for role in roles if role.role is Role.COORDINATOR])
    keys = parse_keys(Path(value(roles[0].flags, "--api-keys-file")).read_bytes())
    assert keys.identify(locks.api_key, 0.0).scopes == frozenset(Scope)


def test_other_shapes_get_ports_and_names_in_order() -> None:
    roles = plan(
        options("--prefill", "2", "--decode", "2", "--no-kvstore", "--port-base", "9000"), {"": Path("/m")}, Path("/d")
    )
    assert [(role.name, role.port) for role in roles] == [
        ("coordinator", 9000),
        ("prefill-node-1", 9010),
        ("prefill-node-2", 9011),
        ("decode-node-1", 9020),
        ("decode-node-2", 9021),
    ]
    assert not any("--kvstore" in role.flags for role in roles)


def test_every_node_and_the_store_join_every_coordinator() -> None:
    roles = plan(options("--coordinators", "3"), {"": Path("/m")}, Path("/d"))
    assert [(role.name, role.port) for role in roles] == [
        ("coordinator-1", 7400),
        ("coordinator-2", 7402),
        ("coordinator-3", 7403),
        ("kvstore", 7401),
        ("prefill-node", 7410),
        ("decode-node", 7420),
    ]
    for role in roles[3:]:
        assert value(role.flags, "--coordinator") == "127.0.0.1:7400,127.0.0.1:7402,127.0.0.1:7403"
    up.check_settings([role for role in roles if role.role is Role.KVSTORE])


def test_several_kvstores_have_directories_of_their_own_and_every_node_knows_them_all() -> None:
    roles = plan(options("--kvstores", "3", "--decode", "2"), {"": Path("/m")}, Path("/d"))
    stores = [role for role in roles if role.role is Role.KVSTORE]
    assert [(role.name, role.port, value(role.flags, "--path")) for role in stores] == [
        ("kvstore-1", 7401, "/d/kvstore"),
        ("kvstore-2", 7422, "/d/kvstore-2"),
        ("kvstore-3", 7423, "/d/kvstore-3"),
    ]
    nodes = [role for role in roles if role.role in (Role.PREFILL_NODE, Role.DECODE_NODE)]
    assert {value(node.flags, "--kvstore") for node in nodes} == {"127.0.0.1:7401,127.0.0.1:7422,127.0.0.1:7423"}
    assert not any("--kvstore" in role.flags for role in plan(options("--no-kvstore"), {"": Path("/m")}, Path("/d")))


def several_models(*flags: str) -> list[PlannedRole]:
    return plan(options(*flags), {"small": Path("/s"), "large": Path("/l")}, Path("/d"))


def test_each_of_several_models_has_its_own_nodes() -> None:
    roles = several_models("--decode", "2", "--kvstores", "2")
    assert [(role.name, role.port, role.model) for role in roles] == [
        ("coordinator", 7400, ""),
        ("kvstore-1", 7401, ""),
        ("kvstore-2", 7424, ""),
        ("prefill-node-1", 7410, "small"),
        ("prefill-node-2", 7411, "large"),
        ("decode-node-1", 7420, "small"),
        ("decode-node-2", 7421, "small"),
        ("decode-node-3", 7422, "large"),
        ("decode-node-4", 7423, "large"),
    ]
    assert value(roles[0].flags, "--models") == "small=/s;large=/l"
    for node in roles[3:]:
        expected = ("/s", "small") if node.model == "small" else ("/l", "large")
        assert (value(node.flags, "--model"), value(node.flags, "--model-name")) == expected
    up.check_settings(roles)


def test_the_cores_are_shared_by_the_nodes_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert {value(role.flags, "--threads") for role in several_models() if role.model} == {"2"}


def test_the_calls_to_try_name_one_of_several_models() -> None:
    banner = up._how_to_use(several_models(), Path("/d"))
    assert banner.count(" --model small ") == 2
    assert '/v1/chat/completions -d \'{"model": "small", "temperature": 0, "messages": [' in banner
    assert "decode-node-2   127.0.0.1:7421        metrics http://127.0.0.1:7521/metrics  large\n" in banner


def test_several_models_are_named_once_or_more() -> None:
    expected = {"small": Path("/s"), "large": Path("/l")}
    assert up.models_of(options("--models", "small=/s;large=/l")) == expected
    assert up.models_of(options("--models", "small=/s", "--models", "large=/l")) == expected
    assert up.models_of(options()) == {"": None}
    assert up.models_of(options("--model", "/m", "--model-name", "name")) == {"name": Path("/m")}


@pytest.mark.parametrize(("flags", "told"), [([], False), (["--coordinators", "2"], True)])
def test_several_coordinators_are_told_to_know_only_their_own_requests(flags: list[str], told: bool) -> None:
    banner = up._how_to_use(plan(options(*flags), {"": Path("/m")}, Path("/d")), Path("/d"))
    assert ("A request's id belongs to the coordinator it was sent to" in banner) is told


@pytest.mark.parametrize(
    ("cores", "flags", "threads"),
    [
        (8, [], "4"),
        (8, ["--prefill", "3"], "2"),
        (2, ["--prefill", "2", "--decode", "2"], "1"),
        (8, ["--threads", "7"], "7"),
    ],
)
def test_nodes_share_the_cores(cores: int, flags: list[str], threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    roles = plan(options(*flags), {"": Path("/m")}, Path("/d"))
    assert {value(role.flags, "--threads") for role in roles if "node" in role.name} == {threads}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--coordinators", "10"], r"--coordinators is 10; allowed is \[1, 9\]"),
        (["--prefill", "0"], r"--prefill is 0; allowed is \[1, 10\]"),
        (["--decode", "81"], r"--decode is 81; allowed is \[1, 80\]"),
        (["--kvstores", "80", "--decode", "2"], r"--kvstores is 80; allowed is \[1, 79\]"),
        (["--kvstores", "2", "--no-kvstore"], "--kvstores asks for KV stores and --no-kvstore for none"),
        (["--models", "a=/a;b=/b", "--prefill", "6"], r"--prefill is 6; allowed is \[1, 5\]"),
        (["--models", "a=/a;b=/b", "--model", "/m"], "--model is '/m' beside --models; name every model by --models"),
        (["--models", "a=/a", "--model-name", "m"], "--model-name is 'm' beside --models"),
        (["--models", ";"], "--models names no model; write NAME=PATH"),
        (["--models", "a=/a", "--models", "a=/b"], "two models are named 'a'"),
        (["--port-base", "65500"], r"--port-base is 65500; allowed is \[1, 64926\]"),
    ],
)
def test_impossible_shapes_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        up.run(options(*flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--threads", "-1"], "--threads is '-1'; allowed is a whole number, at least 0"),
        (["--grace-s", "-1"], "--grace-s is '-1'; allowed is a number, at least 0"),
        (["--grace-s", "nan"], "--grace-s is 'nan'; allowed is a number"),
        (["--start-timeout-s", "0"], "--start-timeout-s is 0; allowed is a number of seconds over 0"),
        (["--start-timeout-s", "nan"], "--start-timeout-s is nan;"),
        (["--config", "/nonexistent"], "cannot read the configuration file /nonexistent: No such file or directory"),
    ],
)
def test_a_bad_setting_is_told_before_a_model_is_fetched_or_a_role_starts(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(up, "fetch", None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        up.run(options("--data-dir", str(tmp_path), *flags), command=["/no/such/program"])
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_only_one_role_has_is_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kvrelay.toml"
    file.write_text("[decode-node]\nmax_batch = 600\n")
    with pytest.raises(ConfigError, match="max_batch is 600; allowed is at most max_batched_tokens, 512"):
        up.run(options("--config", str(file)))
    monkeypatch.setenv("KVRELAY_KVSTORE_DISK_BYTES", "much")
    with pytest.raises(ConfigError, match="KVRELAY_KVSTORE_DISK_BYTES is 'much'"):
        up.run(options())


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        base = server.getsockname()[1] - 10
        roles = plan(options("--port-base", str(base)), {"": Path("/m")}, tmp_path)
        own = [role for role in roles if role.name == "prefill-node"]  # whatever else has the others' ports
        with pytest.raises(
            ConfigError, match=rf"port {base + 10} on 127\.0\.0\.1 \(for the prefill-node\).*--port-base"
        ):
            check_ports(own)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_foreign_address_is_no_port_in_use(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give an address of this machine with --host"):
        check_ports(plan(options("--host", host), {"": Path("/m")}, tmp_path))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model .*absent\.gguf does not exist"):
        up.run(options("--model", str(tmp_path / "absent.gguf"), "--port-base", str(free_base())))
    with pytest.raises(ConfigError, match=r"--models .*absent\.gguf does not exist"):
        up.run(options("--models", f"a={tmp_path / 'absent.gguf'}", "--port-base", str(free_base())))


def test_a_data_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*--data-dir"):
        up.run(options("--model", str(tmp_path), "--data-dir", str(tmp_path / "file"), "--port-base", str(free_base())))


def free_base() -> int:
    """A port base whose ports were free a moment ago."""
    for base in range(21_000, 60_000, 300):
        try:
            check_ports(plan(options("--port-base", str(base)), {"": Path("/m")}, Path("/d")))
        except ConfigError:
            continue
        return base
    raise AssertionError("no free ports")


# What runs.


class Stage:
    """A cluster of fake roles and what it said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.processes: dict[str, RoleProcess] = {}
        self.on_line: dict[str, Callable[[], None]] = {}

    def say(self, line: str) -> None:
        self.lines.append(line)
        for part, action in [*self.on_line.items()]:
            if part in line:
                action()

    def be(self, role: str, manner: str) -> None:
        (self.directory / f"{role}.{manner}").touch()

    async def run(
        self, announce: Callable[[], None], limits: Limits = PATIENT, models: Sequence[str] = ("",), **counts: int
    ) -> Outcome:
        cluster = LocalCluster(limits, self.say)
        for role in Role:
            own = models if role in (Role.PREFILL_NODE, Role.DECODE_NODE) else ("",)
            for index, model in enumerate(own * counts.get(role.name.lower(), 1)):
                name = f"{role.value}-{index + 1}"
                command = [sys.executable, str(FAKE_ROLE), str(self.directory), role.value, "--port", str(7000 + index)]
                process = RoleProcess(name, command, self.directory / f"{name}.log", cluster.report)
                self.processes[name] = process
                cluster.add(role, process, model)
        outcome = await cluster.run(announce)
        assert not any(process.running for process in self.processes.values())
        return outcome

    def events(self, kind: str) -> list[str]:
        lines = (self.directory / "events").read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith(kind)]

    @property
    def said(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def test_a_cluster_is_announced_once_ready_and_drained_in_order_after_ctrl_c(stage: Stage) -> None:
    outcome = await stage.run(interrupt)
    assert outcome is Outcome.STOPPED
    assert sorted(stage.events("ready")) == ["coordinator", "decode-node", "kvstore", "prefill-node"]
    ended = stage.events("ended")
    assert ended[0] == "coordinator"
    assert ended[-1] == "kvstore"
    assert sorted(ended[1:3]) == ["decode-node", "prefill-node"]
    assert "prefill-node-1 ready on 127.0.0.1:7000" in stage.said
    assert "draining: running requests may finish (Ctrl-C again to hurry)" in stage.lines
    assert stage.lines[-1] == "stopped"


async def test_a_role_that_dies_early_is_named_with_its_last_words_and_the_rest_stops(stage: Stage) -> None:
    stage.be("decode-node", "dies")
    outcome = await stage.run(interrupt)
    assert outcome is Outcome.FAILED
    assert "decode-node-1 ended with exit code 3 before it was ready" in stage.said
    assert "  | CUDA is on fire" in stage.lines
    assert "stopping what was started" in stage.said
    assert "draining" not in stage.said


async def test_a_role_that_never_gets_ready_is_named_meanwhile_and_given_up(stage: Stage) -> None:
    stage.be("kvstore", "silent")
    outcome = await stage.run(interrupt, Limits(start_s=5.0, heartbeat_s=1.0))
    assert outcome is Outcome.FAILED
    assert any(line.startswith("... warming up: ") and "kvstore-1" in line for line in stage.lines)
    assert "not ready after 5 s: kvstore-1" in stage.said


async def test_a_cluster_survives_the_death_of_one_of_two_and_says_so(stage: Stage) -> None:
    def kill_one() -> None:
        stage.on_line["was killed by"] = interrupt
        stage.processes["prefill-node-1"].send(signal.SIGKILL)

    outcome = await stage.run(kill_one, prefill_node=2)
    assert outcome is Outcome.STOPPED
    assert "prefill-node-1 was killed by SIGKILL while serving; the others go on without it" in stage.said
    assert "prefill-node" in stage.events("ended")  # the other one, drained


@pytest.mark.parametrize("name", ["coordinator", "prefill-node", "decode-node"])
async def test_losing_the_only_one_of_a_role_ends_the_cluster(name: str, stage: Stage) -> None:
    outcome = await stage.run(lambda: stage.processes[f"{name}-1"].send(signal.SIGKILL))
    assert outcome is Outcome.FAILED
    assert f"{name}-1 was killed by SIGKILL while serving;" in stage.said


async def test_losing_one_of_several_models_leaves_the_others_served(stage: Stage) -> None:
    def kill_one() -> None:
        stage.on_line["was killed by"] = kill_another
        stage.processes["decode-node-1"].send(signal.SIGKILL)

    def kill_another() -> None:
        del stage.on_line["was killed by"]
        stage.processes["prefill-node-2"].send(signal.SIGKILL)

    outcome = await stage.run(kill_one, models=("small", "large"))
    assert outcome is Outcome.FAILED
    assert (
        "decode-node-1 was killed by SIGKILL while serving; model 'small' has no other, the others go on without it"
        in stage.said
    )
    assert "prefill-node-2 was killed by SIGKILL while serving; the end of" in stage.said


async def test_a_role_that_does_not_end_within_the_grace_period_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.local_cluster._KILL_MARGIN_S", 1.0)
    stage.be("decode-node", "stubborn")
    outcome = await stage.run(interrupt, Limits(start_s=DEADLINE_S, grace_s=1.0))
    assert outcome is Outcome.STOPPED
    assert "decode-node-1 did not end in time and is killed" in stage.said
    assert "prefill-node" in stage.events("ended")


async def test_a_second_ctrl_c_hurries(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.local_cluster._HURRY_S", 0.2)
    stage.be("coordinator", "stubborn")

    def twice() -> None:
        interrupt()
        interrupt()

    outcome = await stage.run(twice, Limits(start_s=DEADLINE_S, grace_s=1_000))
    assert outcome is Outcome.STOPPED
    assert "coordinator-1 did not end in time and is killed" in stage.said


# The launcher as a process of its own.


def launcher(directory: Path, *flags: str) -> subprocess.Popen[str]:
    model = directory / "model.gguf"
    model.touch()
    script = (
        "import sys; from kvrelay.up import *; p = argparse.ArgumentParser(); add_arguments(p);"
        f"sys.exit(run(p.parse_args(sys.argv[1:]), command=[sys.executable, {str(FAKE_ROLE)!r}, {str(directory)!r}]))"
    )
    arguments = ["--model", str(model), "--data-dir", str(directory / "data"), "--port-base", str(free_base())]
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments, *flags], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} never came: {lines}")


def test_up_says_what_to_try_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    with launcher(tmp_path, "--no-kvstore") as process:
        said = "".join(read_until(process, "Ctrl-C drains"))
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0
    assert "starting coordinator, prefill-node, decode-node with model.gguf in bfloat16" in said
    assert said.count(" ask --address 127.0.0.1:") == 2
    assert said.count(" status --address 127.0.0.1:") == 1
    assert "decode-node     127.0.0.1:" in said
    assert "stopped" in rest
    assert "loading weights" in (tmp_path / "data" / "logs" / "decode-node.log").read_text()


def test_the_roles_die_with_their_launcher(tmp_path: Path) -> None:
    with launcher(tmp_path) as process:
        read_until(process, "Ctrl-C drains")
        pids = [int(line.split()[2]) for line in (tmp_path / "events").read_text().splitlines()]
        handles = [os.pidfd_open(pid) for pid in pids]
        process.kill()
    assert len(handles) == 4
    for handle in handles:
        assert select.select([handle], [], [], DEADLINE_S)[0] == [handle]  # readable once it has ended
        os.close(handle)
