"""POST /v1/completions, /tokenize and /detokenize before fake nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_nodes import ANSWER_TEXT, byte_ids
from tests.support.http_ends import error_of, http_ends


async def test_a_prompt_is_text_or_token_ids_or_a_list_of_either() -> None:
    async with http_ends() as ends:
        for prompt, count in (
            ("abc", 1),
            (list(byte_ids("abc")), 1),
            (["a", "b", "c"], 3),
            ([list(byte_ids("ab")), list(byte_ids("c"))], 2),
            (["a", list(byte_ids("b"))], 2),
        ):
            reply = await ends.complete(prompt=prompt, n=2)
            assert reply["object"] == "text_completion"
            assert [choice["index"] for choice in reply["choices"]] == list(range(2 * count))
            assert {choice["text"] for choice in reply["choices"]} == {ANSWER_TEXT}
            assert {choice["finish_reason"] for choice in reply["choices"]} == {"stop"}
            assert reply["usage"]["completion_tokens"] == 2 * count * 45
        assert reply["usage"]["prompt_tokens"] == 2


async def test_sixteen_tokens_are_generated_unless_the_request_says() -> None:
    async with http_ends() as ends:
        reply = await ends.complete(max_tokens=None)
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 16


async def test_streams_of_several_prompts_have_each_its_text_and_one_end() -> None:
    async with http_ends() as ends:
        *chunks, last = await ends.completion_events(prompt=["a", "b"], n=2, stream_options={"include_usage": True})
        for index in range(4):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(one["text"] for one in own) == ANSWER_TEXT
            assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["stop"]
        assert last["choices"] == []
        assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 180)


async def test_the_prompt_is_echoed_before_the_answer() -> None:
    async with http_ends() as ends:
        whole = await ends.complete(prompt=["ab ", list(byte_ids("cd "))], echo=True)
        assert [choice["text"] for choice in whole["choices"]] == [f"ab {ANSWER_TEXT}", f"cd {ANSWER_TEXT}"]
        chunks = await ends.completion_events(prompt="ab ", echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"ab {ANSWER_TEXT}"
        refused = await ends.post("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 0})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "echo")


async def test_log_probabilities_are_columns_with_offsets_that_rise() -> None:
    async with http_ends() as ends:
        whole = (await ends.complete(logprobs=2, max_tokens=3))["choices"][0]["logprobs"]
        assert whole == {
            "tokens": ["T", "h", "e"],
            "token_logprobs": [-1.0, -2.0, -3.0],
            "top_logprobs": [{"T": -1.0}, {"h": -2.0}, {"e": -3.0}],
            "text_offset": [0, 1, 2],
        }
        chunks = await ends.completion_events(logprobs=2, max_tokens=3)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        for column in whole:
            assert [entry for one in streamed for entry in one[column]] == whole[column]
        by_id = (await ends.complete(logprobs=1, max_tokens=1, return_tokens_as_token_ids=True))["choices"][0]
        assert by_id["logprobs"]["tokens"] == [f"token_id:{byte_ids('T')[0]}"]


async def test_openais_own_client_reads_completions() -> None:
    async with http_ends() as ends:
        whole = await ends.openai.completions.create(model="bytes", prompt="hello", max_tokens=100)
        assert whole.choices[0].text == ANSWER_TEXT
        stream = await ends.openai.completions.create(model="bytes", prompt="hello", max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER_TEXT


async def test_tokens_and_back() -> None:
    async with http_ends() as ends:
        reply = (await ends.post("/tokenize", {"prompt": "ab", "return_token_strs": True})).json()
        ids = list(byte_ids("ab"))
        assert reply == {"count": 2, "max_model_len": 1024, "tokens": ids, "token_strs": ["a", "b"]}
        assert (await ends.post("/detokenize", {"tokens": ids})).json() == {"prompt": "ab"}
        chat = (await ends.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]})).json()
        assert chat["token_strs"] is None
        assert chat["count"] == 3 + len("user\nab\nassistant\n")


BAD_PROMPTS: list[tuple[Any, str | None, str]] = [
    ("", None, "the prompt is empty"),
    ([], "prompt", "allowed are a text, a list of token ids, or a list of either"),
    ([""], None, "the prompt is empty"),
    ([[]], "prompt[0]", "allowed are a text or a list of token ids"),
    ([1, "a"], "prompt[0]", "prompt[0] is 1"),
    (["a", True], "prompt[1]", "prompt[1] is true"),
    ([259], None, "token_ids holds 259"),
    ([-1], None, "token_ids holds -1"),
    (None, "prompt", "prompt is null"),
    (["a"] * 129, "prompt", "prompt has 129 entries; at most 128 are allowed"),
]


async def test_bad_prompts_are_refused_and_nothing_of_a_list_is_left() -> None:
    async with http_ends() as ends:
        for prompt, param, words in BAD_PROMPTS:
            reply = await ends.post("/v1/completions", {"prompt": prompt})
            assert reply.status_code == 400, prompt
            assert error_of(reply)["param"] == param
            assert words in error_of(reply)["message"]
        too_long = await ends.post("/v1/completions", {"prompt": ["a", "x" * 2000]})
        assert (too_long.status_code, error_of(too_long)["code"]) == (400, "context_length_exceeded")
        await ends.cluster.check_idle()


@pytest.mark.parametrize("add", [None, True, False])
async def test_add_special_tokens_says_whether_a_text_gets_a_bos(add: bool | None) -> None:
    async with http_ends() as ends:
        served = ends.cluster.app.door.models.find("")
        served.text.tokenizer.add_bos = True  # as of models that expect one; id 0 here
        reply = await ends.post("/tokenize", {"prompt": "ab", "add_special_tokens": add})
        assert reply.json()["tokens"] == [*([] if add is False else [0]), *byte_ids("ab")]
        await ends.complete(prompt="ab", add_special_tokens=add)
        assert list(ends.cluster.decode[0].requests[0].token_ids) == reply.json()["tokens"]
