"""Models as they are written in a coordinator's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.model_list import parse_models
from kvrelay.config import load
from kvrelay.errors import ConfigError


def paths(*argv: str, **environ: str) -> dict[str, Path]:
    return load(CoordinatorConfig, "coordinator", argv, environ).model_paths()


def test_each_entry_is_a_name_and_a_path() -> None:
    text = "small=/models/small.gguf; large = /models/a=b ;\nown name=rel/dir;"
    assert parse_models(text) == {
        "small": Path("/models/small.gguf"),
        "large": Path("/models/a=b"),
        "own name": Path("rel/dir"),
    }
    assert parse_models("") == {}
    assert parse_models("home=~/m") == {"home": Path.home() / "m"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small", "models has 'small': a name, an equals sign and a path are needed, such as small=/models/small.gguf"),
        ("small=", "models has 'small=': a name, an equals sign"),
        ("=/models/small", "a model's name is ''; allowed are 1 to 128 printable characters"),
        (f"{'n' * 129}=/m", "allowed are 1 to 128"),
        ("a=/m;b=/n;a=/o", "two models are named 'a'"),
    ],
)
def test_what_makes_no_sense_is_told(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_models(text)


def test_one_model_is_given_as_ever() -> None:
    assert paths("--model", "/m/tiny.gguf") == {"tiny": Path("/m/tiny.gguf")}
    assert paths("--model", "/m/v1.5", "--model-name", "mine") == {"mine": Path("/m/v1.5")}
    assert paths("--model", ".") == {Path.cwd().name: Path()}


def test_several_come_beside_it_or_instead_of_it() -> None:
    assert list(paths("--model", "/m/tiny.gguf", "--models", "b=/b;a=/a")) == ["tiny", "b", "a"]
    assert paths(KVRELAY_COORDINATOR_MODELS="b=/b") == {"b": Path("/b")}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--model is missing: a GGUF file or a Hugging Face directory; or several by --models"),
        (["--models", " ; "], "--model is missing"),
        (["--models", "a=/a", "--model-name", "b"], "model_name is 'b', and there is no model that it would name"),
        (["--models", "a=/a", "--model", "/other/a.gguf"], "two models are named 'a'"),
    ],
)
def test_settings_that_name_no_models_are_refused(argv: list[str], message: str) -> None:
    config = load(CoordinatorConfig, "coordinator", argv, {})
    with pytest.raises(ConfigError, match=message):
        config.check()
