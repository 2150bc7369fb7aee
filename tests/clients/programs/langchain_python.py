"""LangChain as a script: what it gets, as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, temperature=0, max_tokens=24, stream_usage=True)
messages = [("system", "You write Python."), ("human", "Write a loop.")]
whole = chat.invoke(messages)
parts = list(chat.stream(messages))
both = chat.batch([messages, messages])
total = parts[0]
for part in parts[1:]:
    total += part
print(
    json.dumps(
        {
            "chat": whole.content,
            "streamed": total.content,
            "usage": total.usage_metadata["output_tokens"],
            "same": all(one.content == whole.content for one in both),
        }
    )
)
