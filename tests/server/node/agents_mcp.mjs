// The unmodified @openai/agents with a hosted MCP tool: `node agents_mcp.mjs ws://…/v1/realtime MCP_URL TOKEN APPROVAL`.
import { hostedMcpTool } from '@openai/agents';
import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } from '@openai/agents/realtime';

const [url, serverUrl, token, approval] = process.argv.slice(2);
const headers = { Authorization: `Bearer ${token}` }; // for realtime sessions the package leaves `authorization` out
const requireApproval = approval === 'never' ? 'never' : { always: { toolNames: ['add'] } };
const desk = hostedMcpTool({ serverLabel: 'desk', serverUrl, headers, requireApproval });
const session = new RealtimeSession(new RealtimeAgent({ name: 'guide', instructions: 'Be brief.', tools: [desk] }), {
  transport: new OpenAIRealtimeWebSocket({ url }),
  model: 'gpt-realtime',
});
const seen = { errors: [], tools: [], calls: [], approvals: 0 };
session.on('error', (error) => seen.errors.push(error));
session.on('mcp_tool_call_completed', (context, agent, call) => seen.calls.push(call));
session.on('tool_approval_requested', async (context, agent, request) => {
  seen.approvals += 1;
  await session.approve(request.approvalItem);
});
const listed = new Promise((resolve) => session.on('mcp_tools_changed', (tools) => resolve(tools)));
const answered = new Promise((resolve) => {
  session.on('transport_event', (event) => {
    const text = event.type === 'response.done' && event.response.output.at(-1)?.content?.[0]?.transcript;
    if (text) resolve(text);
  });
});

await session.connect({ apiKey: 'unused' });
seen.tools = (await listed).map((tool) => tool.name).sort();
session.sendMessage('call add {"a": 4, "b": 5}');
seen.answer = await answered;
console.log(JSON.stringify(seen));
session.close();
process.exit(0);
