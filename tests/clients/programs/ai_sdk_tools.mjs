// The AI SDK with tools and objects over each of its providers, as a script: what it gets, as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "unused" };
const openai = createOpenAI(options);
const providers = {
  compatible: createOpenAICompatible({ name: "baton", ...options, supportsStructuredOutputs: true })(name),
  chat: openai.chat(name),
  responses: openai.responses(name),
  anthropic: createAnthropic(options)(name),
};
const inputSchema = z.object({ city: z.string() });
const found = {};
for (const [kind, model] of Object.entries(providers)) {
  const calls = [];
  const look = (key, result) => tool({ inputSchema, execute: async (input) => (calls.push([key, input]), result) });
  const tools = { get_weather: look("get_weather", "rain"), get_time: look("get_time", "noon") };
  const more = { model, tools, maxOutputTokens: 64, maxRetries: 0, stopWhen: stepCountIs(3) };
  const messages = [{ role: "user", content: "What is the weather in Cologne?" }];
  const first = await generateText({ ...more, messages });
  messages.push(...first.response.messages, { role: "user", content: "What time is it in Oslo?" });
  const second = streamText({ ...more, messages });
  let text = "";
  for await (const part of second.textStream) text += part;
  const schema = z.object({ city: z.enum(["Cologne", "Oslo"]), days: z.number().int().min(1).max(7) });
  const object = (await generateText({
    model, prompt: "Find Cologne.", maxOutputTokens: 64, maxRetries: 0, output: Output.object({ schema }),
  })).output;
  found[kind] = { calls, texts: [first.text, text], object };
}
console.log(JSON.stringify(found));
