// LangChain for JavaScript, by which n8n's nodes of language models ask:
// node langchain_js.mjs URL KEY MODEL
import assert from "node:assert";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const [url, apiKey, model] = process.argv.slice(2);
const weather = tool(({ city }) => `sunny in ${city}`, {
  name: "weather",
  description: "The weather of a city.",
  schema: z.object({ city: z.enum(["Paris", "Rome"]) }),
});
const question = "What is the weather in Paris?";

// Chat completions, and the Responses API, which n8n's chat node asks.
for (const useResponsesApi of [false, true]) {
  const chat = new ChatOpenAI({
    model, apiKey, useResponsesApi, temperature: 0, maxTokens: 64, maxRetries: 0,
    configuration: { baseURL: `${url}/v1` },
  });
  const said = await chat.invoke(question);
  assert(said.text);
  let streamed = "";
  for await (const chunk of await chat.stream(question)) streamed += chunk.text;
  assert.equal(streamed, said.text);

  // By its name: of "any" the package sends nothing to the Responses API.
  const called = await chat.bindTools([weather], { tool_choice: "weather" }).invoke(question);
  assert.equal(called.tool_calls[0].name, "weather");
  const answered = await weather.invoke(called.tool_calls[0]);
  assert((await chat.invoke([["user", question], called, answered])).text);
}
console.log("went through");
