"""LlamaIndex as a script: what it gets, as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
options = {"api_base": f"{url}/v1", "api_key": "unused", "model": model, "temperature": 0, "max_tokens": 24}
llm = OpenAILike(**options, is_chat_model=True, context_window=2048)
messages = [ChatMessage(role="system", content="You write Python."), ChatMessage(role="user", content="Write a loop.")]
whole = llm.chat(messages)
streamed = "".join(part.delta or "" for part in llm.stream_chat(messages))
plain = OpenAILike(**{**options, "max_tokens": 16}, is_chat_model=False, context_window=2048).complete("import os\n")
print(
    json.dumps(
        {
            "chat": whole.message.content,
            "streamed": streamed,
            "usage": whole.raw.usage.completion_tokens,
            "plain": plain.text,
        }
    )
)
