// A Realtime connection that reconnects: it resumes the session, and neither events nor audio are lost.

import { UnconfirmedAudio } from "./unconfirmed-audio.js";

const RETRY_MS = [250, 500, 1000, 2000, 4000, 8000];
const GIVE_UP_MS = 30000;
const KEPT_EVENTS = 100;
const DELIBERATE = 1000;
const REPLACED = 4001;
const REFUSED = 1008;
const FINAL = new Set(["session_idle", "session_expired"]);

// States: connecting, open, waiting (for the next try), closed.
export class Connection extends EventTarget {
  #keys;
  #model;
  #socket = null;
  #resume = null; // { id, token }
  #lastEvent = null;
  #waiting = []; // messages for when the session has started
  #sentEvents = []; // with ids, newest last; those the server did not receive are sent again
  #sound = new UnconfirmedAudio();
  #nextId = 1;
  #tries = 0;
  #lostAt = null;
  #timer = 0;
  #refusal = null;
  state = "closed";

  constructor(keys, model) {
    super();
    this.#keys = keys;
    this.#model = model;
  }

  async open() {
    this.#enter(this.#resume ? "waiting" : "connecting");
    let protocols;
    try {
      protocols = ["realtime", ...(await this.#keys.protocols())];
    } catch {
      this.#closed({ code: 1006 });
      return;
    }
    if (this.state === "closed") return;
    const socket = new WebSocket(this.#address(), protocols);
    this.#socket = socket;
    socket.onmessage = ({ data }) => this.#received(JSON.parse(data));
    socket.onclose = (event) => socket === this.#socket && this.#closed(event);
  }

  close() {
    clearTimeout(this.#timer);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close(DELIBERATE);
    this.#enter("closed");
  }

  send(event) {
    const numbered = { event_id: `page_${this.#nextId++}`, ...event };
    this.#sentEvents = [...this.#sentEvents.slice(-KEPT_EVENTS), numbered];
    if (this.state === "connecting") this.#waiting.push(numbered);
    else this.#post(numbered);
  }

  // Audio before the session has started is dropped; audio during a disconnect is sent after the reconnect.
  sendSound(samples) {
    if (this.state !== "open" && this.state !== "waiting") return;
    const audio = this.#sound.add(samples);
    this.#post({ type: "input_audio_buffer.append", audio });
  }

  // For messages that may be lost while disconnected.
  sendIfOpen(event) {
    this.#post(event);
  }

  // A closing socket accepts no messages; they are sent when the session is resumed.
  #post(event) {
    if (this.state === "open" && this.#socket.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(event));
  }

  #received(event) {
    if (event.event_id) this.#lastEvent = event.event_id;
    if (event.type === "session.created") this.#began(event.session);
    else if (event.type === "viva.session.resumed") this.#resumed(event);
    else if (event.type === "error" && (this.state !== "open" || FINAL.has(event.error.code))) this.#refusal = event.error;
    this.dispatchEvent(new CustomEvent("event", { detail: event }));
    if (event.type === "session.created") for (const waiting of this.#waiting.splice(0)) this.#post(waiting);
  }

  #began(session) {
    const token = session.viva?.resume_token;
    this.#resume = token ? { id: session.id, token } : null;
    this.#opened();
  }

  #resumed(event) {
    this.#opened();
    const got = this.#sentEvents.findIndex((sent) => sent.event_id === event.last_client_event_id);
    for (const missed of this.#sentEvents.slice(got + 1)) this.#post(missed);
    for (const audio of this.#sound.after(event.received_audio_ms)) {
      this.#post({ type: "input_audio_buffer.append", audio });
    }
  }

  #opened() {
    this.#tries = 0;
    this.#lostAt = null;
    this.#refusal = null;
    this.#enter("open");
  }

  #closed({ code, reason = "" }) {
    this.#socket = null;
    if (this.state === "closed") return;
    if (code === REPLACED) return this.#end("replaced");
    if (this.#refusal?.code === "session_gone") return this.#startAgain();
    if (FINAL.has(this.#refusal?.code)) return this.#end("error", this.#refusal.message);
    if (code === REFUSED) return this.#end("refused", this.#refusal?.message ?? reason);
    this.#lostAt ??= performance.now();
    if (performance.now() - this.#lostAt > GIVE_UP_MS) return this.#end(this.#resume ? "lost" : "unreachable");
    const wait = RETRY_MS[Math.min(this.#tries++, RETRY_MS.length - 1)];
    this.#timer = setTimeout(() => this.open(), wait);
    this.#enter(this.#resume ? "waiting" : "connecting");
  }

  // The session has ended (the server was restarted, or the disconnect was too long): open a new one, without history.
  #startAgain() {
    this.#resume = this.#lastEvent = this.#refusal = null;
    this.#sentEvents = [];
    this.#waiting = [];
    this.#sound = new UnconfirmedAudio();
    this.dispatchEvent(new Event("restarted"));
    this.open();
  }

  #end(reason, message = "") {
    this.dispatchEvent(new CustomEvent("ended", { detail: { reason, message } })); // before the listeners are removed
    this.#enter("closed");
  }

  #enter(state) {
    if (state === this.state) return;
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }

  #address() {
    const address = new URL("v1/realtime", location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    const query = this.#resume
      ? { session_id: this.#resume.id, resume_token: this.#resume.token, last_event_id: this.#lastEvent }
      : { model: this.#model };
    for (const [name, value] of Object.entries(query)) if (value) address.searchParams.set(name, value);
    return address;
  }
}
