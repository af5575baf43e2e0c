// The unmodified `openai` against a server: `node openai_turn.mjs https://…/v1` prints what it saw of one text turn.
import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';

const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'unused' });
const realtime = new OpenAIRealtimeWS({ model: 'gpt-realtime' }, client);
const seen = {};
realtime.on('error', (error) => {
  console.error(error);
  process.exit(1);
});
realtime.on('session.created', (event) => {
  seen.created = event.type;
  realtime.send({ type: 'session.update', session: { type: 'realtime', output_modalities: ['text'] } });
  const content = [{ type: 'input_text', text: 'good evening' }];
  realtime.send({ type: 'conversation.item.create', item: { type: 'message', role: 'user', content } });
  realtime.send({ type: 'response.create' });
});
realtime.on('response.output_text.done', (event) => {
  seen.text = event.text;
});
realtime.on('response.done', (event) => {
  seen.status = event.response.status;
  console.log(JSON.stringify(seen));
  realtime.close();
});
