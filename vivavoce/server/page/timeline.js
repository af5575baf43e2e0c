// The last seconds as a picture: who spoke when, how long answers took, and where the sound broke off.

const LONGEST_SPAN = 30; // seconds, on a wide screen
const PIXELS_PER_SECOND = 20;
const LANE = { user: 0, reply: 1 };
const FULL_SCALE = 0.25; // speech fills its lane

export class Timeline {
  #canvas;
  #now;
  #lanes;
  #points = []; // { at, lane, level }
  #gaps = []; // when sound ran out
  #turns = []; // { from, to, ms }

  // `now` gives the audio context's time, `lanes` the names of the two sides.
  constructor(canvas, now, lanes) {
    this.#canvas = canvas;
    this.#now = now;
    this.#lanes = lanes;
  }

  user(at, level) {
    this.#points.push({ at, lane: LANE.user, level });
  }

  reply(at, level) {
    this.#points.push({ at, lane: LANE.reply, level });
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
    this.#forgetBefore(now - LONGEST_SPAN);
    const { context, width, height } = this.#prepare();
    const style = getComputedStyle(this.#canvas);
    const colour = (name) => style.getPropertyValue(name).trim();
    const span = Math.min(LONGEST_SPAN, width / PIXELS_PER_SECOND);
    const x = (at) => width * (1 - (now - at) / span);
    const middle = (lane) => height * (lane === LANE.user ? 0.28 : 0.72);
    this.#drawGrid(context, width, height, { now, span, x }, colour);
    for (const { at, lane, level } of this.#points) {
      const half = Math.max(1, Math.min(1, Math.sqrt(level / FULL_SCALE)) * height * 0.19);
      context.fillStyle = colour(lane === LANE.user ? "--user" : "--accent");
      context.fillRect(x(at), middle(lane) - half, Math.max(1.5, (width / span) * 0.035), 2 * half);
    }
    this.#drawNames(context, height, colour, style);
    for (const turn of this.#turns) this.#drawTurn(context, turn, x, height, colour, style);
    context.fillStyle = colour("--warning");
    for (const at of this.#gaps) context.fillRect(x(at) - 1, height * 0.5, 3, height * 0.46);
  }

  // As many pixels as the screen has.
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
    this.#lanes.forEach((name, lane) => context.fillText(name, 8, height * (lane === LANE.user ? 0 : 0.5) + 16));
  }

  // A bar from the end of the question to the beginning of the answer, with its length.
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
