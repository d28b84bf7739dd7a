"""Token ids agree with the reference, and a file that cannot be served is refused by name."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.detokenizer import Detokenizer
from kvrelay.errors import InvalidRequestError, ModelFileError
from kvrelay.inference import ChatMessage, ChatPrompt
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from tests.support import golden
from tests.support.demo import demo_model_path, demo_tokenizer
from tests.support.tiny_model import make_tiny_model

BYTE_ALPHABET = [chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))] + [
    chr(0x100 + index) for index in range(68)
]
TOKENS = ["<|end|>", "<|user|>", "<think>", *BYTE_ALPHABET, "he", "Ġhe", "12", "123", "ĠĠ"]
KINDS = [3, 3, 4] + [1] * (len(TOKENS) - 3)
MERGES = ["h e", "Ġ he", "1 2", "12 3", "Ġ Ġ"]
ROCKET = "🚀"


def chat(text: str) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", text),))


HI = chat("hi")


def write_gguf(path: Path, **changes: Any) -> Path:
    """A GGUF file with a small byte-level vocabulary; `changes` replace entries, None leaves one out."""
    entries: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    entries |= {f"tokenizer.{name}": value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def ids(*tokens: str) -> list[int]:
    return [TOKENS.index(token) for token in tokens]


# The real model.


@pytest.mark.parametrize("case", golden.rows(), ids=lambda case: case["name"])
def test_prompts_of_the_real_model_have_the_reference_ids(case: dict[str, Any]) -> None:
    tokenizer = demo_tokenizer()
    if case["kind"] == "text":
        assert tokenizer.encode(case["source"], add_bos=False) == case["prompt_ids"]
    elif case["kind"] == "chat":
        messages = ChatPrompt(tuple(ChatMessage(**message) for message in case["source"]))
        assert tokenizer.encode_chat(messages) == case["prompt_ids"]
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    expected = case["output_text"]
    for token in special:  # the reference writes them out; they are no text
        expected = expected.replace(token, "")
    assert tokenizer.decode(case["output_ids"]) == expected


def test_the_real_model_names_its_special_tokens() -> None:
    tokenizer = demo_tokenizer()
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == (2,)
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (1, False)
    assert [tokenizer.token_bytes(token_id) for token_id in (0, 1, 2, 49_152, -1)] == [b""] * 5


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.text(
        st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=40
    )
)
def test_any_text_survives_the_real_vocabulary(text: str) -> None:
    # This vocabulary lacks the bytes of some control characters and of the planes that hold no characters.
    tokenizer = demo_tokenizer()
    token_ids = tokenizer.encode(text, add_bos=False)
    assert tokenizer.decode(token_ids) == text
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, token_ids)) == text


@given(st.lists(st.integers(0, 49_151), max_size=30))
def test_any_ids_of_the_real_vocabulary_stream_as_their_decode(token_ids: list[int]) -> None:
    tokenizer = demo_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.flush() == tokenizer.decode(token_ids)


# GGUF.


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "he he", ["he", "Ġhe"]),
        ("smollm", " 123", ["Ġ", "1", "2", "3"]),
        ("gpt-2", " 123", ["Ġ", "123"]),
        ("llama-bpe", "123123", ["123", "123"]),
        ("llama-bpe", " 12", ["Ġ", "12"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed first
        ("smollm", "e\u0301", ["e", "Ì", "ģ"]),
        ("smollm", "he<|user|>he<think>", ["he", "<|user|>", "he", "<think>"]),
        ("smollm", "", []),
    ],
)
def test_each_pre_tokenizer_splits_its_own_way(pre: str, text: str, tokens: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **{"ggml.pre": pre}))
    assert tokenizer.encode(text, add_bos=False) == ids(*tokens)


def test_bos_is_added_when_asked_for(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **{"ggml.add_bos_token": True}))
    assert tokenizer.add_bos is True
    assert tokenizer.encode("he", add_bos=True) == ids("<|user|>", "he")
    assert tokenizer.encode("<|user|>he", add_bos=True) == ids("<|user|>", "he"), "one, also where it is written"
    assert tokenizer.encode("he", add_bos=False) == ids("he")


def test_control_tokens_have_no_text_and_user_tokens_do(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    assert [tokenizer.token_bytes(token_id) for token_id in ids("<|end|>", "<think>", "Ġhe")] == [
        b"",
        b"<think>",
        b" he",
    ]


def test_a_second_end_of_turn_token_ends_an_answer_too(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf", **{"ggml.eot_token_id": 1}))
    assert tokenizer.eos_token_ids == (0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml.model": "llama"}, "'llama' is not served"),
        ({"ggml.pre": "tekken"}, "'tekken' is not known; known are gpt-2, llama-bpe"),
        ({"ggml.pre": None}, "no usable tokenizer.ggml.pre"),
        ({"ggml.tokens": None}, "no usable tokenizer.ggml.tokens"),
        ({"ggml.merges": ["q nothere"]}, "merges do not fit"),
        ({"chat_template": "{% for %}"}, "chat template of"),
    ],
)
def test_a_tokenizer_that_is_not_served_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "strange.gguf", **changes)
    with pytest.raises(ModelFileError, match=r"strange\.gguf") as refused:
        load_tokenizer(path)
    assert message in str(refused.value)


@pytest.mark.parametrize("size", [0, 3, 12, 30, 100, 2_000])
def test_a_truncated_gguf_is_refused_by_name(size: int, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:size])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        load_tokenizer(path)


def test_the_real_file_cut_inside_its_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with demo_model_path().open("rb") as file:
        path.write_bytes(file.read(500_000))
    with pytest.raises(ModelFileError, match=r"cut\.gguf is not a whole GGUF file .* near byte \d+"):
        load_tokenizer(path)


@given(st.binary(max_size=200))
def test_any_bytes_after_the_header_are_refused_or_read_but_never_crash(tmp_path_factory: Any, tail: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + tail)
    with pytest.raises(ModelFileError):
        load_tokenizer(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"absent\.gguf"):
        load_tokenizer(tmp_path / "absent.gguf")


# Hugging Face directories.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def directory(tiny: Path, tmp_path: Path) -> Path:
    """A copy to change, without the weights."""
    shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_directory_gives_tokens_template_and_ends(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == 259
    assert tokenizer.eos_token_ids == (2,)
    assert (tokenizer.bos_token_id, tokenizer.add_bos) == (0, False)
    token_ids = tokenizer.encode(f"a{ROCKET}<|im_end|>b", add_bos=False)
    assert len(token_ids) == 7
    assert token_ids[5] == 2
    assert tokenizer.decode(token_ids) == f"a{ROCKET}b"
    assert tokenizer.render_chat(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_generation_config_names_the_ends_before_config(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2, 1]}')
    assert load_tokenizer(directory).eos_token_ids == (1, 2)


def test_a_post_processor_that_adds_bos_is_noticed(directory: Path) -> None:
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    template = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    edit(
        directory / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": bos},
        },
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer.add_bos is True
    assert tokenizer.encode("", add_bos=True) == [0]
    assert tokenizer.encode("", add_bos=False) == []


def test_other_threads_run_while_a_long_text_is_tokenized(directory: Path) -> None:
    """An encoder that kept the interpreter to itself would let this loop turn once or twice."""
    tokenizer = load_tokenizer(directory)
    encoding = threading.Thread(target=tokenizer.encode, args=("some words " * 50_000,), kwargs={"add_bos": False})
    encoding.start()
    num_turns = 0
    while encoding.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 3


@pytest.mark.parametrize(("changes", "most"), [({}, 8), ({"ggml.pre": "qwen2"}, 24)])
def test_a_token_stands_for_so_many_characters_at_most(changes: dict[str, str], most: int, tmp_path: Path) -> None:
    """Here for "<|user|>"; with composition, of letters that come apart as three, for thrice as many."""
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", **changes))
    assert tokenizer.max_chars_per_token == most
    text = "<|user|>" * 5 + "\u1112\u1161\u11ab" * 5
    assert len(text) <= most * len(tokenizer.encode(text, add_bos=False))


def test_a_template_file_or_a_named_template_is_used(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", chat_template=[{"name": "default", "template": "named {{ bos_token }}"}])
    assert load_tokenizer(directory).render_chat(HI) == "named <|endoftext|>"
    (directory / "chat_template.jinja").write_text("from file")
    assert load_tokenizer(directory).render_chat(HI) == "from file"


def test_byte_fallback_tokens_are_their_bytes(directory: Path) -> None:
    edit(
        directory / "tokenizer.json",
        model={"type": "BPE", "vocab": {"<0xF0>": 0, "<0x9F>": 1, "▁he": 2}, "merges": []},
        added_tokens=[],
        decoder={"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    )
    tokenizer = load_tokenizer(directory)
    assert [tokenizer.token_bytes(token_id) for token_id in range(3)] == [b"\xf0", b"\x9f", b" he"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer.json", "[]", "no JSON object"),
        ("tokenizer.json", '{"model": {"type": "?"}}', "is no tokenizer"),
        ("tokenizer_config.json", "{", "cannot read"),
    ],
)
def test_a_damaged_directory_is_refused_by_name(name: str, content: str | None, message: str, directory: Path) -> None:
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_text(content)
    with pytest.raises(ModelFileError, match=message) as refused:
        load_tokenizer(directory)
    assert name in str(refused.value)


def test_an_unknown_decoder_is_refused(directory: Path) -> None:
    edit(directory / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ModelFileError, match="decoder 'WordPiece' is not served"):
        load_tokenizer(directory)


# What callers send.


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode: surrogates not allowed at 1"):
        demo_tokenizer().encode("a\ud83d", add_bos=False)


def test_a_model_without_a_template_says_what_to_send_instead(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_gguf(tmp_path / "m.gguf"))
    with pytest.raises(InvalidRequestError, match="no chat template; send a plain prompt"):
        tokenizer.encode_chat(HI)


def with_template(source: str, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path / "m.gguf", chat_template=source))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # the block's own newline and indentation vanish, as in Hugging Face's templates
        ("{% for m in messages %}\n    {% if true %}\n{{ m.content }}{% endif %}\n{% endfor %}", "hi <&>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi <&>"}]'),
        ("{{ bos_token }}{{ eos_token }}", "<|user|><|end|>"),
        ("{% for m in messages %}{% break %}{% endfor %}done", "done"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi <&>"),
        ("{{ 'go' if add_generation_prompt }}", "go"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates_find_what_hugging_face_gives_them(source: str, expected: str, tmp_path: Path) -> None:
    assert with_template(source, tmp_path).render_chat(chat("hi <&>")) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}", "refused the messages"),
        ("{{ 1 / 0 }}", "refused the messages"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_an_invalid_request(source: str, message: str, tmp_path: Path) -> None:
    tokenizer = with_template(source, tmp_path)
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.render_chat(HI)


def test_a_chat_needs_a_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no messages"):
        with_template("x", tmp_path).render_chat(ChatPrompt(()))
