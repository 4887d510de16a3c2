// The TypeScript SDKs of OpenAI and Anthropic, unmodified: node sdks.mjs FOLDER CLIENT URL, where FOLDER holds
// their node_modules and CLIENT is a key of the table below. Prints one JSON object.

import { createRequire } from 'node:module';
import { join } from 'node:path';

const [folder, client, url] = process.argv.slice(2);
const require = createRequire(join(folder, 'package.json'));
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const user = [{ role: 'user', content: 'What is 17 + 25?' }];
const base = { model: 'demo' };

function openai() {
  const { OpenAI } = require('openai');
  return new OpenAI({ apiKey: 'unused', baseURL: url, maxRetries: 0 });
}

function anthropic() {
  const { Anthropic } = require('@anthropic-ai/sdk');
  return new Anthropic({ apiKey: 'unused', baseURL: url.replace(/\/v1$/, ''), maxRetries: 0 });
}

const clients = {
  async chat() {
    const runner = openai().chat.completions.stream({ ...base, messages: user });
    const streamed = await runner.finalContent();
    const body = await openai().chat.completions.create({ ...base, messages: user });
    return { streamed, body: body.choices[0].message.content };
  },
  async chattools() {
    const run = ({ city }) => `It rains in ${city}.`;
    const weather = { type: 'function', function: { name: 'weather', parse: JSON.parse, parameters, function: run } };
    const runner = openai().chat.completions.runTools({ ...base, messages: user, tools: [weather] });
    return { body: await runner.finalContent() };
  },
  async responses() {
    const stream = openai().responses.stream({ ...base, input: 'What is 17 + 25?' });
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    const streamed = (await stream.finalResponse()).output_text;
    const body = await openai().responses.create({ ...base, input: 'What is 17 + 25?' });
    return { streamed, body: body.output_text, kinds: [...kinds] };
  },
  async messages() {
    const ask = { ...base, max_tokens: 8192, messages: user };
    const stream = anthropic().messages.stream(ask);
    const streamed = await stream.finalText();
    const body = await anthropic().messages.create(ask);
    return { streamed, body: body.content[0].text, block: body.content[0] };
  },
  async messagestools() {
    const tools = [{ name: 'weather', input_schema: parameters }];
    const stream = anthropic().messages.stream({ ...base, max_tokens: 8192, messages: user, tools });
    const { content } = await stream.finalMessage();
    const call = content.find((block) => block.type === 'tool_use');
    return { input: call.input };
  },
};

console.log(JSON.stringify(await clients[client]()));
