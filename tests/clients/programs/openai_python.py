"""The openai SDK, as a script: what it gets, as JSON."""

import json
import sys

from openai import OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
messages = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "Write a loop."}]
whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=24, logprobs=True)
stream = client.chat.completions.create(
    model=model, messages=messages, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
plain = client.completions.create(model=model, prompt="import os\n", temperature=0, max_tokens=16)
print(
    json.dumps(
        {
            "models": [item.id for item in client.models.list()],
            "chat": whole.choices[0].message.content,
            "logprobs": len(whole.choices[0].logprobs.content),
            "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
            "usage": chunks[-1].usage.completion_tokens,
            "plain": plain.choices[0].text,
        }
    )
)
