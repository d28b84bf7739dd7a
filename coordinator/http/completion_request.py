"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from coordinator.http.errors import FieldError
from coordinator.http.generation import ChoicesFields
from coordinator.http.refused import COMPLETION, RefusedFields, shown
from kvrelay.inference import TextPrompt, TokenPrompt

MAX_PROMPTS = 128
MAX_TOKEN_ID = 2**32 - 1  # of any vocabulary, as in inference.proto
DEFAULT_MAX_TOKENS = 16  # OpenAI's, of this endpoint
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(ChoicesFields):
    refused: ClassVar[RefusedFields] = COMPLETION

    # Checked here, not by a union: that would go through a long list of ids once for each kind.
    prompt: Annotated[Any, WithJsonSchema(_PROMPTS)]
    echo: bool | None = None
    logprobs: int | None = Field(None, description="0 to 20.")

    def prompts(self) -> list[TextPrompt | TokenPrompt]:
        """Raises FieldError."""
        value = self.prompt
        if isinstance(value, str) or _is_token_ids(value):
            return [self._one(value, "prompt")]
        if not isinstance(value, list) or not value:
            raise FieldError(
                f"prompt is {shown(value)}; allowed are a text, a list of token ids, or a list of either", "prompt"
            )
        if len(value) > MAX_PROMPTS:
            raise FieldError(f"prompt has {len(value)} entries; at most {MAX_PROMPTS} are allowed", "prompt")
        return [self._one(one, f"prompt[{index}]") for index, one in enumerate(value)]

    def check_echo(self) -> None:
        """Raises FieldError."""
        if self.echo and self.logprobs is not None:
            raise FieldError("echo and logprobs are both given, but prompts have no log-probabilities here", "echo")

    @property
    def most_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def _one(self, value: Any, where: str) -> TextPrompt | TokenPrompt:
        if isinstance(value, str):
            return TextPrompt(value, add_bos=self.add_special_tokens is not False)
        if _is_token_ids(value):
            if (largest := max(value)) > MAX_TOKEN_ID:
                raise FieldError(f"{where} holds {shown(largest)}; allowed are at most {MAX_TOKEN_ID}", where)
            return TokenPrompt(tuple(value))
        raise FieldError(f"{where} is {shown(value)}; allowed are a text or a list of token ids", where)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}
