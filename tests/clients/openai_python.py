"""The openai package: argv has the base URL, the key and the question; prints one JSON object."""

import json
import sys

from openai import OpenAI

base_url, api_key, question = sys.argv[1:]
client = OpenAI(base_url=base_url, api_key=api_key)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": question}]
whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=16)
stream = client.chat.completions.create(
    model=model,
    messages=messages,
    temperature=0,
    max_tokens=16,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "completion_tokens": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
        }
    )
)
