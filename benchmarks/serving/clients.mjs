// The checks of npm's clients; benchmarks/serving/clients.py installs them and runs this beside them.
const url = process.env.CLIENTS_URL, apiKey = process.env.CLIENTS_KEY, model = process.env.CLIENTS_NAME;
const messages = [{ role: "user", content: "1 + 1?" }];

async function check(what, run) {
  let error = null;
  try {
    await run();
  } catch (caught) {
    error = `${caught?.name}: ${caught?.message}`;
  }
  console.log("CHECK " + JSON.stringify({ what, error }));
}

function must(condition, told) {
  if (!condition) throw new Error(JSON.stringify(told ?? "it is not so"));
}

function ours(made) {
  const keys = Object.keys(made).sort().join();
  must(keys === "a,sign" && made.a >= 0 && made.a <= 9 && "+-".includes(made.sign), made);
}

async function checkOpenai() {
  const { default: OpenAI } = await import("openai");
  const { zodResponseFormat, zodTextFormat } = await import("openai/helpers/zod");
  const { z } = await import("zod");
  const client = new OpenAI({ baseURL: url, apiKey, maxRetries: 0 });
  const chat = client.chat.completions;
  const asked = { model, messages, max_tokens: 200, seed: 1 };
  const schema = z.object({ a: z.number().int().min(0).max(9), sign: z.enum(["+", "-"]) });
  const parameters = {
    type: "object", additionalProperties: false, required: ["a", "sign"],
    properties: { a: { type: "integer", minimum: 0, maximum: 9 }, sign: { enum: ["+", "-"] } },
  };
  await check("chat, whole and streamed", async () => {
    const whole = await chat.create(asked);
    let text = "";
    for await (const chunk of await chat.create({ ...asked, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    must(text === whole.choices[0].message.content, text);
  });
  await check("chat.completions.stream", async () => {
    const final = await chat.stream(asked).finalChatCompletion();
    must(final.choices.length === 1);
  });
  await check("chat.completions.parse (zod)", async () => {
    const made = await chat.parse({ ...asked, response_format: zodResponseFormat(schema, "sum") });
    ours(made.choices[0].message.parsed);
  });
  await check("runTools", async () => {
    const called = [];
    const tool = { type: "function", function: {
      name: "add", description: "x", parameters, parse: JSON.parse,
      function: (given) => { called.push(given); return "2"; } } };
    const runner = chat.runTools({ ...asked, tools: [tool],
      tool_choice: { type: "function", function: { name: "add" } } });
    await runner.done();
    must(called.length === 1, called);
    ours(called[0]);
  });
  await check("responses: whole, stream, parse", async () => {
    const short = { model, input: "1 + 1?", max_output_tokens: 200 };
    must((await client.responses.create(short)).output_text.length > 0);
    const final = await client.responses.stream(short).finalResponse();
    must(final.output_text.length > 0);
    const parsed = await client.responses.parse({ ...short, text: { format: zodTextFormat(schema, "sum") } });
    ours(parsed.output_parsed);
  });
  await check("errors as classes", async () => {
    for (const [changed, kind] of [[{ temperature: -1 }, OpenAI.BadRequestError], [{ model: "no" }, OpenAI.NotFoundError]]) {
      const error = await chat.create({ ...asked, ...changed }).then(() => null, (each) => each);
      must(error instanceof kind, String(error));
    }
  });
}

async function checkAi() {
  const ai = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { z } = await import("zod");
  const schema = z.object({ a: z.number().int().min(0).max(9), sign: z.enum(["+", "-"]) });
  const official = createOpenAI({ baseURL: url, apiKey });
  const models = {
    "openai-compatible": createOpenAICompatible({ name: "rllib", baseURL: url, apiKey, includeUsage: true, supportsStructuredOutputs: true })(model),
    "openai, chat": official.chat(model),
    "openai, responses": official.responses(model),
  };
  for (const [name, given] of Object.entries(models)) {
    const asked = { model: given, prompt: "1 + 1?", maxOutputTokens: 1000, maxRetries: 0 };
    await check(`${name}: generateText, streamText`, async () => {
      must((await ai.generateText(asked)).text.length > 0);
      let text = "", failed = null;
      const stream = ai.streamText({ ...asked, onError: ({ error }) => { failed = error; } });
      for await (const part of stream.textStream) text += part;
      if (failed) throw failed;
      must(text.length > 0 && (await stream.usage).outputTokens > 0);
    });
    await check(`${name}: structured output`, async () => {
      if (ai.generateObject) ours((await ai.generateObject({ ...asked, schema })).object);
      if (ai.Output) ours((await ai.generateText({ ...asked, output: ai.Output.object({ schema }) })).output);
    });
    await check(`${name}: toolChoice required`, async () => {
      const called = [];
      const tools = { add: ai.tool({ description: "x", inputSchema: schema, execute: async (each) => { called.push(each); return 2; } }) };
      await ai.generateText({ ...asked, tools, toolChoice: "required" });
      must(called.length > 0, "no call");
      called.forEach(ours);
    });
  }
}

await (process.argv[2].startsWith("openai") ? checkOpenai() : checkAi());
