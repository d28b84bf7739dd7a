"""What `kvrelay plan` prints, and how it refuses what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvrelay import cli

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
}
WEIGHTS = ["--weights", "16060522496"]


def model(directory: Path, **values: Any) -> list[str]:
    """The flag of a Llama-3-8B that has no weights, and `values` in its config."""
    (directory / "Llama-3-8B").mkdir()
    (directory / "Llama-3-8B" / "config.json").write_text(json.dumps(LLAMA_3_8B | values))
    return ["--model", str(directory / "Llama-3-8B")]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--memory", "80GiB", "--utilization", "0.9", "--p95-len", "8192", *WEIGHTS]
    assert cli.main(["plan", *model(tmp_path), *options]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Llama-3-8B: LlamaForCausalLM, up to 8192 tokens; KV of 32 layers x 8 KV heads x (128 + 128) = 65536 values "
        "a token",
        "memory 80.0 GiB x 0.9 = 72.0 GiB; blocks of 16 tokens; requests of 8192 tokens, 512 blocks each",
        "",
        "KV DTYPE           WEIGHTS   LEFT FOR KV  BYTES A TOKEN  BLOCKS  A REQUEST  AT A TIME",
        "float32            15.0 GiB  57.0 GiB     262144         14602   2.0 GiB    28",
        "bfloat16, float16  15.0 GiB  57.0 GiB     131072         29205   1.0 GiB    57",
    ]


def test_json_has_the_numbers_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request of 1,000 tokens takes 32 blocks of 32."""
    options = ["--memory", "80GB", "--p95-len", "1000", "--block-tokens", "32", *WEIGHTS, "--json"]
    assert cli.main(["plan", *model(tmp_path), *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan.pop("model").endswith("/Llama-3-8B")
    assert plan.pop("plans")[1] == {
        "dtypes": ["bfloat16", "float16"],
        "weight_bytes": 16_060_522_496,
        "kv_bytes": 55_939_477_504,
        "token_bytes": 131_072,
        "block_bytes": 4_194_304,
        "num_blocks": 13_337,
        "request_blocks": 32,
        "request_bytes": 134_217_728,
        "num_requests": 416,
    }
    assert plan == {
        "architecture": "LlamaForCausalLM",
        "unserved": None,
        "overcounted": None,
        "max_model_len": 8192,
        "memory_bytes": 80_000_000_000,
        "utilization": 0.9,
        "usable_bytes": 72_000_000_000,
        "block_tokens": 32,
        "request_tokens": 1000,
    }


def test_what_is_to_be_known_of_a_plan_stands_below_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = model(tmp_path, architectures=["OtherForCausalLM"], sliding_window=4096)
    assert cli.main(["plan", *flags, "--memory", "4GiB", "--utilization", "1", "--weights", "2.5GiB"]) == 0
    notes = capsys.readouterr().out.splitlines()[-3:]
    assert notes[0].startswith("kvrelay does not serve this model: architecture 'OtherForCausalLM' is not served")
    assert notes[1].startswith("an engine for this model may keep less: some layers attend to a window only")
    assert notes[2] == "float32: one request takes more than is left for KV; give more memory or a lower --p95-len"


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (
            ["--memory", "16GiB", *WEIGHTS],
            2,
            "kvrelay plan: the weights take 15.0 GiB, and 0.9 of --memory 16GiB is 14.4 GiB: none is left for KV; "
            "give more memory, or a smaller or quantised model\n",
        ),
        (
            ["--memory", "80GiB", "--p95-len", "8193", *WEIGHTS],
            2,
            "kvrelay plan: --p95-len is 8193, and the model takes 8192 tokens, prompt and answer together; give 8192 "
            "or less\n",
        ),
        (["--memory", "80GiB"], 1, "/model.safetensors; without its weights, give their size by --weights\n"),
    ],
)
def test_plans_that_cannot_be(
    options: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *model(tmp_path), *options]) == status
    assert capsys.readouterr().err.endswith(said)


def test_an_unknown_config_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["SomethingElse"]}')
    assert cli.main(["plan", "--model", str(tmp_path), "--memory", "80GiB"]) == 1
    assert "config.json has none of num_hidden_layers" in capsys.readouterr().err


def test_a_length_must_come_from_somewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = model(tmp_path, max_position_embeddings=None)
    assert cli.main(["plan", *flags, "--memory", "80GiB", *WEIGHTS]) == 2
    assert "give --p95-len" in capsys.readouterr().err
    assert cli.main(["plan", *flags, "--memory", "80GiB", *WEIGHTS, "--p95-len", "100000"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--memory", "0"], "--memory: '0'; allowed is a size over 0, such as 80GiB, 80GB or 85899345920"),
        (["--memory", "80 gigs"], "--memory: '80 gigs'; allowed is a size"),
        (["--memory", "80GiB", "--p95-len", "0"], "--p95-len: '0'; allowed is a whole number, at least 1"),
        (["--memory", "80GiB", "--block-tokens", "0"], "--block-tokens: '0'; allowed is a whole number"),
        (["--memory", "80GiB", "--utilization", "0"], "--utilization: '0'; allowed is a share over 0, at most 1"),
        (["--memory", "80GiB", "--utilization", "90"], "--utilization: '90'; allowed is a share over 0"),
        (["--memory", "80GiB", "--weights", "0"], "--weights: '0'; allowed is a size over 0"),
        ([], "--memory"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *model(tmp_path), *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_plan_loads_neither_torch_nor_numpy_nor_grpc(tmp_path: Path) -> None:
    arguments = ["plan", *model(tmp_path), "--memory", "80GiB", *WEIGHTS]
    script = (
        "import sys; from kvrelay.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(status or bool({'torch', 'numpy', 'gguf', 'grpc'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script, *arguments], check=False, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
