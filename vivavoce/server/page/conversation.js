// One conversation: applies server events to playback and captions, and sends the user's actions to the server.
//
// Events: state (off, connecting, listening, hearing, thinking, speaking, reconnecting), session, caption, cut, turn
// (with the response time), problem, restarted.

import { Connection } from "./connection.js";
import { fromBase64 } from "./pcm.js";

const PLAYED_EVERY_MS = 100;
const EXPECTED_ERRORS = new Set(["response_cancel_not_active"]); // the reply ended before the cancel event arrived

export class Conversation extends EventTarget {
  #audio; // { context, player, microphone }
  #connection;
  #wanted;
  #cut = new Set(); // items whose audio must not be played any more
  #active = null; // the response in progress
  #responses = new Map(); // of the items being played
  #turnEndedAt = null; // end of the turn that waits for a reply, in the time of the audio context
  #reportedMs = 0;
  #takesPlayed = false; // stock servers would answer with an error
  session = null;
  state = "off";

  constructor(keys, audio, model, wanted) {
    super();
    this.#audio = audio;
    this.#wanted = wanted;
    this.#connection = new Connection(keys, model);
    this.#connection.addEventListener("event", ({ detail }) => this.#handlers[detail.type]?.(detail));
    this.#connection.addEventListener("state", ({ detail }) => this.#connectionIs(detail));
    this.#connection.addEventListener("restarted", () => this.#restart());
    this.#connection.addEventListener("ended", ({ detail }) => this.#emit("problem", detail));
    this.#listenTo(audio.player, { started: this.#sounded, progress: this.#played, finished: this.#finished });
    if (audio.microphone) this.hearFrom(audio.microphone);
  }

  open() {
    this.#connection.open();
  }

  close() {
    this.#audio.player.clear();
    this.#connection.close();
  }

  hearFrom(microphone) {
    this.#listenTo(microphone, { sound: this.#onAudio });
  }

  // Settings as fields of a session object; the server answers with the complete session.
  configure(wanted) {
    this.#wanted = wanted;
    if (this.session) this.#connection.send({ type: "session.update", session: { type: "realtime", ...wanted } });
  }

  say(text) {
    this.#stopReply();
    this.#turnEndedAt = this.#audio.context.currentTime;
    const item = { type: "message", role: "user", content: [{ type: "input_text", text }] };
    this.#connection.send({ type: "conversation.item.create", item });
    this.#connection.send({ type: "response.create" });
    this.#enter("thinking");
  }

  stop() {
    this.#stopReply();
    this.#enter("listening");
  }

