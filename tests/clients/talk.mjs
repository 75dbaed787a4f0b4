// openai-node and AI SDK, unchanged: `node talk.mjs CLIENT BASE_URL KEY`; see talk.py.
const [name, baseURL, apiKey] = process.argv.slice(2);
const QUESTION = 'What is 1+2?';

const clients = {
  async openai_node() {
    const { default: OpenAI } = await import('openai');
    const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
    const parameters = {
      type: 'object',
      properties: { a: { type: 'integer' }, b: { type: 'integer' } },
      required: ['a', 'b'],
    };
    const add = ({ a, b }) => String(a + b);
    const fn = { name: 'add', description: 'Adds.', parameters, function: add, parse: JSON.parse };
    const ask = () =>
      client.chat.completions.runTools({
        model: 'any',
        messages: [{ role: 'user', content: QUESTION }],
        tools: [{ type: 'function', function: fn }],
      });
    const text = await ask().finalContent();
    await client.models.retrieve('any');
    const overflow = await ask()
      .finalContent()
      .then(() => '', (error) => String(error.code));
    return { text, overflow };
  },

  async ai_sdk() {
    const { generateText, stepCountIs, tool } = await import('ai');
    const { createOpenAI } = await import('@ai-sdk/openai');
    const { z } = await import('zod');
    const add = tool({
      description: 'Adds.',
      inputSchema: z.object({ a: z.number(), b: z.number() }),
      execute: async ({ a, b }) => String(a + b),
    });
    const ask = () =>
      generateText({
        model: createOpenAI({ baseURL, apiKey })('any'),
        prompt: QUESTION,
        tools: { add },
        stopWhen: stepCountIs(3),
        maxRetries: 0,
      });
    const { text } = await ask();
    const overflow = await ask().then(() => '', (error) => String(error.message));
    return { text, overflow };
  },
};

console.log(JSON.stringify(await clients[name]()));
