"""Tools and their turns in prompts: by the template where it knows them, else in words."""

from __future__ import annotations

import json

import pytest

from kvrelay.chat_template import ChatTemplate
from kvrelay.errors import InvalidRequestError
from kvrelay.inference import ChatEnd, ChatMessage, ChatPrompt, ToolCall
from kvrelay.tool_prompt import ToolFormat

TOOL = {"type": "function", "function": {"name": "look", "description": "see <there>"}}
TOOLS = json.dumps([TOOL])
TURNS = (
    ChatMessage("developer", "be brief"),
    ChatMessage("user", "what is there?"),
    ChatMessage("assistant", "", (ToolCall("call_1", "look", '{"at": "door"}'),)),
    ChatMessage("tool", "a cat", tool_call_id="call_1", name="look"),
)
PLAIN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
WITH_TOOLS = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<{{ call.id }} {{ call.function.name }} {{ call.function.arguments.at }}>"
    "{% endfor %}"
    "{{ m.tool_call_id }} {{ m.name }}]{% endfor %}{{ mood }}"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="", eos_token="", origin="test")


def test_a_template_that_knows_tools_is_given_them_and_every_key_of_a_turn() -> None:
    text = template(WITH_TOOLS).render(ChatPrompt(TURNS, TOOLS, '{"mood": "!"}'))
    assert text == (
        json.dumps(TOOL)
        + "[system: be brief ][user: what is there? ][assistant: <call_1 look door> ][tool: a catcall_1 look]!"
    )


def test_a_template_that_knows_none_is_told_in_words() -> None:
    text = template(PLAIN).render(ChatPrompt(TURNS, TOOLS))
    assert text.startswith("[system: be brief\n\nYou may call functions.")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert text.endswith(
        '[user: what is there?][assistant: <tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>]'
        "[user: <tool_response>\na cat\n</tool_response>]"
    )


def test_a_developer_is_one_where_the_template_says_so() -> None:
    source = PLAIN + "{# developer #}"
    assert template(source).render(ChatPrompt(TURNS[:1])) == "[developer: be brief]"


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (PLAIN, ToolFormat.HERMES),
        ("{{ tools }} write <tool_call>", ToolFormat.HERMES),
        ('{{ tools }} Respond in the format {"name": function name, "parameters": values}', ToolFormat.LLAMA3),
    ],
)
def test_how_a_model_calls_is_known_by_its_template(source: str, form: ToolFormat) -> None:
    assert template(source).tool_format is form


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (ChatPrompt(TURNS, "{"), "tools '{' is not JSON"),
        (ChatPrompt(TURNS, "{}"), "tools is '{}'; allowed is a JSON array"),
        (ChatPrompt(TURNS, template_kwargs="[]"), "chat_template_kwargs is '\\[\\]'; allowed is a JSON object"),
        (ChatPrompt(TURNS, template_kwargs='{"messages": []}'), "chat_template_kwargs has 'messages'"),
        (ChatPrompt((ChatMessage("assistant", "", (ToolCall("c", "f", "5"),)),)), "arguments of tool call 'c' is '5'"),
        (ChatPrompt(TURNS[:1], end=ChatEnd.LAST_MESSAGE), "shows none of its text"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: ChatPrompt, words: str) -> None:
    source = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}{# tools #}"
    with pytest.raises(InvalidRequestError, match=words):
        template(source).render(prompt)
