"""`kvrelay up`: a whole cluster on this machine, one process per role, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.model_list import parse_models
from kvrelay import config
from kvrelay.config_table import config_class
from kvrelay.demo_model import cache_directory, fetch
from kvrelay.errors import ConfigError
from kvrelay.local_cluster import Limits, LocalCluster, Outcome, Say
from kvrelay.locks import Locks, lock
from kvrelay.planned_roles import DEFAULT_PORT_BASE, PlannedRole, check_ports, check_shape, plan
from kvrelay.role_process import RoleProcess
from kvrelay.types import Role

_DESCRIPTION = (
    "Starts a whole cluster on this machine, one process per role, and stays until Ctrl-C. It restarts nothing that "
    "dies, and ends when the last it started of a role other than the kvstore is gone. To bring a node back by hand: "
    "kvrelay decode-node --model MODEL --coordinator HOST:PORT --kvstore HOST:PORT (or prefill-node)."
)


def main(argv: Sequence[str]) -> int:
    return run(parser().parse_args(argv))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay up", description=_DESCRIPTION, allow_abbrev=False)
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinators", type=int, default=1, metavar="N", help="coordinators (default: 1)")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill nodes of each model (default: 1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode nodes of each model (default: 1)")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face directory (default: the demo model)"
    )
    parser.add_argument("--model-name", default="", metavar="NAME", help="name clients ask for (default: the file's)")
    parser.add_argument(
        "--models",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="instead of --model, one of several models, by the name clients ask for; may be repeated, or several with "
        "semicolons between",
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(default: bfloat16)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--port-base",
        type=int,
        default=DEFAULT_PORT_BASE,
        metavar="N",
        help="the coordinator's port; kvstore +1, further coordinators +2.., prefill nodes +10.., decode nodes +20.., "
        "further kvstores after them, metrics of each +100, HTTP of a coordinator +600 "
        f"(default: {DEFAULT_PORT_BASE})",
    )
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="threads of each node (default: its share of the cores)"
    )
    parser.add_argument("--kvstore", action=argparse.BooleanOptionalAction, default=True, help="run a KV store")
    parser.add_argument("--kvstores", type=int, metavar="N", help="how many KV stores (default: 1)")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", help="logs and the store's disk tier (default: a cache directory)"
    )
    parser.add_argument(
        "--secure",
        action="store_true",
        help="TLS everywhere, and no answer without the API key that is printed; nodes join at other ports, +200",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with more settings, given to each role")
    parser.add_argument(
        "--grace-s", type=float, default=30.0, metavar="S", help="time running requests get at the end (default: 30)"
    )
    parser.add_argument(
        "--start-timeout-s", type=float, default=300.0, metavar="S", help="time the roles get to start (default: 300)"
    )


def run(options: argparse.Namespace, *, command: Sequence[str] = (sys.executable, "-m", "kvrelay")) -> int:
    """Starts the cluster and stays until a signal; the exit status. `command` starts a role named by its next argument.

    Raises KVRelayError when something is wrong before the first process starts.
    """
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", flush=True)

    given = models_of(options)
    check_shape(options, len(given))
    data_dir: Path = options.data_dir or cache_directory() / f"up-{options.port_base}"
    key_directory = data_dir.resolve() / "locks"
    unmade = Locks(key_directory, api_key="") if options.secure else None
    draft = plan(options, {name: path or Path() for name, path in given.items()}, data_dir, unmade)
    check_settings(draft)
    check_ports(draft)
    flag = "--models" if options.models else "--model"
    models = {name: find_model(path, say, flag) for name, path in given.items()}
    # Not before the ports are known to be free: a cluster that has them has these files, too.
    locks = lock(key_directory, options.host) if options.secure else None
    roles = plan(options, models, data_dir, locks)
    try:
        (data_dir / "logs").mkdir(parents=True, exist_ok=True)
        cluster = _make_cluster(options, roles, command, data_dir, say)
    except OSError as error:
        raise ConfigError(f"cannot write to {data_dir}: {error.strerror}; choose another with --data-dir") from error
    say(f"starting {', '.join(role.name for role in roles)} with {_listed(models)} in {options.dtype}")
    outcome = asyncio.run(cluster.run(lambda: print(_how_to_use(roles, data_dir, locks), flush=True)))
    return 1 if outcome is Outcome.FAILED else 0


def check_settings(roles: Sequence[PlannedRole]) -> None:
    """Reads every role's configuration as the role will. Raises ConfigError for what would end it at once."""
    for role in roles:
        config.load(config_class(role.role), role.role.value, role.flags, os.environ).check()


