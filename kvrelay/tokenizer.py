"""Text to token ids and back, from a GGUF file or a Hugging Face directory, without torch.

Both kinds end as one `tokenizers.Tokenizer`, so a prompt has the same ids however the model was packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence
from tokenizers.processors import TemplateProcessing

from kvrelay.chat_template import ChatTemplate
from kvrelay.errors import InvalidRequestError, ModelFileError
from kvrelay.gguf_metadata import read_header
from kvrelay.inference import ChatPrompt
from kvrelay.tool_prompt import ToolFormat

NFC_SHRINKS = 3  # canonical composition leaves at least a third of a text: three Hangul letters become one syllable

_CONTROL = 3  # tokenizer.ggml.token_type of tokens that carry no text
_USER_DEFINED = 4  # of tokens taken whole from the text, but shown

# One pattern a family; only how many digits make a word differs.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template.

    `vocab_size` counts the tokenizer's ids; a model may have more rows than that, whose ids have no text.
    `add_bos` says whether the model expects `bos_token_id` before a plain text. `max_chars_per_token` bounds what one
    token can stand for in a text: one of n characters has at least n / max_chars_per_token tokens.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        text_of: Callable[[str], bytes],
        eos_token_ids: Iterable[int],
        bos_token_id: int | None,
        add_bos: bool,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._raw = raw
        self._chat_template = chat_template
        self._bytes = _bytes_by_id(raw, text_of)
        added = raw.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self.vocab_size = len(self._bytes)
        self.max_chars_per_token = _max_chars_per_token(raw, self._bytes)
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        self.add_bos = add_bos and bos_token_id is not None

    def encode(self, text: str, *, add_bos: bool) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised. With `add_bos` it begins with one BOS
        token, also where the text is written with it.

        Raises InvalidRequestError when the text is not Unicode (half of a surrogate pair).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error.reason} at {error.start}") from error
        # Of the library's ways to encode this one lets other threads run meanwhile, and it notes no offsets.
        token_ids: list[int] = self._raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_bos and self.bos_token_id is not None and token_ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *token_ids]
        return token_ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all of them; special tokens have none, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: b"" for special tokens and for ids beyond the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def written(self, token_id: int) -> str:
        """A special token as it is written in a text; "" for any other."""
        return self._special.get(token_id, "")

    @property
    def tool_format(self) -> ToolFormat:
        """How the model calls a tool."""
        return ToolFormat.HERMES if self._chat_template is None else self._chat_template.tool_format

    def render_chat(self, chat: ChatPrompt) -> str:
        """The prompt text the model's chat template makes of the messages, by default ready for the assistant's turn.

        Raises InvalidRequestError when the model has no template or the template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError("this model has no chat template; send a plain prompt instead of messages")
        return self._chat_template.render(chat)

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Token ids of the rendered messages. A template writes its own BOS, so none is added."""
        return self.encode(self.render_chat(chat), add_bos=False)

    def to_json(self) -> str:
        """As a tokenizer.json that gives the same ids, and the same text for them."""
        written = RawTokenizer.from_str(self._raw.to_str())
        if written.decoder is None:  # a GGUF file names none
            written.decoder = ByteLevelDecoder()
        if self.add_bos and self.bos_token_id is not None and written.post_processor is None:
            bos = self._raw.id_to_token(self.bos_token_id)
            written.post_processor = TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, self.bos_token_id)]
            )
        return written.to_str()

    def config(self) -> dict[str, Any]:
        """As a tokenizer_config.json says it."""
        named = {"bos_token": self.bos_token_id, "eos_token": next(iter(self.eos_token_ids), None)}
        tokens = {name: self._raw.id_to_token(token_id) for name, token_id in named.items() if token_id is not None}
        template = {"chat_template": self._chat_template.source} if self._chat_template is not None else {}
        return {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos, **tokens, **template}


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a GGUF file's metadata, or tokenizer.json and its neighbours in a Hugging Face directory.

    Raises ModelFileError, naming the file, when it is missing, damaged or of a kind that is not served.
    """
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _bytes_by_id(raw: RawTokenizer, text_of: Callable[[str], bytes]) -> list[bytes]:
    vocabulary = raw.get_vocab(with_added_tokens=True)
    texts = [b""] * (max(vocabulary.values(), default=-1) + 1)
    added = raw.get_added_tokens_decoder()
    for token, token_id in vocabulary.items():
        if token_id not in added:
            texts[token_id] = text_of(token)
        elif not added[token_id].special:
            texts[token_id] = token.encode("utf-8")
    return texts


def _max_chars_per_token(raw: RawTokenizer, texts: Iterable[bytes]) -> int:
    """In bytes, to be safe. A special token is written out in a text, though it adds none."""
    longest = max((len(text) for text in texts), default=1)
    written_out = (len(added.content.encode("utf-8")) for added in raw.get_added_tokens_decoder().values())
    longest = max(longest, *written_out, 1)
    return longest if raw.normalizer is None else longest * NFC_SHRINKS


