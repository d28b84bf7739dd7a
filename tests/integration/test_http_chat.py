"""POST /v1/chat/completions before fake nodes: what comes back, whole and in chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT, byte_ids
from tests.support.http_ends import HELLO, error_of, http_ends

RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT_TOKENS = 3 + len("user\nhello\nassistant\n")


async def test_a_whole_reply() -> None:
    async with http_ends() as ends:
        ends.cluster.decode[0].num_cached_blocks = 1
        reply = await ends.chat(model="bytes")
        assert reply.pop("id").startswith("chatcmpl-")
        assert reply.pop("created") > 1_700_000_000
        assert reply == {
            "object": "chat.completion",
            "model": "bytes",
            "system_fingerprint": "fp_f1f1f1f1f1f1",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": ANSWER_TEXT, "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": NUM_PROMPT_TOKENS,
                "completion_tokens": 45,
                "total_tokens": NUM_PROMPT_TOKENS + 45,
                "prompt_tokens_details": {"cached_tokens": 16},
            },
        }


async def test_a_stream_names_the_role_first_and_the_reason_last() -> None:
    async with http_ends() as ends:
        first, *middle, last = await ends.chat_events()
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in middle] == [None] * len(middle)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == ANSWER_TEXT
        assert last["choices"] == [
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ]
        assert not [chunk for chunk in (first, *middle, last) if "usage" in chunk]
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in (first, *middle, last)}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_is_not_sent_unless_it_is_asked_for(options: Any) -> None:
    async with http_ends() as ends:
        chunks = await ends.chat_events(stream_options=options)
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)


async def test_usage_that_is_asked_for_is_one_more_chunk_without_choices() -> None:
    async with http_ends() as ends:
        *chunks, last = await ends.chat_events(stream_options={"include_usage": True})
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 45
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert last["id"] == chunks[0]["id"]


async def test_continuous_usage_is_in_every_chunk() -> None:
    async with http_ends() as ends:
        chunks = await ends.chat_events(stream_options={"include_usage": True, "continuous_usage_stats": True})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 45
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {NUM_PROMPT_TOKENS}


async def test_stream_options_without_a_stream_are_refused() -> None:
    async with http_ends() as ends:
        reply = await ends.post("/v1/chat/completions", HELLO | {"stream_options": {"include_usage": True}})
        assert (reply.status_code, error_of(reply)["param"]) == (400, "stream_options")


async def test_several_answers_have_each_their_role_text_and_end() -> None:
    async with http_ends() as ends:
        whole = await ends.chat(n=3, seed=5)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in whole["choices"]} == {ANSWER_TEXT}
        assert whole["usage"]["completion_tokens"] == 3 * 45
        assert whole["usage"]["prompt_tokens"] == NUM_PROMPT_TOKENS
        chunks = await ends.chat_events(n=3, seed=5)
        for index in range(3):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(one["delta"].get("content", "") for one in own) == ANSWER_TEXT
            assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["stop"]
            assert own[-1]["finish_reason"] == "stop"


async def test_log_probabilities_are_one_entry_a_token_and_the_same_in_a_stream() -> None:
    async with http_ends() as ends:
        whole = await ends.chat(logprobs=True, top_logprobs=2, max_tokens=3)
        content = whole["choices"][0]["logprobs"]["content"]
        top = {"token": "T", "logprob": -1.0, "bytes": [84]}
        assert content[0] == {**top, "top_logprobs": [top, top]}
        assert [(one["token"], one["logprob"]) for one in content] == [("T", -1.0), ("h", -2.0), ("e", -3.0)]
        chunks = await ends.chat_events(logprobs=True, top_logprobs=2, max_tokens=3)
        streamed = [one["choices"][0]["logprobs"] for one in chunks]
        assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == content
        none_wanted = await ends.chat(logprobs=True, max_tokens=1)
        assert none_wanted["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_a_token_that_ends_the_answer_is_written_as_itself() -> None:
    async with http_ends() as ends:
        whole = await ends.chat(logprobs=True)
        last = whole["choices"][0]["logprobs"]["content"][-1]
        assert (last["token"], last["bytes"]) == ("<|im_end|>", [])
        assert whole["choices"][0]["message"]["content"] == ANSWER_TEXT


async def test_a_stop_string_ends_the_answer_before_it_and_is_named() -> None:
    async with http_ends() as ends:
        choice = (await ends.chat(stop=" 42"))["choices"][0]
        assert choice["message"]["content"] == "The answer is"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " 42")
        shown = (await ends.chat(stop=["zzz", " 42"], include_stop_str_in_output=True))["choices"][0]
        assert shown["message"]["content"] == "The answer is 42"
        chunks = await ends.chat_events(stop=" 42", include_stop_str_in_output=True)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == "The answer is 42"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_either_name_bounds_the_answer(name: str) -> None:
    async with http_ends() as ends:
        body = {key: value for key, value in HELLO.items() if key != "max_tokens"} | {name: 5}
        reply = (await ends.post("/v1/chat/completions", body)).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 5


async def test_every_sampling_field_reaches_the_nodes() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.75,
        "frequency_penalty": -0.5,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 3,
        "ignore_eos": True,
    }
    async with http_ends() as ends:
        await ends.chat(**fields, logit_bias={"65": 5}, stop_token_ids=[70], top_logprobs=4, logprobs=True)
        [request] = ends.cluster.decode[0].requests
        assert {name: getattr(request.sampling, name) for name in fields} == fields
        assert request.sampling.logit_bias == {65: 5.0}
        assert request.sampling.stop_token_ids == (70,)
        assert request.sampling.logprobs == 4


async def test_what_clients_write_out_though_it_asks_for_nothing_is_taken() -> None:
    """Bodies as public bug reports have them."""
    nothing = {
        "stop": None,
        "logit_bias": {},
        "user": "",
        "n": None,
        "seed": None,
        "tools": [],
        "functions": None,
        "response_format": {"type": "text"},
        "metadata": {},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "top_k": -1,
        "modalities": ["text"],
        "guided_json": None,
        "length_penalty": 1.0,
        "skip_special_tokens": True,
        "priority": 0,
    }
    async with http_ends() as ends:
        reply = await ends.chat(**nothing)
        assert reply["choices"][0]["message"]["content"] == ANSWER_TEXT


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}],
         "user\nhel\nlo<|im_end|>\n"),
        ([{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}],
         "system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "refusal": None},
          {"role": "user", "content": "so?"}],
         "user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n"),
    ],
    ids=["parts", "developer", "null"],
)  # fmt: skip
async def test_messages_are_rendered_by_the_template(messages: list[dict[str, Any]], rendered: str) -> None:
    async with http_ends() as ends:
        reply = await ends.post("/tokenize", {"messages": messages})
        expected = await ends.post("/tokenize", {"prompt": f"<|im_start|>{rendered}<|im_start|>assistant\n"})
        assert reply.json()["tokens"] == expected.json()["tokens"]


async def test_the_last_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    async with http_ends() as ends:
        await ends.chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
        [request] = ends.cluster.decode[0].requests
        expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer"
        reply = await ends.post("/detokenize", {"tokens": list(request.token_ids)})
        assert reply.json()["prompt"] == expected.replace("<|im_start|>", "").replace("<|im_end|>", "")


async def test_openais_own_client_reads_answers_whole_and_streamed() -> None:
    messages: Any = HELLO["messages"]
    async with http_ends() as ends:
        whole = await ends.openai.chat.completions.create(
            model="bytes", messages=messages, logprobs=True, top_logprobs=1, extra_body={"top_k": 3, "min_tokens": 2}
        )
        assert whole.choices[0].message.content == ANSWER_TEXT
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.content is not None
        assert len(whole.choices[0].logprobs.content) == len(ANSWER_IDS)
        stream = await ends.openai.chat.completions.create(
            model="bytes", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER_TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(ANSWER_IDS)
        assert [model.id async for model in ends.openai.models.list()] == ["bytes"]


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLING = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'


def tokens_of(text: str) -> list[int]:
    """Of ASCII with line breaks, whose byte is the alphabet's 199th character."""
    return [token_id for char in text for token_id in ((3 + 198,) if char == "\n" else byte_ids(char))]


