// The page: its parts, put together.

import { Captions } from "./captions.js";
import { Conversation } from "./conversation.js";
import { Keys } from "./keys.js";
import { Meter } from "./meters.js";
import { Microphone } from "./microphone.js";
import { Player } from "./player.js";
import { Settings } from "./settings.js";
import { Strings } from "./strings.js";
import { Timeline } from "./timeline.js";
import { Timing } from "./timing.js";

const MICROPHONE_PROBLEMS = {
  NotAllowedError: "microphoneDenied",
  NotFoundError: "microphoneMissing",
  SecurityError: "microphoneInsecure",
};
const CALM_FRAME_MS = 250;

const part = (id) => document.getElementById(id);
const strings = new Strings(navigator.language);
strings.apply(document);
const keys = new Keys();
const settings = new Settings(part("settings"), strings);
const captions = new Captions(part("captions"), part("announcer"), strings);
const timing = new Timing(part("timing"), strings);
const microphoneMeter = new Meter(part("microphone-level"), part("talk"));
const replyMeter = new Meter(part("reply-level"));
const sides = [strings.say("you"), strings.say("reply")];
const timeline = new Timeline(part("timeline"), () => audio?.context.currentTime ?? 0, sides);
timeline.describe(strings.say("timeline", { summary: strings.say("noTurns") }));

let audio = null; // { context, player, microphone }
let conversation = null;
let starting = Promise.resolve();
let wakeLock = null;

part("talk").addEventListener("click", () => (audio?.microphone ? finish() : start()));
part("mute").addEventListener("click", toggleMute);
part("stop").addEventListener("click", () => conversation.stop());
part("write").addEventListener("submit", write);
part("key").addEventListener("submit", useKey);
settings.addEventListener("change", () => {
  captions.announces = settings.announces;
  conversation?.configure(settings.wanted);
});
settings.addEventListener("model", () => conversation && converse());
keys.takeFromAddress();
captions.announces = settings.announces;
await lookAround();
requestAnimationFrame(draw);

// What this server has to offer; it may want a key first.
async function lookAround() {
  const about = await keys.fetch("about").catch(() => ({}));
  part("key").hidden = Boolean(about);
  if (!about) return false;
  settings.offer("model", (about.models ?? []).map(({ id }) => id));
  settings.offer("voice", about.voices ?? []);
  return true;
}

async function useKey(event) {
  event.preventDefault();
  keys.set(part("key-field").value);
  const isRight = await lookAround();
  part("key-problem").textContent = isRight ? "" : strings.say("keyWrong");
  if (isRight) part("talk").focus();
}

// One start at a time: sound and microphone take a moment, in which people click again.
function start() {
  starting = starting.then(() => audio?.microphone ?? begin());
}

async function begin() {
  show("connecting");
  audio ??= await openAudio();
  await audio.context.resume();
  await openMicrophone();
  if (audio.microphone && !conversation) converse();
  else show(conversation?.state ?? "off"); // one that was written goes on
}

async function beginWithoutMicrophone() {
  audio ??= await openAudio();
  await audio.context.resume();
  converse();
}

async function openAudio() {
  const context = new AudioContext({ latencyHint: "interactive" });
  const player = new Player();
  await player.open(context);
  player.addEventListener("progress", ({ detail }) => {
    replyMeter.hear(detail.level);
    timeline.reply(detail.at, detail.level);
  });
  player.addEventListener("underrun", ({ detail }) => {
    timeline.underrun(detail.at);
    showTiming();
  });
  for (const end of ["finished", "cleared"]) player.addEventListener(end, () => replyMeter.hear(0));
  return { context, player, microphone: null };
}

async function openMicrophone() {
  const microphone = new Microphone(audio.context);
  try {
    await microphone.open();
  } catch (error) {
    showProblem(strings.say(MICROPHONE_PROBLEMS[error.name] ?? "microphoneMissing"));
    return;
  }
  microphone.addEventListener("sound", ({ detail }) => {
    microphoneMeter.hear(detail.level);
    timeline.user(detail.at, detail.level);
  });
  microphone.addEventListener("lost", () => {
    audio.microphone = null;
    showProblem(strings.say("microphoneLost"));
    show(conversation?.state ?? "off");
  });
  audio.microphone = microphone;
  conversation?.hearFrom(microphone);
}

// A new conversation, with whatever sound there is.
function converse() {
  conversation?.close();
  hideProblem();
  const started = new Conversation(keys, audio, settings.model, settings.wanted);
  conversation = started;
  const on = (type, listener) => started.addEventListener(type, ({ detail }) => started === conversation && listener(detail));
  on("state", show);
  on("session", (session) => settings.adopt(session));
  on("caption", (caption) => captions.show(caption));
  on("cut", ({ item }) => captions.cut(item));
  on("turn", showTurn);
  on("problem", ({ reason, message }) => {
    showProblem(strings.say(reason, { message }));
    if (reason === "unreachable" || reason === "lost") lookAround(); // perhaps it is the key that is too old
  });
  on("restarted", () => captions.separate(strings.say("newSession")));
  started.open();
  keepAwake();
}

function finish() {
  const ended = conversation;
  conversation = null;
  ended?.close();
  audio?.microphone?.close();
  if (audio) audio.microphone = null;
  for (const meter of [microphoneMeter, replyMeter]) meter.hear(0);
  part("mute").setAttribute("aria-pressed", "false");
  wakeLock?.release();
  wakeLock = null;
  show("off");
}

async function write(event) {
  event.preventDefault();
  const text = part("message").value.trim();
  if (!text) return;
  part("message").value = "";
  starting = starting.then(() => conversation ?? beginWithoutMicrophone());
  await starting;
  conversation.say(text);
}

function toggleMute() {
  const isMuted = part("mute").getAttribute("aria-pressed") !== "true";
  part("mute").setAttribute("aria-pressed", String(isMuted));
  audio.microphone.isMuted = isMuted;
}

function show(state) {
  if (state === "off" && conversation) return finish();
  const isListening = Boolean(audio?.microphone);
  Object.assign(part("talk").dataset, { state, listening: isListening });
  part("talk-label").textContent = strings.say(isListening ? "end" : "start");
  part("state").textContent = strings.say(state);
  part("mute").disabled = !isListening;
  part("stop").disabled = state !== "speaking" && state !== "thinking";
}

function showTurn(turn) {
  timing.add(turn.ms);
  timeline.turn(turn);
  captions.latency(turn.item, turn.ms);
  showTiming();
}

function showTiming() {
  const summary = timing.show(audio.player.underruns);
  timeline.describe(strings.say("timeline", { summary }));
}

function showProblem(text) {
  part("problem").textContent = text;
  part("problem").hidden = false;
}

function hideProblem() {
  part("problem").hidden = true;
}

async function keepAwake() {
  wakeLock ??= await navigator.wakeLock?.request("screen").catch(() => null);
}

let drawnAt = 0;
function draw(now) {
  requestAnimationFrame(draw);
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (document.hidden || (isCalm && now - drawnAt < CALM_FRAME_MS)) return;
  const seconds = (now - drawnAt) / 1000;
  drawnAt = now;
  for (const meter of [microphoneMeter, replyMeter]) meter.draw(seconds);
  timeline.draw();
}
