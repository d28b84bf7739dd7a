"""docs/compatibility.md tells of every field what the code does with it, and knows all that clients may send."""

from __future__ import annotations

import re
from pathlib import Path

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from coordinator.http.chat_request import ChatRequest
from coordinator.http.completion_request import CompletionRequest
from coordinator.http.generation import LABELS, GenerationFields

TEXT = (Path(__file__).resolve().parents[2] / "docs/compatibility.md").read_text("utf-8")
ROWS = {
    name: (chat, completions)
    for name, chat, completions in re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|", TEXT, flags=re.MULTILINE)
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
    known = {
        *ChatRequest.model_fields,
        *CompletionRequest.model_fields,
        *ChatRequest.refused,
        *CompletionRequest.refused,
    }
    assert {name: (what_is_done(ChatRequest, name), what_is_done(CompletionRequest, name)) for name in known} == ROWS


def test_no_field_is_both_served_and_refused() -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert not kind.model_fields.keys() & kind.refused.keys()


def test_every_field_of_openais_client_and_of_vllm_is_in_the_table() -> None:
    chat = {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"}
    completions = {*completion_params.CompletionCreateParamsBase.__annotations__, "stream"}
    assert len(chat) > 30
    assert [name for name in chat if ROWS.get(name, ("-",))[0] == "-"] == []
    assert [name for name in completions if ROWS.get(name, ("-", "-"))[1] == "-"] == []
    assert [name for name in re.findall(r"\w+", VLLM) if name not in ROWS] == []
