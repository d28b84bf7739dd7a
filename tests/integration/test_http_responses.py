"""POST /v1/responses before fake nodes."""

from __future__ import annotations

import json
from typing import Any

from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.fake_nodes import ANSWER_TEXT, byte_ids
from tests.support.http_ends import error_of, http_ends

CALLING = '<tool_call>{"name": "look", "arguments": {"at": "door"}}</tool_call>'
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": None}


async def test_a_whole_response_has_what_was_asked_and_one_message() -> None:
    async with http_ends(blocks=64) as ends:
        reply = (await ends.post("/v1/responses", {"input": "hello", "max_output_tokens": 100})).json()
        assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "bytes")
        assert (reply["max_output_tokens"], reply["temperature"], reply["store"]) == (100, 1.0, False)
        [item] = reply["output"]
        assert item.pop("id").startswith("msg_")
        assert item == {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": ANSWER_TEXT, "annotations": [], "logprobs": []}],
        }
        assert reply["usage"] == {
            "input_tokens": 24,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 45,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 69,
        }
        cut = (await ends.post("/v1/responses", {"input": "hello", "max_output_tokens": 3})).json()
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_a_stream_tells_each_step_in_order_and_ends_with_the_whole() -> None:
    async with http_ends(blocks=64) as ends:
        body = {"input": "hello", "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        reply = await ends.post("/v1/responses", body)
        events = []
        for block in reply.text.removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        kinds = [event["type"].removeprefix("response.") for event in events]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert kinds == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *["output_text.delta"] * len(deltas),
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert "".join(event["delta"] for event in deltas) == ANSWER_TEXT
        assert events[-5]["type"] == "response.output_text.delta"
        [item] = events[-1]["response"]["output"]
        assert item["content"][0]["text"] == ANSWER_TEXT
        assert item["content"][0]["logprobs"][0]["token"] == "T"
        assert len(item["content"][0]["logprobs"]) >= len(ANSWER_TEXT)


async def test_openais_own_client_reads_responses_and_their_streams() -> None:
    items: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hel"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "yes?", "annotations": []}]},
        {"role": "user", "content": "lo"},
    ]  # fmt: skip
    async with http_ends(blocks=64) as ends:
        whole = await ends.openai.responses.create(model="bytes", input=items, instructions="think")
        assert whole.output_text == ANSWER_TEXT
        [request] = ends.cluster.prefill[0].requests
        prompt = (await ends.post("/detokenize", {"tokens": list(request.token_ids)})).json()
        assert prompt["prompt"] == "system\nthink\nsystem\nbe brief\nuser\nhel\nassistant\nyes?\nuser\nlo\nassistant\n"
        async with ends.openai.responses.stream(model="bytes", input="hello") as stream:
            assert (await stream.get_final_response()).output_text == ANSWER_TEXT


async def test_a_function_is_called_and_its_result_goes_back() -> None:
    async with http_ends(blocks=64) as ends:
        for node in ends.cluster.nodes:
            node.answer_ids = (*byte_ids(CALLING), EOS_TOKEN_ID)
        tools: Any = [LOOK]
        whole = await ends.openai.responses.create(model="bytes", input="hello", tools=tools)
        [call] = whole.output
        assert call.type == "function_call"
        assert (call.name, call.arguments, call.status) == ("look", '{"at": "door"}', "completed")
        items: Any = [
            {"role": "user", "content": "hello"},
            call,
            {"type": "function_call_output", "call_id": call.call_id, "output": "a cat"},
        ]
        async with ends.openai.responses.stream(model="bytes", input=items) as stream:
            kinds = {event.type async for event in stream}
        assert "response.function_call_arguments.delta" not in kinds, "no tools, so the text is text"
        [_, request] = ends.cluster.prefill[0].requests
        prompt = (await ends.post("/detokenize", {"tokens": list(request.token_ids)})).json()["prompt"]
        assert '{"name": "look", "arguments": {"at": "door"}}' in prompt
        assert "<tool_response>\na cat\n</tool_response>" in prompt


CALLED = {"tools": [LOOK], "tool_choice": "required"}


async def test_what_a_response_cannot_be_is_refused_by_name() -> None:
    async with http_ends() as ends:
        for fields, param in (
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"store": True}, "store"),
            ({"background": True}, "background"),
            ({"n": 2}, "n"),
            ({"input": []}, "input"),
            ({"input": [{"type": "reasoning"}]}, "input[0].type"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
            ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"text": {"verbosity": "high"}}, "text.verbosity"),
            ({**CALLED, "text": {"format": {"type": "json_object"}}}, "tool_choice"),
            ({**CALLED, "guided_regex": "a+"}, "tool_choice"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"max_output_tokens": 0}, None),
        ):
            reply = await ends.post("/v1/responses", {"input": "hello", **fields})
            assert (reply.status_code, error_of(reply)["param"]) == (400, param), reply.text
