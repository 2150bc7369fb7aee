// The openai package of npm, as a script: what it gets, as JSON.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "system", content: "You write Python." }, { role: "user", content: "Write a loop." }];
const options = { model, messages, temperature: 0, max_tokens: 24 };
const whole = await client.chat.completions.create({ ...options, logprobs: true });
let streamed = "", usage = 0;
for await (const chunk of await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage?.completion_tokens ?? usage;
}
const plain = await client.completions.create({ model, prompt: "import os\n", temperature: 0, max_tokens: 16 });
const models = (await client.models.list()).data.map((item) => item.id);
console.log(JSON.stringify({
  models, chat: whole.choices[0].message.content, logprobs: whole.choices[0].logprobs.content.length, streamed, usage,
  plain: plain.choices[0].text,
}));
