"""A tokenizer whose tokens are bytes, without a model and without torch: ids 0 to 2 are special, 3 to 258 bytes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_byte_tokenizer(directory: Path, **settings: object) -> Path:
    """Writes tokenizer.json and tokenizer_config.json into `directory` (made if missing) and returns it.

    `settings` are added to those of the config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids[character] = len(ids)
    tokenizer = Tokenizer(BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
