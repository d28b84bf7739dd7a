"""docs/compatibility.md tells of every field what the code does with it, and knows all that clients may send."""

from __future__ import annotations

import re
from pathlib import Path

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from coordinator.http.chat_request import ChatRequest
from coordinator.http.completion_request import CompletionRequest
from coordinator.http.generation import LABELS, GenerationFields
from coordinator.http.responses_request import ResponsesRequest

KINDS: tuple[type[GenerationFields], ...] = (ChatRequest, CompletionRequest, ResponsesRequest)
TEXT = (Path(__file__).resolve().parents[2] / "docs/compatibility.md").read_text("utf-8")
ROWS = {
    name: states for name, *states in re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|", TEXT, flags=re.MULTILINE)
}

# Of vllm/entrypoints/openai, beside those of OpenAI's.
VLLM = """
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs
continue_final_message documents echo ec_transfer_params guided_choice guided_decoding_backend guided_grammar
guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning include_stop_str_in_output
kv_transfer_params length_penalty logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs priority
prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id return_mm_kwargs return_prompt_text
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id
skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""


def what_is_done(kind: type[GenerationFields], name: str) -> str:
    if name in kind.refused:
        return "no"
    if name not in kind.model_fields:
        return "-"
    return "label" if name in LABELS else "yes"


def test_the_table_says_what_the_code_does() -> None:
    known = {name for kind in KINDS for name in (*kind.model_fields, *kind.refused)}
    assert {name: [what_is_done(kind, name) for kind in KINDS] for name in known} == ROWS


def test_no_field_is_both_served_and_refused() -> None:
    for kind in KINDS:
        assert not kind.model_fields.keys() & kind.refused.keys()


def test_every_field_of_openais_client_and_of_vllm_is_in_the_table() -> None:
    for place, params in enumerate((chat_params, completion_params, response_params)):
        base = getattr(params, "CompletionCreateParamsBase", None) or params.ResponseCreateParamsBase
        names = {*base.__annotations__, "stream"}
        assert len(names) > 15
        assert [name for name in names if ROWS.get(name, ["-"] * 3)[place] == "-"] == []
    assert [name for name in re.findall(r"\w+", VLLM) if name not in ROWS] == []
