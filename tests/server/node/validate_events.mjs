// Server events, a JSON object a line on stdin, against the schemas of @openai/agents.
import { text } from 'node:stream/consumers';
import { realtimeServerEventSchema } from './node_modules/@openai/agents-realtime/dist/openaiRealtimeEvents.mjs';

const known = new Set(realtimeServerEventSchema.options.map((schema) => schema.shape.type.value));
const events = (await text(process.stdin)).trim().split('\n').map((line) => JSON.parse(line));
const checked = events.filter(({ type }) => known.has(type));
const wrong = checked.flatMap((event) => {
  const { success, error } = realtimeServerEventSchema.safeParse(event);
  return success ? [] : [{ event, issues: error.issues }];
});
console.log(JSON.stringify({ checked: checked.length, types: [...new Set(checked.map(({ type }) => type))], wrong }));
