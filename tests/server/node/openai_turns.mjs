// The unmodified `openai` against a server: `node openai_turns.mjs https://…/v1 SCENARIO` prints one JSON value.
import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';

const [baseURL, scenario] = process.argv.slice(2);
const RATE = 24000;
const client = new OpenAI({ baseURL, apiKey: 'unused' });
const recovery = scenario === 'reconnect' ? { reconnect: true, reconnectInitialDelay: 10 } : {};
const realtime = new OpenAIRealtimeWS({ model: 'gpt-realtime', ...recovery }, client);
realtime.on('error', (error) => {
  console.error(error);
  process.exit(1);
});

const until = (type) => new Promise((resolve) => realtime.once(type, resolve));

function say(text) {
  const content = [{ type: 'input_text', text }];
  realtime.send({ type: 'conversation.item.create', item: { type: 'message', role: 'user', content } });
  realtime.send({ type: 'response.create' });
}

function write() {
  realtime.send({ type: 'session.update', session: { type: 'realtime', output_modalities: ['text'] } });
}

function tone(frequency, seconds) {
  const samples = Int16Array.from({ length: seconds * RATE }, (_, i) => 9830 * Math.sin((2 * Math.PI * frequency * i) / RATE));
  return Buffer.from(samples.buffer).toString('base64');
}

const scenarios = {
  async text() {
    write();
    const [text, done] = [until('response.output_text.done'), until('response.done')];
    say('good evening');
    return { text: (await text).text, status: (await done).response.status };
  },
  async tool() {
    const tools = [{ type: 'function', name: 'weather', description: 'Tells it.', parameters: { type: 'object' } }];
    realtime.send({ type: 'session.update', session: { type: 'realtime', output_modalities: ['text'], tools } });
    let done = until('response.done');
    say('the weather, please');
    const call = (await done).response.output[0];
    done = until('response.output_text.done');
    const item = { type: 'function_call_output', call_id: call.call_id, output: 'sunny' };
    realtime.send({ type: 'conversation.item.create', item });
    realtime.send({ type: 'response.create' });
    return { call: call.name, arguments: call.arguments, text: (await done).text };
  },
  async bargeIn() {
    const done = until('response.done');
    let seconds = 0;
    const heard = new Promise((resolve) => {
      realtime.on('response.output_audio.delta', (event) => {
        seconds += (event.delta.length * 3) / 4 / 2 / RATE;
        if (seconds > 1) resolve(event);
      });
    });
    say('a long one' + ' and another'.repeat(100));
    const { item_id } = await heard;
    realtime.send({ type: 'input_audio_buffer.append', audio: tone(700, 0.2) });
    const response = (await done).response;
    const retrieved = until('conversation.item.retrieved');
    realtime.send({ type: 'conversation.item.retrieve', item_id });
    const words = (await retrieved).item.content[0].transcript;
    return { status: response.status, reason: response.status_details.reason, words: words.slice(0, 16) };
  },
  async reconnect() {
    const again = until('session.created');
    console.log('"connected"');
    const { session } = await again;
    write();
    const text = until('response.output_text.done');
    say('good evening');
    return { isNew: session.id !== created.session.id, text: (await text).text };
  },
};

const created = await until('session.created');
console.log(JSON.stringify(await scenarios[scenario]()));
realtime.close();
