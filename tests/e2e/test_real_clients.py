"""Clients that people have already, unchanged but for base URL and key, against a real cluster with the demo model.

Each has a virtual environment of its own (tests/support/client_environment.py) and is skipped, with the reason, where
that cannot be installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.api_keys import new_key
from coordinator.identity import Scope
from kvrelay.client import Client
from kvrelay.inference import ChatMessage, ChatPrompt, TokensGenerated
from kvrelay.sampling import SamplingParams
from kvrelay.tokenizer_files import tokenizer_files
from tests.support.client_environment import SCRIPTS, node_environment, python_environment
from tests.support.cluster import Cluster, running
from tests.support.demo import demo_model_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

QUESTION = "What is the capital of France?"
MAX_TOKENS = 16
CLIENT_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Door:
    """Where clients ask, and what is answered there to QUESTION."""

    url: str  # without a path
    key: str
    model: str
    text: str
    num_tokens: int

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("clients")
    key, line = new_key("acme", "acme-1", frozenset({Scope.INFER}))
    keys = directory / "keys.toml"
    keys.write_text(line)
    arguments = ["--api-keys-file", str(keys), "--default-max-tokens", str(MAX_TOKENS)]
    shape = Cluster(demo_model_path(), directory, with_store=False, cluster_ports=True, coordinator_args=arguments)
    with running(shape) as cluster, Client(cluster.address, api_key=key) as client:
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        events = list(client.generate(ChatPrompt((ChatMessage("user", QUESTION),)), sampling))
        tokens = [event for event in events if isinstance(event, TokensGenerated)]
        yield Door(
            url=f"http://127.0.0.1:{cluster.http_ports[0]}",
            key=key,
            model=client.get_model().name,
            text="".join(event.text for event in tokens),
            num_tokens=sum(len(event.tokens) for event in tokens),
        )


def run(*command: str | Path, **environment: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=CLIENT_TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": "", **environment},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def check_answers(printed: str, door: Door) -> None:
    answered: dict[str, Any] = json.loads(printed)
    assert (answered["whole"], answered["streamed"]) == (door.text, door.text)
    assert answered["completion_tokens"] == [door.num_tokens, door.num_tokens]


@pytest.mark.parametrize(
    ("script", "package"),
    [
        ("openai_python.py", "openai"),
        ("litellm_python.py", "litellm"),
        ("langchain_python.py", "langchain-openai"),
    ],
)
def test_a_python_client_asks_whole_and_as_a_stream(script: str, package: str, door: Door) -> None:
    python = python_environment(package, package) / "python"
    printed = run(python, SCRIPTS / script, door.base_url, door.key, QUESTION, LITELLM_LOCAL_MODEL_COST_MAP="True")
    check_answers(printed, door)


def test_npms_client_asks_whole_and_as_a_stream(door: Door) -> None:
    place = node_environment("openai-npm", "openai")
    script = place / "openai_node.mjs"  # imports are looked for beside it
    script.write_text((SCRIPTS / "openai_node.mjs").read_text())
    check_answers(run("node", script, door.base_url, door.key, QUESTION), door)


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_the_llm_command(flag: str, door: Door, tmp_path: Path) -> None:
    command = python_environment("llm", "llm") / "llm"
    models = [{"model_id": "ours", "model_name": door.model, "api_base": door.base_url, "api_key_name": "ours"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML too
    flags = ["-m", "ours", "--key", door.key, *([] if flag == "--stream" else [flag])]
    options = ["-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS)]
    assert run(command, *flags, *options, QUESTION, LLM_USER_PATH=str(tmp_path)).strip() == door.text


def test_aiperf_measures_it(door: Door, tmp_path: Path) -> None:
    command = python_environment("aiperf", "aiperf") / "aiperf"
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name, content in tokenizer_files(demo_model_path()).items():
        (tokenizer / name).write_bytes(content)
    flags = ["--model", door.model, "--url", door.url, "--api-key", door.key, "--endpoint-type", "chat", "--streaming"]
    load = ["--concurrency", "2", "--request-count", "6", "--synthetic-input-tokens-mean", "64"]
    output = ["--output-tokens-mean", "8", "--ui", "none", "--output-artifact-dir", tmp_path / "out"]
    run(command, "profile", *flags, "--tokenizer", tokenizer, *load, *output)
    measured = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == 6
    assert measured["output_sequence_length"]["max"] == 8
    assert measured["time_to_first_token"]["p50"] > 0


def test_guidellm_measures_it(door: Door, tmp_path: Path) -> None:
    """Without a torch of its own, which is the CUDA build: it takes this environment's."""
    command = python_environment("guidellm", "guidellm", without=("torch",), torch_from_here=True) / "guidellm"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {number}."}) + "\n" for number in range(3, 9)))
    backend = f"kind=openai_http,target={door.url},model={door.model},api_key={door.key}"
    report = tmp_path / "report.json"
    load = ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    output = ["--disable-console-interactive", "--output", f"kind=json,path={report}"]
    data = ["--data", f"kind=json_file,path={prompts}"]
    run(command, "run", "--backend", backend, *load, *data, *output, HF_HUB_OFFLINE="1")
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
