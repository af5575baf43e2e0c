// A timeline of the last seconds: speech of both sides, response times, and playback underruns.

const MAX_SPAN = 30; // seconds, on a wide screen
const PIXELS_PER_SECOND = 20;
const SIDE = { user: 0, reply: 1 };
const FULL_SCALE = 0.25; // speech fills the height of its side

export class Timeline {
  #canvas;
  #now;
  #sides;
  #points = []; // { at, side, level }
  #gaps = []; // times of underruns
  #turns = []; // { from, to, ms }

  // `now` returns the time of the audio context, `sides` are the names of both sides.
  constructor(canvas, now, sides) {
    this.#canvas = canvas;
    this.#now = now;
    this.#sides = sides;
  }

  user(at, level) {
    this.#points.push({ at, side: SIDE.user, level });
  }

  reply(at, level) {
    this.#points.push({ at, side: SIDE.reply, level });
  }

  underrun(at) {
    this.#gaps.push(at);
  }

  turn(turn) {
    this.#turns.push(turn);
  }

  describe(text) {
    this.#canvas.setAttribute("aria-label", text);
  }

  draw() {
    const now = this.#now();
    this.#forgetBefore(now - MAX_SPAN);
    const { context, width, height } = this.#prepare();
    const style = getComputedStyle(this.#canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const span = Math.min(MAX_SPAN, width / PIXELS_PER_SECOND);
    const x = (at) => width * (1 - (now - at) / span);
    const middle = (side) => height * (side === SIDE.user ? 0.28 : 0.72);
    this.#drawGrid(context, width, height, { now, span, x }, colour);
    for (const { at, side, level } of this.#points) {
      const half = Math.max(1, Math.min(1, Math.sqrt(level / FULL_SCALE)) * height * 0.19);
      context.fillStyle = colour(side === SIDE.user ? "--user" : "--accent");
      context.fillRect(x(at), middle(side) - half, Math.max(1.5, (width / span) * 0.035), 2 * half);
    }
    this.#drawNames(context, height, colour, style);
    for (const turn of this.#turns) this.#drawTurn(context, turn, x, height, colour, style);
    context.fillStyle = colour("--warning");
    for (const at of this.#gaps) context.fillRect(x(at) - 1, height * 0.5, 3, height * 0.46);
  }

  // Match the resolution of the screen.
  #prepare() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const ratio = devicePixelRatio || 1;
    if (this.#canvas.width !== Math.round(width * ratio)) this.#canvas.width = Math.round(width * ratio);
    if (this.#canvas.height !== Math.round(height * ratio)) this.#canvas.height = Math.round(height * ratio);
    const context = this.#canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    return { context, width, height };
  }

  #drawGrid(context, width, height, { now, span, x }, colour) {
    context.fillStyle = colour("--line");
    context.fillRect(0, Math.round(height / 2), width, 1);
    for (let second = Math.ceil((now - span) / 5) * 5; second <= now; second += 5) {
      context.fillRect(Math.round(x(second)), 0, 1, height);
    }
  }

  #drawNames(context, height, colour, style) {
    context.font = `11px ${style.fontFamily}`;
    context.textAlign = "left";
    context.fillStyle = colour("--soft");
    this.#sides.forEach((name, side) => context.fillText(name, 8, height * (side === SIDE.user ? 0 : 0.5) + 16));
  }

  // A bar from the end of the turn to the start of the reply, with its duration.
  #drawTurn(context, { from, to, ms }, x, height, colour, style) {
    context.fillStyle = colour("--text");
    context.fillRect(x(from), height / 2 - 1.5, Math.max(2, x(to) - x(from)), 3);
    context.font = `11px ${style.fontFamily}`;
    context.textAlign = "right";
    context.fillText(`${ms} ms`, Math.max(56, x(from) - 4), height / 2 + 4);
  }

  #forgetBefore(time) {
    this.#points = this.#points.filter(({ at }) => at > time);
    this.#gaps = this.#gaps.filter((at) => at > time);
    this.#turns = this.#turns.filter(({ to }) => to > time);
  }
}
