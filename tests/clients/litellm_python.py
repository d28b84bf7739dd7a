"""litellm: argv has the base URL, the key and the question; prints one JSON object."""

import json
import sys

import litellm
from openai import OpenAI

base_url, api_key, question = sys.argv[1:]
model = OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id
asked = {
    "model": f"openai/{model}",
    "api_base": base_url,
    "api_key": api_key,
    "messages": [{"role": "user", "content": question}],
    "temperature": 0,
    "max_tokens": 16,
}
whole = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
used = [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)]
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "completion_tokens": [whole.usage.completion_tokens, used[-1]],
        }
    )
)