async def test_a_call_of_a_tool_is_told_as_one_whole_and_streamed() -> None:
    messages: Any = HELLO["messages"]
    tools: Any = [LOOK]
    async with http_ends(blocks=64) as ends:
        for node in ends.cluster.nodes:
            node.answer_ids = (*tokens_of(CALLING), EOS_TOKEN_ID)
        whole = await ends.openai.chat.completions.create(model="bytes", messages=messages, tools=tools)
        choice = whole.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert choice.message.tool_calls is not None
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("look", '{"at": "door"}')
        chunks = await ends.chat_events(tools=tools, tool_choice="auto")
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert {call["index"] for call in calls} == {0}
        assert [call["function"]["name"] for call in calls if "id" in call] == ["look"]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"at": "door"}'
        assert len(calls) > 3, "arguments come as they are generated"
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_conversation_with_calls_and_their_results_goes_on() -> None:
    messages = [
        *HELLO["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a cat"},
    ]  # fmt: skip
    async with http_ends(blocks=64) as ends:
        assert (await ends.chat(messages=messages, tools=[LOOK]))["choices"][0]["message"]["content"] == ANSWER_TEXT
        [request] = ends.cluster.prefill[0].requests
        prompt = (await ends.post("/detokenize", {"tokens": list(request.token_ids)})).json()["prompt"]
        assert json.dumps(LOOK) in prompt
        assert prompt.endswith("user\n<tool_response>\na cat\n</tool_response>\nassistant\n")
