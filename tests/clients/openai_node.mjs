// The openai package of npm: argv has the base URL, the key and the question; prints one JSON object.
import OpenAI from "openai";

const [baseURL, apiKey, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey });
const model = (await client.models.list()).data[0].id;
const asked = { model, messages: [{ role: "user", content: question }], temperature: 0, max_tokens: 16 };
const whole = await client.chat.completions.create(asked);
const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
let streamed = "";
let usage;
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    completion_tokens: [whole.usage.completion_tokens, usage.completion_tokens],
  }),
);