def _from_gguf(path: Path) -> Tokenizer:
    metadata = read_header(path).metadata
    kind = _entry(metadata, "tokenizer.ggml.model", str, path)
    if kind != "gpt2":
        raise ModelFileError(f"{path}: tokenizer model {kind!r} is not served; 'gpt2' (byte-level BPE) is")
    tokens = _entry(metadata, "tokenizer.ggml.tokens", list, path)
    pre = _entry(metadata, "tokenizer.ggml.pre", str, path)
    raw = _byte_level_bpe(tokens, _entry(metadata, "tokenizer.ggml.merges", list, path), pre, path)
    _add_special_tokens(raw, tokens, _entry(metadata, "tokenizer.ggml.token_type", list, path))
    bos_id, eos_id = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    ending = ("eos", "eot", "eom")
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ending)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        raw,
        text_of=_byte_level_text,
        eos_token_ids=[token_id for token_id in named if token_id is not None],
        bos_token_id=bos_id,
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES),
        chat_template=template
        and ChatTemplate(
            template, bos_token=_token(tokens, bos_id), eos_token=_token(tokens, eos_id), origin=str(path)
        ),
    )


def _entry(metadata: dict[str, Any], key: str, kind: type, path: Path) -> Any:
    if not isinstance(metadata.get(key), kind):
        raise ModelFileError(f"{path} has no usable {key}; a model file with its tokenizer is needed")
    return metadata[key]


def _token(tokens: list[str], token_id: int | None) -> str:
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else ""


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str, path: Path) -> RawTokenizer:
    if pre not in _PRE_TOKENIZERS:
        allowed = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelFileError(f"{path}: pre-tokenizer {pre!r} is not known; known are {allowed}")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        model = BPE(vocabulary, pairs, ignore_merges=pre in _LLAMA3_NAMES)  # type: ignore[arg-type]
    except Exception as error:  # the Rust side raises nothing narrower
        raise ModelFileError(f"{path}: the merges do not fit the tokens: {error}") from error
    raw = RawTokenizer(model)
    raw.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    if pre == "qwen2":
        raw.normalizer = NFC()
    return raw


def _add_special_tokens(raw: RawTokenizer, tokens: list[str], kinds: list[int]) -> None:
    raw.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )


def _gpt2_words() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False)


def _single_digits() -> PreTokenizer:
    return PreTokenizerSequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _words(digits: str) -> Callable[[], PreTokenizer]:
    return lambda: PreTokenizerSequence(
        [
            Split(Regex(_WORDS.replace("DIGITS", digits)), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3")
_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2_words,
    "smollm": _single_digits,
    "qwen2": _words(r"\p{N}"),
    **dict.fromkeys(_LLAMA3_NAMES, _words(r"\p{N}{1,3}")),
}


def _byte_of_char() -> dict[str, int]:
    """GPT-2's way to write any byte as a printable character: the others are moved above U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_of_char()


def _byte_level_text(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")  # not written by the byte alphabet: an added token


def _sentencepiece_text(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode("utf-8")


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    described = _json(file)
    try:
        raw = RawTokenizer.from_str(json.dumps(described))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ModelFileError(f"{file} is no tokenizer: {error}") from error
    raw.no_truncation()
    raw.no_padding()
    settings = _json(path / "tokenizer_config.json", needed=False)
    bos, eos = (_written(settings.get(f"{name}_token")) for name in ("bos", "eos"))
    bos_id = raw.token_to_id(bos)
    template = _template_source(path, settings)
    return Tokenizer(
        raw,
        text_of=_text_of_decoder(described, file),
        eos_token_ids=_eos_token_ids(path, raw.token_to_id(eos)),
        bos_token_id=bos_id,
        add_bos=raw.encode("").ids[:1] == [bos_id],
        chat_template=ChatTemplate(template, bos_token=bos, eos_token=eos, origin=str(path)) if template else None,
    )


def _json(file: Path, *, needed: bool = True) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError as error:
        if not needed:
            return {}
        raise ModelFileError(f"{file} is missing; a model directory needs it") from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {file}: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{file} holds no JSON object")
    return value


def _written(token: str | dict[str, Any] | None) -> str:
    """Files name a special token by its text or by an object around it."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _eos_token_ids(path: Path, eos_id: int | None) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        named = _json(path / name, needed=False).get("eos_token_id")
        if named is not None:
            return named if isinstance(named, list) else [named]
    return [] if eos_id is None else [eos_id]


def _template_source(path: Path, settings: dict[str, Any]) -> str:
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text("utf-8")
    source = settings.get("chat_template") or ""
    if isinstance(source, list):  # several, by name
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), "")
    return str(source)


def _text_of_decoder(described: dict[str, Any], file: Path) -> Callable[[str], bytes]:
    decoder = described.get("decoder") or {}
    kinds = {step.get("type") for step in [decoder, *decoder.get("decoders", [])]}
    if "ByteLevel" in kinds:
        return _byte_level_text
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_text
    raise ModelFileError(f"{file}: decoder {decoder.get('type')!r} is not served; ByteLevel and ByteFallback are")
