// The unmodified @openai/agents against a server: `node agents_turns.mjs ws://…/v1/realtime SCENARIO` prints one JSON value.
import { tool } from '@openai/agents';
import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession } from '@openai/agents/realtime';
import { z } from 'zod';

const [url, scenario] = process.argv.slice(2);
const RATE = 24000;

function tone(frequency, seconds, silence = 0) {
  const samples = new Int16Array(Math.round((seconds + silence) * RATE));
  for (let i = 0; i < Math.round(seconds * RATE); i++) {
    samples[i] = Math.round(9830 * Math.sin((2 * Math.PI * frequency * i) / RATE));
  }
  return samples;
}

const weather = tool({
  name: 'weather',
  description: 'Tell the weather.',
  parameters: z.object({ place: z.string() }),
  execute: async ({ place }) => `rain ${place}`,
});

const session = new RealtimeSession(new RealtimeAgent({ name: 'guide', instructions: 'Be brief.', tools: [weather] }), {
  transport: new OpenAIRealtimeWebSocket({ url }),
  model: 'gpt-realtime',
});
const seen = [];
const errors = [];
const audio = [];
const waiting = [];

session.on('transport_event', (event) => {
  seen.push(event);
  for (const wait of [...waiting]) {
    if (wait.fits(event)) {
      waiting.splice(waiting.indexOf(wait), 1);
      wait.resolve(event);
    }
  }
});
session.on('error', (error) => errors.push(error));
session.on('audio', (event) => audio.push(Buffer.from(event.data).toString('base64')));

const until = (type, fits = () => true) =>
  new Promise((resolve) => waiting.push({ fits: (event) => event.type === type && fits(event), resolve }));

function send(samples) {
  for (let begin = 0; begin < samples.length; begin += 2400) {
    session.sendAudio(samples.slice(begin, begin + 2400).buffer);
  }
}

const scenarios = {
  async text() {
    const done = until('response.done');
    session.sendMessage('good evening');
    await done;
  },
  async audio() {
    const done = until('response.done');
    const understood = until('conversation.item.retrieved');
    send(tone(500, 0.5, 0.5));
    await Promise.all([done, understood]);
  },
  async tool() {
    let calls = 0;
    const done = until('response.done', () => ++calls === 2);
    session.sendMessage('the weather');
    await done;
  },
  async bargeIn() {
    let seconds = 0;
    const heard = until('response.output_audio.delta', (event) => (seconds += (event.delta.length * 3) / 4 / 2 / RATE) > 1);
    session.sendMessage('a long one' + ' and another'.repeat(100));
    await heard;
    const interrupted = new Promise((resolve) => session.once('audio_interrupted', resolve));
    const done = until('response.done');
    const truncated = until('conversation.item.truncated');
    send(tone(700, 0.2));
    await Promise.all([interrupted, done, truncated]);
  },
  async interrupt() {
    const started = until('response.output_audio.delta');
    session.sendMessage('a long one, wait');
    await started;
    const done = until('response.done');
    const truncated = until('conversation.item.truncated');
    session.interrupt();
    await Promise.all([done, truncated]);
  },
  async reconnect() {
    const closed = new Promise((resolve) => session.transport.once('connection_change', resolve));
    console.log('"connected"');
    await closed;
    await session.connect({ apiKey: 'unused' });
    await scenarios.text();
  },
  async error() {
    const failed = until('error');
    session.transport.sendEvent({ type: 'conversation.item.delete', item_id: 'nonsense' });
    await failed;
    const done = until('response.done');
    session.sendMessage('still there?');
    await done;
  },
};

await session.connect({ apiKey: 'unused' });
await scenarios[scenario]();
const result = {
  errors: errors.map((error) => JSON.stringify(error)),
  types: seen.map((event) => event.type),
  done: seen.filter((event) => event.type === 'response.done').map((event) => event.response),
  history: session.history,
  audio,
};
process.stdout.write(JSON.stringify(result), () => process.exit(0));