  #handlers = {
    "session.created": ({ session }) => {
      this.#takesPlayed = Boolean(session.viva?.resume_token);
      this.session = session;
      this.configure(this.#wanted);
      this.#enter("listening");
    },
    "viva.session.resumed": ({ session }) => {
      this.session = session;
      if (this.#audio.player.isActive) this.#enter("speaking");
      else this.#enter(this.#active ? "thinking" : "listening");
    },
    "session.updated": ({ session }) => {
      this.session = session;
      this.#emit("session", session);
    },
    "input_audio_buffer.speech_started": () => {
      if (this.session.audio.input.turn_detection?.interrupt_response) this.#cutSound();
      this.#enter("hearing");
    },
    "input_audio_buffer.speech_stopped": () => {
      this.#turnEndedAt = this.#audio.microphone?.lastVoicedAt ?? null;
      this.#enter("thinking");
    },
    "conversation.item.added": ({ item }) => {
      if (item.type !== "message" || item.role === "system") return;
      const text = item.content.map((part) => part.text ?? part.transcript ?? "").join("");
      const isSpoken = item.content.some((part) => part.type === "input_audio");
      this.#emit("caption", { item: item.id, role: item.role, text, isSpoken });
    },
    "conversation.item.input_audio_transcription.delta": ({ item_id: item, delta }) =>
      this.#emit("caption", { item, role: "user", delta }),
    "conversation.item.input_audio_transcription.completed": ({ item_id: item, transcript }) =>
      this.#emit("caption", { item, role: "user", text: transcript, isDone: true }),
    "conversation.item.input_audio_transcription.failed": ({ item_id: item }) =>
      this.#emit("caption", { item, role: "user", isDone: true }),
    "response.created": ({ response }) => {
      this.#active = response.id;
      if (this.state === "listening") this.#enter("thinking");
    },
    "response.output_audio_transcript.delta": ({ item_id: item, delta }) =>
      this.#emit("caption", { item, role: "assistant", delta }),
    "response.output_text.delta": ({ item_id: item, delta }) => {
      this.#answered(item, this.#audio.context.currentTime);
      this.#emit("caption", { item, role: "assistant", delta });
    },
    "response.output_text.done": ({ item_id: item }) => this.#emit("caption", { item, role: "assistant", isDone: true }),
    "response.output_audio.delta": ({ item_id: item, response_id: response, delta }) => {
      if (this.#cut.has(item)) return;
      this.#responses.set(item, response);
      this.#audio.player.push(item, fromBase64(delta));
    },
    "response.output_audio.done": ({ item_id: item }) => this.#audio.player.end(item),
    "response.done": ({ response }) => {
      if (this.#active === response.id) this.#active = null;
      if (response.status === "failed") {
        this.#emit("problem", { reason: "failed", message: response.status_details?.error?.message ?? "" });
      }
      this.#settle();
    },
    "output_audio_buffer.cleared": () => this.#silence(),
    "conversation.item.truncated": ({ item_id: item }) => this.#emit("cut", { item }),
    "conversation.item.deleted": ({ item_id: item }) => this.#emit("removed", { item }),
    error: ({ error }) => {
      if (!EXPECTED_ERRORS.has(error.code)) this.#emit("problem", { reason: "error", message: error.message });
    },
  };

  // A new session has no history: reset the state of the old one.
  #restart() {
    this.#silence();
    this.#active = this.#turnEndedAt = null;
    this.#emit("restarted");
  }

  // Barge-in: stop the playback, and send the server the played milliseconds.
  #cutSound() {
    for (const { item, ms } of this.#silence()) {
      this.#connection.send({ type: "conversation.item.truncate", item_id: item, content_index: 0, audio_end_ms: ms });
    }
  }

  #silence() {
    const cut = this.#audio.player.clear();
    for (const { item } of cut) {
      this.#cut.add(item);
      this.#emit("cut", { item });
    }
    return cut;
  }

  #stopReply() {
    if (this.#active) this.#connection.send({ type: "response.cancel", response_id: this.#active });
    this.#cutSound();
  }

  #onAudio({ samples }) {
    this.#connection.sendSound(samples);
  }

  #sounded({ item, at }) {
    this.#answered(item, at + (this.#audio.context.outputLatency || 0));
    this.#reportedMs = 0;
    this.#enter("speaking");
  }

  #answered(item, at) {
    if (this.#turnEndedAt === null) return;
    this.#emit("turn", { item, from: this.#turnEndedAt, to: at, ms: Math.round((at - this.#turnEndedAt) * 1000) });
    this.#turnEndedAt = null;
  }

  // Our server truncates the history to what was played, and takes the playback position from this event.
  #played({ item, ms }) {
    if (ms - this.#reportedMs >= PLAYED_EVERY_MS) this.#reportPlayed(item, ms);
  }

  #reportPlayed(item, ms) {
    this.#reportedMs = ms;
    const event = { type: "viva.played", response_id: this.#responses.get(item), audio_ms: Math.round(ms) };
    if (this.#takesPlayed) this.#connection.sendIfOpen(event);
  }

  #finished({ item, ms }) {
    this.#reportPlayed(item, ms);
    this.#responses.delete(item);
    this.#emit("caption", { item, role: "assistant", isDone: true });
    this.#settle();
  }

  // No playback and no response in progress: it is the user's turn.
  #settle() {
    if (this.#audio.player.isActive || this.#active || this.state === "hearing") return;
    this.#enter("listening");
  }

  #connectionIs(state) {
    if (state === "connecting") this.#enter("connecting");
    else if (state === "waiting") this.#enter("reconnecting");
    else if (state === "closed") this.#enter("off");
  }

  #enter(state) {
    if (state === this.state) return;
    this.state = state;
    this.#emit("state", state);
  }

  #listenTo(target, listeners) {
    for (const [type, listener] of Object.entries(listeners)) {
      target.addEventListener(type, ({ detail }) => this.state !== "off" && listener.call(this, detail));
    }
  }

  #emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
