// Live captions of both sides; finished entries are announced to screen readers.

export class Captions {
  #list;
  #announcer;
  #strings;
  #entries = new Map(); // by item
  announces = true;

  constructor(list, announcer, strings) {
    this.#list = list;
    this.#announcer = announcer;
    this.#strings = strings;
  }

  // `text` replaces, `delta` appends; `isDone` marks the end.
  show({ item, role, text, delta, isSpoken, isDone }) {
    const entry = this.#entry(item, role);
    if (isSpoken && !text && !entry.text) entry.words.textContent = this.#strings.say("spoken");
    if (text) entry.text = text;
    if (delta) entry.text += delta;
    if (text || delta) entry.words.textContent = entry.text;
    if (isDone || (text && role === "user")) this.#announce(entry, role);
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  get isEmpty() {
    return this.#list.children.length === 0;
  }

  clear() {
    this.#list.replaceChildren();
    this.#announcer.replaceChildren();
    this.#entries.clear();
  }

  // What was said, one line for each entry.
  get transcript() {
    return [...this.#list.children].map((entry) => {
      const [who, words, notes] = [".who", ".words", ".notes"].map((part) => entry.querySelector(part)?.textContent ?? "");
      return who ? `${who}: ${words}${notes ? ` (${notes})` : ""}` : entry.textContent;
    }).join("\n");
  }

  cut(item) {
    const entry = this.#entries.get(item);
    if (!entry || entry.element.classList.contains("cut")) return;
    entry.element.classList.add("cut");
    this.#note(entry, this.#strings.say("interrupted"));
  }

  // The user went on with a turn that was answered already: its whole comes as another item.
  remove(item) {
    this.#entries.get(item)?.element.remove();
    this.#entries.delete(item);
  }

  latency(item, ms) {
    const entry = this.#entry(item, "assistant");
    const line = document.createElement("p");
    line.className = "notes latency"; // shown with the details
    line.textContent = this.#strings.say("answeredAfter", { ms });
    entry.element.append(line);
  }

  separate(text) {
    const element = document.createElement("li");
    element.className = "break";
    element.textContent = text;
    this.#list.append(element);
    this.#entries.clear();
  }

  #entry(item, role) {
    if (!this.#entries.has(item)) this.#entries.set(item, this.#newEntry(role));
    return this.#entries.get(item);
  }

  #newEntry(role) {
    const element = document.createElement("li");
    element.className = role;
    const [who, words, notes] = ["span", "p", "p"].map((tag) => document.createElement(tag));
    who.className = "who";
    who.textContent = this.#strings.say(role === "user" ? "you" : "reply");
    words.className = "words";
    notes.className = "notes";
    element.append(who, words, notes);
    this.#list.append(element);
    return { element, words, notes, text: "", isAnnounced: false };
  }

  #note(entry, text) {
    entry.notes.textContent += entry.notes.textContent ? ` · ${text}` : text;
  }

  #announce(entry, role) {
    if (entry.isAnnounced || !entry.text || !this.announces) return;
    entry.isAnnounced = true;
    const line = document.createElement("p");
    line.textContent = `${this.#strings.say(role === "user" ? "you" : "reply")}: ${entry.text}`;
    this.#announcer.append(line);
    while (this.#announcer.children.length > 20) this.#announcer.firstChild.remove();
  }
}
