// The unmodified @openai/agents with a function tool, a hosted MCP tool and a tool of the server itself:
// `node agents_tools.mjs ws://…/v1/realtime MCP_URL TOKEN` says what the chat model shall call, and prints what was seen.
import { hostedMcpTool, tool } from '@openai/agents';
import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } from '@openai/agents/realtime';
import { z } from 'zod';

const [url, serverUrl, token] = process.argv.slice(2);
const seen = { errors: [], tools: [], booked: [], hosted: [], answers: [] };
const book = tool({
  name: 'book',
  description: 'Books a table.',
  parameters: z.object({ seats: z.number() }),
  execute: async ({ seats }) => {
    seen.booked.push(seats);
    return 'table nine';
  },
});
const headers = { Authorization: `Bearer ${token}` };
const desk = hostedMcpTool({ serverLabel: 'desk', serverUrl, headers, requireApproval: 'never' });
const session = new RealtimeSession(new RealtimeAgent({ name: 'guide', instructions: 'Be brief.', tools: [book, desk] }), {
  transport: new OpenAIRealtimeWebSocket({ url }),
  model: 'gpt-realtime',
});
let sound = 0;
let onAnswer = () => {};
session.on('error', (error) => seen.errors.push(JSON.stringify(error)));
session.on('mcp_tool_call_completed', (context, agent, call) => seen.hosted.push([call.name, call.output]));
session.on('audio', (event) => (sound += event.data.byteLength));
session.on('transport_event', (event) => {
  if (event.type === 'response.done' && event.response.output.some((item) => item.type === 'message')) onAnswer(event.response);
});
const listed = new Promise((resolve) => session.on('mcp_tools_changed', (tools) => resolve(tools)));

async function ask(text) {
  const answered = new Promise((resolve) => (onAnswer = resolve));
  sound = 0;
  session.sendMessage(text);
  const { status, output } = await answered;
  seen.answers.push({ status, words: output.at(-1).content[0].transcript, sound });
}

await session.connect({ apiKey: 'unused' });
seen.tools = (await listed).map((tool) => tool.name).sort();
await ask('call book {"seats": 3}');
await ask('call add {"a": 4, "b": 5}');
await ask('call calculate {"expression": "6 * 7"}');
await ask('good evening');
process.stdout.write(JSON.stringify(seen), () => process.exit(0));
