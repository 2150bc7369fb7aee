// The tool runner of Anthropic's package of npm, as a script: the calls and texts of two turns, as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const calls = [];
const inputSchema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = (name, result) => betaTool({
  name, description: "Look it up.", inputSchema, run: (input) => (calls.push([name, input]), result),
});
const tools = [tool("get_weather", "rain"), tool("get_time", "noon")];
const messages = [], texts = [];
for (const stream of [false, true]) {
  messages.push({ role: "user", content: stream ? "What time is it in Oslo?" : "What is the weather in Cologne?" });
  const runner = client.beta.messages.toolRunner({ model, max_tokens: 64, messages: [...messages], tools, stream });
  const last = await runner.runUntilDone();
  texts.push(last.content.map((block) => block.text ?? "").join(""));
  messages.push({ role: "assistant", content: last.content });
}
console.log(JSON.stringify({ calls, texts }));
