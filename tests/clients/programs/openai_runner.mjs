// The tool runner of OpenAI's package of npm, as a script: the calls and texts of two turns, as JSON.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const calls = [];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = (name, result) => ({
  type: "function",
  function: { name, parameters, parse: JSON.parse, function: (input) => (calls.push([name, input]), result) },
});
const tools = [tool("get_weather", "rain"), tool("get_time", "noon")];
let messages = [];
const texts = [];
for (const stream of [false, true]) {
  messages.push({ role: "user", content: stream ? "What time is it in Oslo?" : "What is the weather in Cologne?" });
  const runner = client.chat.completions.runTools({ model, messages, tools, stream });
  texts.push(await runner.finalContent());
  messages = [...runner.messages];
}
console.log(JSON.stringify({ calls, texts }));
