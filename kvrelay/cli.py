"""The `kvrelay` command."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import ConfigError, KVRelayError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: `target` is module:function, imported when it is asked for, taking the rest of the command line.
    What that may be a `parser` beside it says, or where it is a role its configuration."""

    help: str
    target: str


COMMANDS = {
    "up": Command("start a whole cluster on this machine", "kvrelay.up:main"),
    "ask": Command("ask the cluster something and see the answer stream", "kvrelay.ask:main"),
    "chat": Command("talk to the cluster, turn by turn", "kvrelay.chat:main"),
    "cancel": Command("end a running request", "kvrelay.cancel:main"),
    "explain": Command("tell why a request waited, where it went and what it cost", "kvrelay.explain:main"),
    "status": Command("show nodes, blocks and queues", "kvrelay.status:main"),
    "weight": Command("change a node's part of the requests while it runs; 0: nothing new", "kvrelay.weight:main"),
    "store": Command(
        "look after the KV stores: stats, ls, verify, compact, evict, pin, warm", "kvrelay.store_command:main"
    ),
    "keys": Command("make API keys for a coordinator's --api-keys-file", "kvrelay.keys:main"),
    "certs": Command("make a CA and certificates for every role", "kvrelay.certs:main"),
    "plan": Command("work out how many requests fit into a node's memory", "kvrelay.plan:main"),
    "fetch-model": Command("download the demo model and print its path", "kvrelay.demo_model:main"),
    "completion": Command("print a script by which bash or zsh completes commands", "kvrelay.completion:main"),
    "coordinator": Command("run the front door", "coordinator.command:main"),
    "prefill-node": Command("run a node that computes prompts", "prefill_node.main:main"),
    "decode-node": Command("run a node that generates answers", "decode_node.main:main"),
    "kvstore": Command("run the store that keeps KV blocks for reuse", "kvstore.main:main"),
}

OWN_PACKAGES = ("kvrelay", "coordinator", "prefill_node", "decode_node", "kvstore")

DESCRIPTION = """\
Serves language models with prefill and decode on different nodes, over plain gRPC."""

EPILOG = """\
Start here:
  kvrelay up                            a cluster of four processes with a demo model; Ctrl-C ends it
  kvrelay ask "Why is the sky blue?"    in another terminal

One role at a time, each from flags, KVRELAY_... environment variables or a TOML file:
  kvrelay coordinator --port 7400 --model MODEL
  kvrelay prefill-node --model MODEL --coordinator HOST:7400
  kvrelay decode-node --model MODEL --coordinator HOST:7400

`kvrelay COMMAND --help` explains every option of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0; 1 when it failed; 2 when it was asked wrongly. Errors are one line on stderr."""
    # Before anything imports grpc, which reads it then: every peer that goes away is a line on stderr otherwise.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Its fork handlers would start its threads anew in children that only exec, and now and then abort those.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        return _outside_of_commands(arguments)
    command, rest = arguments[0], arguments[1:]
    try:
        return _target(COMMANDS[command].target)(rest)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in OWN_PACKAGES:
            raise
        print(f"kvrelay {command}: {_how_to_install(package)}", file=sys.stderr)
        return 2
    except KVRelayError as error:
        print(f"kvrelay {command}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 1


def _outside_of_commands(arguments: Sequence[str]) -> int:
    # The commands are listed here: argparse breaks the line after a name of 11 letters.
    listed = "\n".join(f"  {name:14}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kvrelay",
        usage="kvrelay [-h] [--version] COMMAND ...",
        description=DESCRIPTION,
        epilog=f"commands:\n{listed}\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {_version()}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    if not arguments:
        parser.print_help()
        return 2
    parser.parse_args(arguments)  # ends the process: --help, --version, or a word it does not know
    return 2


def _version() -> str:
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:
        return "(run from its source tree, not installed)"


def _target(name: str) -> Callable[[Sequence[str]], int]:
    function: Callable[[Sequence[str]], int] = find(name)
    return function


def find(name: str) -> Any:
    """What module:name names."""
    module_name, attribute = name.split(":")
    return getattr(importlib.import_module(module_name), attribute)


def _how_to_install(package: str) -> str:
    remedy = "`pip install 'kvrelay[all]'` brings what every command needs"
    return f"the Python package {package!r} is not installed; {remedy}"


if __name__ == "__main__":
    sys.exit(main())
