"""litellm as a script: what it gets, as JSON."""

import json
import sys

import litellm

url, model = sys.argv[1:]
messages = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "Write a loop."}]
options = {
    "model": f"hosted_vllm/{model}",
    "api_base": f"{url}/v1",
    "messages": messages,
    "temperature": 0,
    "max_tokens": 24,
}
whole = litellm.completion(**options)
chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
print(
    json.dumps(
        {
            "chat": whole.choices[0].message.content,
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "usage": next(c.usage.completion_tokens for c in reversed(chunks) if getattr(c, "usage", None)),
        }
    )
)
