// The page: its parts, put together.

import { Calls } from "./calls.js";
import { Captions } from "./captions.js";
import { Conversation } from "./conversation.js";
import { Keys } from "./keys.js";
import { Meter } from "./meters.js";
import { Microphone } from "./microphone.js";
import { Player } from "./player.js";
import { Settings } from "./settings.js";
import { LANGUAGE_NAMES, Strings } from "./strings.js";
import { Timeline } from "./timeline.js";
import { Timing } from "./timing.js";
import { Visitor } from "./visitor.js";

const MICROPHONE_PROBLEMS = {
  NotAllowedError: "microphoneDenied",
  NotFoundError: "microphoneMissing",
  SecurityError: "microphoneInsecure",
};
const CALM_FRAME_MS = 250;

const part = (id) => document.getElementById(id);
const strings = new Strings(navigator.languages);
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
const calls = new Calls({ card: part("calls-card"), list: part("calls") }, strings, keys);
const visitor = new Visitor({ welcome: part("welcome"), about: part("about"), examples: part("examples"), recorded: part("recorded") }, strings);
part("language").replaceChildren(...Object.entries(LANGUAGE_NAMES).map(([tag, name]) => new Option(name, tag)));
part("language").value = strings.language;

let audio = null; // { context, player, microphone }
let conversation = null;
let starting = Promise.resolve();
let wakeLock = null;
let state = "off";
let needsKey = false;
let about = {};

part("talk").addEventListener("click", () => (audio?.microphone ? finish() : start()));
part("mute").addEventListener("click", toggleMute);
part("stop").addEventListener("click", () => conversation.stop());
part("write").addEventListener("submit", write);
part("language").addEventListener("change", () => translate(part("language").value));
part("new-conversation").addEventListener("click", startAnew);
part("download").addEventListener("click", download);
visitor.addEventListener("ask", ({ detail }) => ask(detail));
part("key").addEventListener("submit", useKey);
settings.addEventListener("change", () => {
  captions.announces = settings.announces;
  conversation?.configure(settings.wanted);
});
settings.addEventListener("model", () => {
  visitor.show(about, settings.model);
  if (conversation) converse();
});
settings.addEventListener("microphone", changeMicrophone);
settings.addEventListener("loudspeaker", useLoudspeaker);
keys.takeFromAddress();
captions.announces = settings.announces;
await lookAround();
requestAnimationFrame(draw);

// What this server has to offer; it may want a key first.
async function lookAround() {
  const answer = await keys.fetch("about").catch(() => ({}));
  needsKey = !answer;
  part("key").hidden = !needsKey;
  part("key-problem").textContent = needsKey && keys.isSet ? strings.say("keyWrong") : "";
  show(conversation ? state : "off");
  if (needsKey) return false;
  about = answer;
  settings.offer("model", (about.models ?? []).map(({ id }) => id));
  settings.offer("voice", about.voices ?? []);
  visitor.show(about, settings.model);
  calls.follow(about.has_telephone);
  return true;
}

function translate(language) {
  strings.choose(language);
  strings.apply(document);
  for (const each of [visitor, settings, calls]) each.translate();
  showTiming();
  show(state);
}

async function useKey(event) {
  event.preventDefault();
  keys.set(part("key-field").value);
  if (await lookAround()) part("talk").focus();
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
  if (settings.device("loudspeaker")) await context.setSinkId?.(settings.device("loudspeaker")).catch(() => {});
  return { context, player, microphone: null };
}

async function offerDevices() {
  const devices = await navigator.mediaDevices.enumerateDevices();
  settings.offerDevices("microphone", devices.filter(({ kind }) => kind === "audioinput"));
  const canChoose = "setSinkId" in AudioContext.prototype;
  settings.offerDevices("loudspeaker", canChoose ? devices.filter(({ kind }) => kind === "audiooutput") : []);
}

async function changeMicrophone() {
  if (!audio?.microphone) return;
  const isMuted = part("mute").getAttribute("aria-pressed") === "true";
  audio.microphone.close();
  audio.microphone = null;
  await openMicrophone();
  if (audio.microphone) audio.microphone.isMuted = isMuted;
  show(conversation?.state ?? "off");
}

function useLoudspeaker() {
  audio?.context.setSinkId?.(settings.device("loudspeaker") ?? "").catch(() => {});
}

async function openMicrophone() {
  const microphone = new Microphone(audio.context, settings.device("microphone"));
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
  await offerDevices();
}

// A new conversation, with whatever sound there is.
function converse() {
  conversation?.close();
  hideProblem();
  const started = new Conversation(keys, audio, settings.model, settings.wanted);
  conversation = started;
  const on = (type, listener) => started.addEventListener(type, ({ detail }) => started === conversation && listener(detail));
  on("state", show);
  on("session", (session) => {
    settings.adopt(session);
    showFormats(session);
  });
  on("caption", (caption) => {
    captions.show(caption);
    part("download").disabled = false;
  });
  on("cut", ({ item }) => captions.cut(item));
  on("removed", ({ item }) => captions.remove(item));
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

function startAnew() {
  captions.clear();
  part("download").disabled = true;
  converse();
  show(conversation.state);
}

function download() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([captions.transcript, "\n"], { type: "text/plain" }));
  link.download = `viva-voce-${new Date().toISOString().slice(0, 16).replace(/[:T]/g, "-")}.txt`;
  link.click();
  URL.revokeObjectURL(link.href);
}

async function write(event) {
  event.preventDefault();
  const text = part("message").value.trim();
  if (!text) return;
  part("message").value = "";
  await ask(text);
}

async function ask(text) {
  starting = starting.then(() => conversation ?? beginWithoutMicrophone());
  await starting;
  conversation.say(text);
}

function toggleMute() {
  const isMuted = part("mute").getAttribute("aria-pressed") !== "true";
  part("mute").setAttribute("aria-pressed", String(isMuted));
  audio.microphone.isMuted = isMuted;
  show(state);
}

function show(now) {
  if (now === "off" && conversation) return finish();
  state = now;
  const isListening = Boolean(audio?.microphone);
  const isMuted = isListening && part("mute").getAttribute("aria-pressed") === "true";
  Object.assign(part("talk").dataset, { state, listening: isListening });
  part("talk-label").textContent = strings.say(isListening ? "end" : "start");
  part("state").textContent = strings.say(needsKey && state === "off" ? "keyFirst" : isMuted && ["listening", "hearing"].includes(state) ? "muted" : state);
  for (const id of ["talk", "message", "send"]) part(id).disabled = needsKey && !conversation;
  part("mute").disabled = !isListening;
  part("new-conversation").disabled = !conversation;
  part("stop").disabled = state !== "speaking" && state !== "thinking";
}

function showTurn(turn) {
  timing.add(turn.ms);
  timeline.turn(turn);
  captions.latency(turn.item, turn.ms);
  showTiming();
}

function showFormats({ audio: formats }) {
  const name = (format) => format && `${format.type}${format.rate ? `, ${format.rate / 1000} kHz` : ""}`;
  part("formats").textContent = strings.say("formats", { input: name(formats.input.format), output: name(formats.output?.format) ?? "–" });
}

function showTiming() {
  const summary = timing.show(audio?.player.underruns ?? 0);
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
