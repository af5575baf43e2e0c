// The telephone calls in progress, for pages whose key may list them.

const LOOK_MS = 2000;

export class Calls {
  #parts; // { card, list }
  #strings;
  #keys;
  #calls = [];
  #timer = null;

  constructor(parts, strings, keys) {
    this.#parts = parts;
    this.#strings = strings;
    this.#keys = keys;
  }

  // Follow the calls of a server that takes any; a hidden page does not ask.
  follow(hasTelephone) {
    clearInterval(this.#timer);
    this.#parts.card.hidden = true;
    if (!hasTelephone) return;
    this.#timer = setInterval(() => document.hidden || this.#look(), LOOK_MS);
    this.#look();
  }

  translate() {
    this.#show();
  }

  async #look() {
    const answer = await this.#keys.fetch("v1/realtime/calls").catch(() => undefined);
    if (answer === undefined) return; // the server may come back
    if (!answer?.data) clearInterval(this.#timer); // a browser key opens sessions, and lists nothing
    this.#parts.card.hidden = !answer?.data;
    this.#calls = answer?.data ?? [];
    this.#show();
  }

  #show() {
    const lines = this.#calls.map((call) => this.#line(call));
    const texts = lines.length ? lines : [this.#strings.say("noCalls")];
    this.#parts.list.replaceChildren(...texts.map((text) => {
      const item = document.createElement("li");
      item.textContent = text;
      return item;
    }));
  }

  #line({ direction, provider, caller, called, status, duration_seconds }) {
    const address = (direction === "outgoing" ? called : caller) ?? provider;
    const seconds = Math.floor(duration_seconds);
    const time = `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}`;
    const how = this.#strings.say(status === "answered" ? "callTime" : "callRinging", { time });
    return this.#strings.say(direction === "outgoing" ? "callTo" : "callFrom", { address, how });
  }
}