def models_of(options: argparse.Namespace) -> dict[str, Path | None]:
    """Paths by the name that clients ask for, which is empty where it is the file's; None: the demo model."""
    if not options.models:
        return {options.model_name: options.model}
    for flag, value in (("--model", options.model), ("--model-name", options.model_name)):
        if value:
            raise ConfigError(f"{flag} is {str(value)!r} beside --models; name every model by --models")
    models = parse_models("\n".join(options.models))
    if not models:
        raise ConfigError("--models names no model; write NAME=PATH, such as small=/models/small.gguf")
    return {**models}


def find_model(path: Path | None, say: Say, flag: str = "--model") -> Path:
    """`flag` is the one that names `path`; None: the demo model. Raises ConfigError."""
    if path is None:
        return fetch(say=say)
    if not path.exists():
        raise ConfigError(f"{flag} {path} does not exist; give a GGUF file or a Hugging Face directory")
    return path.resolve()


def _listed(models: Mapping[str, Path]) -> str:
    """The single model's file, or several with their names."""
    if len(models) == 1:
        return next(iter(models.values())).name
    return ", ".join(f"{name} ({path.name})" for name, path in models.items())


def _make_cluster(
    options: argparse.Namespace, roles: Sequence[PlannedRole], command: Sequence[str], data_dir: Path, say: Say
) -> LocalCluster:
    limits = Limits(start_s=options.start_timeout_s, grace_s=options.grace_s)
    cluster = LocalCluster(limits, say)
    for role in roles:
        log_path = data_dir / "logs" / f"{role.name}.log"
        log_path.write_bytes(b"")
        process = RoleProcess(role.name, [*command, role.role.value, *role.flags], log_path, cluster.report)
        cluster.add(role.role, process, role.model)
    return cluster


def _how_to_use(roles: Sequence[PlannedRole], data_dir: Path, locks: Locks | None = None) -> str:
    """What a newcomer needs now: addresses, and four calls that work as they are written."""
    coordinator = roles[0]
    program = _program()
    where = "" if coordinator.address == f"127.0.0.1:{DEFAULT_PORT_BASE}" else f" --address {coordinator.address}"
    rows = [
        f"  {role.name:15} {role.address:21} metrics http://{role.host}:{role.metrics_port}/metrics"
        f"{'  ' if role.model else ''}{role.model}"
        for role in roles
    ]
    of_model = next((f" --model {shlex.quote(role.model)}" for role in roles if role.model), "")
    host = f"[{coordinator.host}]" if ":" in coordinator.host else coordinator.host
    base_url = f"{'https' if locks else 'http'}://{host}:{coordinator.http_port}/v1"
    rows += ["", f"OpenAI's API is at {base_url}"]
    shown = '--cacert "$KVRELAY_CA" -H "Authorization: Bearer $KVRELAY_API_KEY" ' if locks else ""
    calls = [
        f"  curl {shown}{base_url}/chat/completions -d {shlex.quote(_chat_body(roles))}",
        f'  {program} ask{where}{of_model} --temperature 0 "What is the capital of France?"',
        f"  {program} status{where}",
        f'  {program} ask{where}{of_model} --json --temperature 0 --max-tokens 16 --raw "1, 2, 3,"',
    ]
    if locks is not None:
        calls = [f"  export KVRELAY_API_KEY={locks.api_key} KVRELAY_CA={shlex.quote(str(locks.ca))}", *calls]
    logs = f"logs in {data_dir / 'logs'}; Ctrl-C drains and stops"
    note = []
    if roles[1].role is Role.COORDINATOR:
        note = ["", "A request's id belongs to the coordinator it was sent to: cancel it there, by --address."]
    return "\n".join(["", "kvrelay is up.", *rows, "", "Try, in another terminal:", *calls, *note, "", logs, ""])


def _chat_body(roles: Sequence[PlannedRole]) -> str:
    """A request of OpenAI's API."""
    named = next(({"model": role.model} for role in roles if role.model), {})
    return json.dumps(
        {**named, "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    )


def _program() -> str:
    """How to call this command from the same directory."""
    if shutil.which("kvrelay"):
        return "kvrelay"
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "kvrelay" else f"{sys.executable} -m kvrelay"
