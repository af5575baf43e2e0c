// Level meters: the microphone's, which is also the glow of the talk button, and the reply's.

const FLOOR_DB = -60;
const FALL_PER_SECOND = 2.5;

export class Meter {
  #bar;
  #glow;
  #shown = 0;
  #level = 0;

  constructor(bar, glow = null) {
    this.#bar = bar;
    this.#glow = glow;
  }

  // A level between 0 and 1, as an amplitude.
  hear(level) {
    this.#level = Math.max(0, 1 - (20 * Math.log10(Math.max(level, 1e-6))) / FLOOR_DB);
  }

  // Rises immediately, falls slowly.
  draw(seconds) {
    this.#shown = Math.max(this.#level, this.#shown - FALL_PER_SECOND * seconds, 0);
    const percent = Math.round(this.#shown * 100);
    if (this.#bar.getAttribute("aria-valuenow") === String(percent)) return;
    this.#bar.setAttribute("aria-valuenow", percent);
    for (const element of [this.#bar, this.#glow]) element?.style.setProperty("--level", this.#shown.toFixed(3));
  }
}
