// The AI SDK with its provider for OpenAI-compatible servers, as a script: what it gets, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "baton", baseURL: `${url}/v1`, apiKey: "unused", includeUsage: true });
const options = {
  model: provider(name), system: "You write Python.", prompt: "Write a loop.", temperature: 0, maxOutputTokens: 24, maxRetries: 0,
};
const whole = await generateText(options);
const stream = streamText(options);
let streamed = "";
for await (const part of stream.textStream) streamed += part;
const usage = (await stream.usage).outputTokens;
console.log(JSON.stringify({ chat: whole.text, streamed, usage }));
