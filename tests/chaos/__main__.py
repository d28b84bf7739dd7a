"""`python -m tests.chaos`: a cluster under load while its parts die; exit code 1 if anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM

import uvloop

from kvrelay import demo_model
from tests.chaos.asks import DEMO, TINY
from tests.chaos.cluster import Shape
from tests.chaos.plan import Kind
from tests.chaos.report import Violation
from tests.chaos.run import Settings, run_chaos
from tests.support.tiny_model import make_tiny_model

NUM_SHAPES = {"tiny": 60, "demo": 16}
NUM_WORKERS = {"tiny": 8, "demo": 4}
ALL_KINDS = tuple(Kind)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    directory = Path(options.directory or tempfile.mkdtemp(prefix="kvrelay-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    settings = settings_of(options.seed, options.seconds, directory, options.model, options.kinds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            violations = runner.run(_run_until_told(settings))
        except asyncio.CancelledError:
            return 128 + SIGTERM
    return 1 if violations else 0


async def _run_until_told(settings: Settings) -> list[Violation]:
    """SIGTERM ends the run and everything that it started, as SIGINT does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(SIGTERM, task.cancel)
    return await run_chaos(settings, say)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def settings_of(
    seed: int, seconds: float, directory: Path, model: str = "tiny", kinds: Sequence[Kind] = ALL_KINDS
) -> Settings:
    path = make_tiny_model(directory / "model") if model == "tiny" else demo_model.fetch()
    return Settings(
        model=path,
        directory=directory,
        seed=seed,
        seconds=seconds,
        sizes=TINY if model == "tiny" else DEMO,
        num_shapes=NUM_SHAPES[model],
        num_workers=NUM_WORKERS[model],
        kinds=tuple(kinds),
        shape=Shape(),
        command=f"python -m tests.chaos --seconds {seconds:g} --seed {seed} --model {model} --kinds {_names(kinds)}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of load and faults")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of load and faults; default: any")
    parser.add_argument("--model", choices=("tiny", "demo"), default="tiny", help="a random Llama, or the demo model")
    parser.add_argument("--kinds", type=_kinds, default=ALL_KINDS, help="of faults, with commas between; default: all")
    parser.add_argument("--directory", help="for logs and stores; default: a new temporary one")
    return parser


def _names(kinds: Sequence[Kind]) -> str:
    return ",".join(kind.value for kind in kinds)


def _kinds(text: str) -> tuple[Kind, ...]:
    return tuple(Kind(word) for word in text.split(","))


if __name__ == "__main__":
    raise SystemExit(main())
