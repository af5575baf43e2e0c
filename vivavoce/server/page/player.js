// Plays the audio of items and reports the playback position.

export class Player extends EventTarget {
  #node = null;
  #playedMs = new Map(); // milliseconds played of the items that have not ended
  underruns = 0;

  async open(context) {
    await context.audioWorklet.addModule("playback-worklet.js");
    this.#node = new AudioWorkletNode(context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
    this.#node.port.onmessage = ({ data }) => this.#happened(data);
    this.#node.connect(context.destination);
  }

  push(item, samples) {
    if (!this.#playedMs.has(item)) this.#playedMs.set(item, 0);
    this.#node.port.postMessage({ type: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.#node.port.postMessage({ type: "end", item });
  }

  // Stops the playback; the items that were cut, with the milliseconds played of each.
  clear() {
    const cut = [...this.#playedMs].map(([item, ms]) => ({ item, ms: Math.floor(ms) }));
    this.#playedMs.clear();
    this.#node.port.postMessage({ type: "clear" });
    return cut;
  }

  get isActive() {
    return this.#playedMs.size > 0;
  }

  #happened(happening) {
    const { type, item, ms } = happening;
    if (type === "progress" && this.#playedMs.has(item)) this.#playedMs.set(item, ms);
    if (type === "finished") this.#playedMs.delete(item);
    if (type === "underrun") this.underruns += 1;
    this.dispatchEvent(new CustomEvent(type, { detail: happening }));
  }
}
