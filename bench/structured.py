"""What holding an answer to something costs: python -m bench.structured MODEL

For some structures and the vocabulary of MODEL: compiling one, and then the mask of each token of an answer drawn at
random among those allowed. Beside llguidance, which kvrelay uses, xgrammar where it is installed. Times are of one
thread's processor, so that other work on the machine counts less.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvrelay.grammars import Grammars
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.tokenizer import Tokenizer, load_tokenizer

ROUNDS, MAX_TOKENS = 5, 200


def schema(**described: Any) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, json.dumps(described))


PERSON = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/N"}}}
STRUCTURES = {
    "three fields": schema(type="object", properties=PERSON, required=list(PERSON), additionalProperties=False),
    "100 fields": schema(
        type="object",
        properties={f"field_{number}": {"type": ["string", "number"]} for number in range(100)},
        required=[f"field_{number}" for number in range(100)],
        additionalProperties=False,
    ),
    "a schema in itself": schema(**{"$defs": {"N": NODE}, "$ref": "#/$defs/N"}),
    "any JSON object": schema(type="object"),
    "regex": StructuredOutput(
        StructureKind.REGEX, r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[a-z0-9._]{1,32}@[a-z]{1,20}\.(com|org)"
    ),
}


@dataclass(frozen=True, slots=True)
class Following:
    """One answer, as a library follows it."""

    mask: Callable[[], bytes]
    take: Callable[[int], object]


def of_llguidance(tokenizer: Tokenizer) -> Callable[[StructuredOutput], Following]:
    grammars = Grammars(tokenizer, tokenizer.eos_token_ids, num_kept=0)

    def follow(structured: StructuredOutput) -> Following:
        matcher = grammars.matcher(structured)
        return Following(matcher.mask, lambda token_id: matcher.advance((token_id,)))

    return follow


def of_xgrammar(tokenizer: Tokenizer) -> Callable[[StructuredOutput], Following]:
    xgrammar = importlib.import_module("xgrammar")
    texts = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    info = xgrammar.TokenizerInfo(texts, stop_token_ids=list(tokenizer.eos_token_ids))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def follow(structured: StructuredOutput) -> Following:
        if structured.kind is StructureKind.REGEX:
            compiled = compiler.compile_regex(structured.text)
        else:
            compiled = compiler.compile_json_schema(structured.text, strict_mode=False, max_whitespace_cnt=40)
        matcher = xgrammar.GrammarMatcher(compiled)
        bits = np.full((1, -(-tokenizer.vocab_size // 32)), -1, dtype=np.int32)

        def mask() -> bytes:
            matcher.fill_next_token_bitmask(bits)
            return bits.tobytes()

        return Following(mask, matcher.accept_token)

    return follow


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Its result, and the milliseconds that it took."""
    began = time.thread_time()
    result = run()
    return result, (time.thread_time() - began) * 1e3


def measure(follow: Callable[[StructuredOutput], Following], structured: StructuredOutput, eos: int) -> str:
    compiled = [timed(lambda: follow(structured)) for _ in range(ROUNDS)]
    following, draw, steps = compiled[-1][0], random.Random(1), []
    for _ in range(MAX_TOKENS):
        mask, mask_ms = timed(following.mask)
        choices = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        token_id = int(choices[draw.randrange(len(choices))])
        if token_id == eos:
            break
        _, take_ms = timed(lambda token_id=token_id: following.take(token_id))  # type: ignore[misc]
        steps.append(mask_ms + take_ms)
    compile_ms = statistics.median(ms for _, ms in compiled)
    return f"{compile_ms:8.1f} {statistics.mean(steps):8.3f} {max(steps):8.2f} {len(steps):6d}"


def main() -> None:
    tokenizer = load_tokenizer(Path(sys.argv[1]))
    libraries = {"llguidance": of_llguidance(tokenizer)}
    if importlib.util.find_spec("xgrammar") is not None:
        libraries["xgrammar"] = of_xgrammar(tokenizer)
    print(f"{'':20} {'':10} compile   a token, mean and worst (ms)  tokens")
    for name, structured in STRUCTURES.items():
        for library, follow in libraries.items():
            print(f"{name:20} {library:10} {measure(follow, structured, tokenizer.eos_token_ids[0])}", flush=True)


if __name__ == "__main__":
    main()
