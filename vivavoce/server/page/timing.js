// Response times.

export class Timing {
  #times = [];
  #line;
  #strings;

  constructor(line, strings) {
    this.#line = line;
    this.#strings = strings;
    line.textContent = strings.say("noTurns");
  }

  add(ms) {
    this.#times.push(ms);
  }

  // Shows and returns the summary.
  show(underruns) {
    if (this.#times.length === 0) return (this.#line.textContent = this.#strings.say("noTurns"));
    const sorted = this.#times.toSorted((a, b) => a - b);
    const middle = sorted.length >> 1;
    const median = sorted.length % 2 ? sorted[middle] : Math.round((sorted[middle - 1] + sorted[middle]) / 2);
    const values = { last: this.#times.at(-1), median, count: sorted.length, underruns };
    this.#line.textContent = this.#strings.say("turns", values);
    return this.#line.textContent;
  }
}
