// The Vercel AI SDK, unmodified: node ai_sdk.mjs FOLDER PROVIDER TASK URL, where FOLDER holds its node_modules.
// Prints one JSON object with what came of the task. PROVIDER and TASK are keys of the tables below.
//
// TASK replay: URL is a file with one JSON object a line, {body, content_type}: answers that were recorded. Each
// is handed to the provider as if a server had sent it; prints the errors by line number.

import { createRequire } from 'node:module';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';

globalThis.AI_SDK_LOG_WARNINGS = false;
const [folder, provider, task, url] = process.argv.slice(2);
const require = createRequire(join(folder, 'package.json'));
const { generateText, generateObject, stepCountIs, streamText, tool } = require('ai');
const { z } = require('zod');

function model(kind, options) {
  const made = { apiKey: 'unused', ...options };
  const { createOpenAI } = require('@ai-sdk/openai');
  switch (kind) {
    case 'responses': return createOpenAI(made).responses('demo');
    case 'chat': return createOpenAI(made).chat('demo');
    case 'completion': return createOpenAI(made).completion('demo');
    case 'anthropic': return require('@ai-sdk/anthropic').createAnthropic(made)('demo');
    case 'compatible':
      return require('@ai-sdk/openai-compatible').createOpenAICompatible({ name: 'chorale', includeUsage: true, ...made })('demo');
    case 'open-responses': {
      const { baseURL, ...rest } = made;
      return require('@ai-sdk/open-responses').createOpenResponses({
        name: 'chorale', url: `${baseURL}/responses`, ...rest,
      })('demo');
    }
    default: throw new Error(`no provider ${kind}`);
  }
}

// What each provider is asked so that the thoughts are part of the answer.
const thoughts = {
  responses: { openai: { reasoningSummary: 'auto', forceReasoning: true } },
  anthropic: { anthropic: { thinking: { type: 'enabled', budgetTokens: 4096 } } },
};
const weather = tool({
  description: 'The weather of a city.',
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `It rains in ${city}.`,
});
const person = z.object({ name: z.string(), age: z.number() });

const tasks = {
  async text(options) {
    const { text, reasoningText, finishReason, usage } = await generateText(options);
    return { text, reasoning: reasoningText, finishReason, usage };
  },
  async stream(options) {
    const errors = [];
    const result = streamText({ ...options, onError: ({ error }) => errors.push(String(error)) });
    let text = '';
    for await (const piece of result.textStream) text += piece;
    const reasoning = await result.reasoningText;
    return { text, reasoning, finishReason: await result.finishReason, usage: await result.usage, errors };
  },
  async tools(options) {
    const { text, steps } = await generateText({ ...options, tools: { weather }, stopWhen: stepCountIs(3) });
    return { text, calls: steps.flatMap((step) => step.toolCalls.map((call) => call.input)) };
  },
  async toolstream(options) {
    const result = streamText({ ...options, tools: { weather }, stopWhen: stepCountIs(3) });
    let text = '';
    for await (const piece of result.textStream) text += piece;
    return { text, calls: (await result.steps).flatMap((step) => step.toolCalls.map((call) => call.input)) };
  },
  async object(options) {
    const { object } = await generateObject({ ...options, schema: person });
    return { object };
  },
};

async function ask() {
  const prompts = { object: 'Ada is 36 years old.', tools: 'How is the weather in Paris?' };
  prompts.toolstream = prompts.tools;
  const prompt = prompts[task] ?? 'What is 17 + 25?';
  const options = { model: model(provider, { baseURL: url }), prompt, maxRetries: 0 };
  return tasks[task]({ ...options, maxOutputTokens: 8192, providerOptions: thoughts[provider] });
}

async function replay() {
  const errors = {};
  const lines = readFileSync(url, 'utf8').trim().split('\n');
  for (const [number, line] of lines.entries()) {
    const { body, content_type } = JSON.parse(line);
    const answer = () => new Response(body, { status: 200, headers: { 'content-type': content_type } });
    const made = model(provider, { baseURL: 'http://unused/v1', fetch: async () => answer() });
    const prompt = [{ role: 'user', content: [{ type: 'text', text: 'hi' }] }];
    try {
      if (!content_type.startsWith('text/event-stream')) await made.doGenerate({ prompt });
      else {
        const { stream } = await made.doStream({ prompt });
        for await (const part of stream) if (part.type === 'error') throw part.error;
      }
    } catch (error) {
      errors[number] = `${error?.message ?? JSON.stringify(error)} ${error?.cause ?? ''}`.slice(0, 1000);
    }
  }
  return { checked: lines.length, errors };
}

const found = task === 'replay' ? await replay() : await ask();
console.log(JSON.stringify(found));
