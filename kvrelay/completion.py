"""`kvrelay completion`: what makes a shell complete commands and their options."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import shtab

from kvrelay import config
from kvrelay.cli import COMMANDS
from kvrelay.config_table import config_class
from kvrelay.types import Role

SHELLS = ("bash", "zsh")
_ROLES = {role.value: role for role in Role}


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    sys.stdout.write(shtab.complete(every_command(), shell=options.shell) + "\n")
    return 0


def every_command() -> argparse.ArgumentParser:
    """One parser of all that the commands parse by themselves."""
    whole = argparse.ArgumentParser(prog="kvrelay", allow_abbrev=False)
    commands = whole.add_subparsers()
    for name, command in COMMANDS.items():
        own = _parser_of(name)
        # `parents` copies what a parser takes, and cannot take its --help along.
        commands.add_parser(name, parents=[own], add_help=False, help=command.help, conflict_handler="resolve")
    return whole


def _parser_of(name: str) -> argparse.ArgumentParser:
    if name in _ROLES:
        return config.parser(config_class(_ROLES[name]), name)
    module = importlib.import_module(COMMANDS[name].target.partition(":")[0])
    own: argparse.ArgumentParser = module.parser()
    return own


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay completion",
        description="Prints a script by which a shell completes kvrelay's commands. For bash: source <(kvrelay "
        "completion bash), at once or in ~/.bashrc; for zsh: kvrelay completion zsh > _kvrelay, somewhere in $fpath.",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="whose script")
    return parser
