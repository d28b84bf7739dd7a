"""How long prompts may be, of any model and of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvrelay.errors import ConfigError, PromptTooLongError


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """In tokens; 0: what the model takes. What a model has of its own stands in for `of_any`."""

    of_any: int = 0
    by_model: Mapping[str, int] = field(default_factory=dict)

    def of(self, model: str) -> int:
        return self.by_model.get(model, self.of_any)

    def check_models(self, served: Collection[str]) -> None:
        """Raises ConfigError where a model is named that is none of those served."""
        for name in self.by_model:
            if name not in served:
                raise ConfigError(f"{name!r} is no model that is served; {', '.join(map(repr, served))} are")


def check_prompt(num_prompt_tokens: int, model: str, tenant: str, tenants: PromptLimits, ours: PromptLimits) -> None:
    """Raises PromptTooLongError for a prompt of more tokens than the tenant may send, or anyone."""
    for limits, whose in ((tenants, f"tenant {tenant!r} may send"), (ours, "this coordinator takes")):
        if 0 < limits.of(model) < num_prompt_tokens:
            of_model = f" for model {model!r}" if model in limits.by_model else ""
            raise PromptTooLongError(f"the prompt has {num_prompt_tokens} tokens; {whose} {limits.of(model)}{of_model}")


def parse_tokens_by_model(text: str) -> dict[str, int]:
    """Of `NAME=TOKENS` entries with semicolons or line breaks between. Raises ConfigError that says where."""
    tokens: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        name, _, number = (part.strip() for part in entry.rpartition("="))
        if not name or not number.isascii() or not number.isdigit():
            raise ConfigError(f"{entry!r} is no bound; allowed is a model's name, = and a whole number of tokens")
        if name in tokens:
            raise ConfigError(f"{name!r} is named twice")
        tokens[name] = int(number)
    return tokens
