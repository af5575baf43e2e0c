// The key, if the server requires one: an API key is exchanged for a short-lived browser key, and never stored.

const PROTOCOL = "openai-insecure-api-key.";
const BROWSER_KEY = "ek_";

export class Keys {
  #key = null;

  // A link may contain a key after its #; it is removed from the address bar.
  takeFromAddress() {
    const given = new URLSearchParams(location.hash.slice(1)).get("key");
    if (!given) return;
    this.#key = given;
    history.replaceState(null, "", location.pathname + location.search);
  }

  get isSet() {
    return this.#key !== null;
  }

  set(key) {
    this.#key = key.trim() || null;
  }

  // Subprotocols with the key: a browser cannot set the headers of a WebSocket.
  async protocols() {
    if (!this.#key) return [];
    return [PROTOCOL + (this.#key.startsWith(BROWSER_KEY) ? this.#key : await this.#browserKey())];
  }

  // A JSON response of the server; null where the key is refused.
  async fetch(path) {
    const answer = await fetch(path, { headers: this.#headers(), cache: "no-store" });
    return answer.status === 401 ? null : answer.json();
  }

  async #browserKey() {
    const headers = { ...this.#headers(), "Content-Type": "application/json" };
    const answer = await fetch("v1/realtime/client_secrets", { method: "POST", headers, body: "{}" });
    if (!answer.ok) throw new Error(`no browser key: ${answer.status}`);
    return (await answer.json()).value;
  }

  #headers() {
    return this.#key ? { Authorization: `Bearer ${this.#key}` } : {};
  }
}
