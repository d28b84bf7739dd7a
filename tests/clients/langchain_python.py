"""langchain-openai: argv has the base URL, the key and the question; prints one JSON object."""

import json
import sys

from langchain_openai import ChatOpenAI
from openai import OpenAI

base_url, api_key, question = sys.argv[1:]
model = OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id
chat = ChatOpenAI(base_url=base_url, api_key=api_key, model=model, temperature=0, max_tokens=16, stream_usage=True)
whole = chat.invoke(question)
chunks = list(chat.stream(question))
together = chunks[0]
for chunk in chunks[1:]:
    together += chunk
print(
    json.dumps(
        {
            "whole": whole.content,
            "streamed": together.content,
            "completion_tokens": [one.usage_metadata["output_tokens"] for one in (whole, together)],
        }
    )
)
