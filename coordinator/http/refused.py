"""Fields that OpenAI's and vLLM's clients may send and that are not served. Each is refused by its name, unless it asks
for nothing: as null, or as one of the values in which clients write out that they want the usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` ends the sentence "... is not served: "; `usual` are the values that ask for nothing, beside null."""

    why: str
    usual: tuple[Any, ...] = ()

    def fault(self, value: Any) -> str | None:
        """What is wrong with the value, to stand after the field's name; None where it asks for nothing."""
        if value is None or any(type(value) is type(one) and value == one for one in self.usual):
            return None
        allowed = " or ".join(["null", *(shown(one) for one in self.usual)])
        return f"is {shown(value)}, which is not served: {self.why}; allowed is {allowed}"


def shown(value: Any) -> str:
    """A value as messages show it: as JSON writes it, and not all of it."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


RefusedFields = Mapping[str, Refused]

_TEXT_ONLY = Refused("answers are text")
_NO_REASONING = Refused("reasoning is not told apart from the answer")
_NO_CUT = Refused("no prompt is cut")
_NO_TRANSFER = Refused("nodes hand KV over by themselves")
_NO_MEDIA = Refused("prompts are text")

# Of chat and of completions.
GENERATION: RefusedFields = {
    "allowed_token_ids": Refused("only logit_bias moves what may be drawn", ([],)),
    "bad_words": Refused("only logit_bias moves what may be drawn", ([],)),
    "ec_transfer_params": _NO_TRANSFER,
    "guided_decoding_backend": Refused("there is one backend"),
    "guided_whitespace_pattern": Refused("a schema says nothing of blanks"),
    "kv_transfer_params": _NO_TRANSFER,
    "length_penalty": Refused("there is no beam search", (1.0, 1)),
    "logprob_token_ids": Refused("log-probabilities are those of the likeliest tokens"),
    "prompt_logprobs": Refused("prompts have no log-probabilities"),
    "repetition_detection": Refused("no answer is ended for repeating itself"),
    "return_mm_kwargs": Refused("nothing is rendered for other servers", (True,)),
    "return_token_ids": Refused("replies are text", (False,)),
    "return_token_offsets": Refused("nothing is rendered for other servers", (False,)),
    "routed_experts_prompt_start": Refused("no choice of experts is told", (0,)),
    "skip_special_tokens": Refused("special tokens have no text", (True,)),
    "stream_interval": Refused("each step's tokens are sent at once", (1,)),
    "thinking_token_budget": _NO_REASONING,
    "truncate_prompt_tokens": _NO_CUT,
    "truncation_side": _NO_CUT,
    "use_beam_search": Refused("there is no beam search", (False,)),
    "vllm_xargs": Refused("there are no extensions", ({},)),
    "watermarking": Refused("answers are not watermarked", (False,)),
}

CHAT: RefusedFields = {
    **GENERATION,
    "audio": _TEXT_ONLY,
    "chat_template": Refused("the model's own template is used"),
    "documents": Refused("templates are given messages and tools", ([],)),
    "echo": Refused("the reply is the answer alone", (False,)),
    "function_call": Refused("tool_choice took its place", ("none", "auto")),
    "functions": Refused("tools took its place", ([],)),
    "include_reasoning": Refused("reasoning is not told apart from the answer", (True,)),
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "modalities": Refused("answers are text", (["text"],)),
    "moderation": Refused("nothing is moderated"),
    "prediction": Refused("answers are not guessed ahead"),
    "prompt_cache_options": Refused("prompt_cache_retention and cache_ttl_s say how long blocks are kept"),
    "reasoning_effort": Refused("models are told by chat_template_kwargs how to reason"),
    "return_prompt_text": Refused("the reply is the answer alone", (False,)),
    "store": Refused("no conversation is stored", (False,)),
    "verbosity": Refused("models are told in their messages how much to say", ("medium",)),
    "web_search_options": Refused("nothing is searched for"),
}

COMPLETION: RefusedFields = {
    **GENERATION,
    "best_of": Refused("n answers are computed and n are sent", (1,)),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "suffix": Refused("models continue a prompt", ("",)),
}

RESPONSES: RefusedFields = {
    **GENERATION,
    "access_programs": Refused("there are none"),
    "background": Refused("a response ends with its call, unless keep_s is given", (False,)),
    "background_options": Refused("a response ends with its call, unless keep_s is given"),
    "context_management": Refused("no conversation is stored"),
    "conversation": Refused("no conversation is stored"),
    "image": _NO_MEDIA,
    "max_tool_calls": Refused("no tool is called here"),
    "moderation": Refused("nothing is moderated"),
    "previous_response_id": Refused("no response is stored; send the conversation in input"),
    "prompt": Refused("no prompt is stored"),
    "prompt_cache_options": Refused("prompt_cache_retention and cache_ttl_s say how long blocks are kept"),
    "reasoning": Refused("reasoning is not told apart from the answer", ({},)),
    "store": Refused("no response is stored", (False,)),
    "stream_options": Refused("events come as they are", ({}, {"include_obfuscation": False})),
    "truncation": Refused("no prompt is cut", ("disabled",)),
}

# Of text in a request for a response, and of one item of its input.
RESPONSES_TEXT: RefusedFields = {
    "verbosity": Refused("models are told in their messages how much to say", ("medium",)),
}
RESPONSES_ITEM: RefusedFields = {
    "async": Refused("functions are called in turn", (False,)),
    "caller": Refused("only the model calls functions"),
    "namespace": Refused("functions have names alone"),
    "phase": Refused("templates are given text"),
}

TOKENIZE: RefusedFields = {
    "chat_template": Refused("the model's own template is used"),
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
}

# Of structured_outputs.
STRUCTURED_OUTPUTS: RefusedFields = {
    "backend": Refused("there is one backend"),
    "disable_additional_properties": Refused("the schema itself says which properties there may be", (False,)),
    "disable_any_whitespace": Refused("a schema says nothing of blanks", (False,)),
    "disable_fallback": Refused("there is one backend", (False,)),
    "structural_tag": Refused("the whole answer is held to one thing"),
    "whitespace_pattern": Refused("a schema says nothing of blanks"),
}

# Of one message of a chat.
MESSAGE: RefusedFields = {
    "annotations": Refused("templates are given text", ([],)),
    "audio": Refused("messages are text"),
    "function_call": Refused("tool_calls took its place"),
    "reasoning": Refused("templates are given what was said"),
    "reasoning_content": Refused("templates are given what was said"),
    "refusal": Refused("templates are given what was said", ("",)),
}
