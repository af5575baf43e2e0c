// The loudspeaker: takes the sound of items, and tells what of it is heard.

export class Player extends EventTarget {
  #node = null;
  #heard = new Map(); // milliseconds heard of the items that are not over
  underruns = 0;

  async open(context) {
    await context.audioWorklet.addModule("playback-worklet.js");
    this.#node = new AudioWorkletNode(context, "playback", { numberOfInputs: 0, outputChannelCount: [1] });
    this.#node.port.onmessage = ({ data }) => this.#happened(data);
    this.#node.connect(context.destination);
  }

  push(item, samples) {
    if (!this.#heard.has(item)) this.#heard.set(item, 0);
    this.#node.port.postMessage({ type: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.#node.port.postMessage({ type: "end", item });
  }

  // Silence at once; which items were cut, and how much of each was heard.
  clear() {
    const cut = [...this.#heard].map(([item, ms]) => ({ item, ms: Math.floor(ms) }));
    this.#heard.clear();
    this.#node.port.postMessage({ type: "clear" });
    return cut;
  }

  get isActive() {
    return this.#heard.size > 0;
  }

  #happened(happening) {
    const { type, item, ms } = happening;
    if (type === "progress" && this.#heard.has(item)) this.#heard.set(item, ms);
    if (type === "finished") this.#heard.delete(item);
    if (type === "underrun") this.underruns += 1;
    this.dispatchEvent(new CustomEvent(type, { detail: happening }));
  }
}
