// What each worker did lately: tokens per second in the colour of its version, hatched where it
// samples nothing. Drawn with the same spans as a recorded timeline.
import { $, number, seconds } from "./elements.js";

const KEPT_S = 900, WINDOWS_S = [30, 60, 120, 300, 900];
const LEFT = 66, RIGHT = 6, TOP = 4, FLEET = 46, LANE = 54, BAND = 15, GAP = 8, AXIS = 20;
const KIND_OF_STATE = { stale: "behind", tripped: "broken", joining: "starting" };

export class History {
  constructor() {
    this.canvas = $("time").querySelector("canvas");
    this.pen = this.canvas.getContext("2d");
    this.lanes = new Map();
    this.totals = [];
    this.updates = new Map();
    this.chosen_s = 0;  // 0: as long as there is something to be shown
    this.window_s = 30;
    this.now_s = this.from_s = 0;
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.canvas.addEventListener("pointermove", event => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  }

  add(frame, now_s) {
    this.from_s ||= now_s;
    this.now_s = now_s;
    this.totals.push({ at: now_s, rate: frame.tokens_per_s, queue: frame.n_queued });
    const rows = new Map(frame.rows.map(row => [row.name, row]));
    for (const name of Object.keys(frame.absent)) if (!rows.has(name)) rows.set(name, null);
    for (const name of this.lanes.keys()) if (!rows.has(name)) rows.set(name, null);
    for (const [name, row] of rows) {
      const lane = this.lanes.get(name) ?? { rates: [], versions: [], states: [], here_s: now_s };
      this.lanes.set(name, lane);
      if (row) lane.here_s = now_s;
      const kind = !row ? "gone" : row.state === "ready" || row.state === "updating"
        ? (Object.keys(row.blocked_by).length ? "blocked" : "") : KIND_OF_STATE[row.state] ?? row.state;
      if (row) extend(lane.versions, { kind: "version", version: row.version }, now_s);
      extend(lane.states, { kind }, now_s);
      lane.rates.push({ at: now_s, rate: row?.tokens_per_s ?? 0 });
      trim(lane.rates, now_s, "at");
      trim(lane.versions, now_s, "to");
      trim(lane.states, now_s, "to");
      if (now_s - lane.here_s > KEPT_S) this.lanes.delete(name);
    }
    trim(this.totals, now_s, "at");
    for (const each of frame.updates) {
      const key = each.policy + " " + each.version;
      const began = this.updates.get(key)?.from ?? now_s - each.age_ms / 1000;
      this.updates.set(key, { from: began, to: now_s, version: each.version });
    }
    for (const [key, each] of this.updates) if (now_s - each.to > KEPT_S) this.updates.delete(key);
    this.draw();
  }

  zoom(step) {
    const at = WINDOWS_S.findIndex(each => each >= this.window_s) + step;
    this.chosen_s = WINDOWS_S[Math.min(Math.max(at, 0), WINDOWS_S.length - 1)];
    this.draw();
  }

  x(at) { return LEFT + (1 - (this.now_s - at) / this.window_s) * (this.width - LEFT - RIGHT); }

  draw() {
    const ratio = window.devicePixelRatio || 1, pen = this.pen;
    this.window_s = this.chosen_s || Math.min(Math.max(15 * Math.ceil((this.now_s - this.from_s) / 15), 30), 120);
    this.width = this.canvas.clientWidth;
    this.height = TOP + FLEET + GAP + this.lanes.size * (LANE + GAP) + AXIS;
    this.canvas.style.height = this.height + "px";
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const card = getComputedStyle($("time")), faint = getComputedStyle($("window")).color;
    this.look = { ink: card.color, paper: card.backgroundColor, line: faint, faint };
    pen.font = "11px system-ui, sans-serif";
    $("window").textContent = "last " + (this.window_s < 90 ? this.window_s + " s" : this.window_s / 60 + " min");
    this.axis();
    for (const each of this.updates.values()) {
      const left = Math.max(this.x(each.from), LEFT), wide = Math.max(this.x(each.to) - left, 2);
      if (left + wide < LEFT) continue;
      pen.globalAlpha = .3;
      pen.fillStyle = ofVersion(each.version);
      pen.fillRect(left, TOP, wide, this.height - AXIS - TOP);
      pen.globalAlpha = 1;
    }
    const high = Math.max(...this.totals.filter(each => this.x(each.at) >= LEFT).map(each => each.rate), 1);
    this.area(this.totals, TOP, FLEET, high, () => faint);
    this.label("tokens/s", TOP + 12);
    this.label(number(high), TOP + 28);
    let top = TOP + FLEET + GAP;
    for (const [name, lane] of [...this.lanes].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }))) {
      this.lane(name, lane, top);
      top += LANE + GAP;
    }
  }

  lane(name, lane, top) {
    const pen = this.pen, seen = lane.rates.filter(each => this.x(each.at) >= LEFT);
    const high = Math.max(...seen.map(each => each.rate), 1);
    const shown = lane.versions.filter(each => this.x(each.to) >= LEFT);
    const versionAt = at => shown.findLast(each => each.from < at)?.version ?? shown[0]?.version ?? 0;
    this.area(lane.rates, top, LANE - BAND - 2, high, at => ofVersion(versionAt(at)));
    this.label(name, top + 11, true);
    this.label(number(high), top + 27);
    for (const span of shown) paintSpan(pen, this.box(span, top + LANE - BAND, BAND), span, "v" + span.version, this.look);
    for (const span of lane.states)
      if (span.kind && this.x(span.to) >= LEFT)
        paintSpan(pen, this.box(span, top, LANE - (span.kind === "gone" ? 0 : BAND + 2)), span, span.kind, this.look);
  }

  box(span, top, tall) {
    const left = Math.max(this.x(span.from), LEFT);
    return { left, top, wide: Math.max(this.x(span.to) - left, 1), tall };
  }

  // Steps under which the colour of the moment stands.
  area(points, top, tall, high, colourAt) {
    const pen = this.pen;
    for (let n = 1; n < points.length; n++) {
      const right = this.x(points[n].at), left = Math.max(this.x(points[n - 1].at), LEFT);
      if (right <= LEFT || !points[n].rate) continue;
      const height = points[n].rate / high * (tall - 2);
      pen.fillStyle = colourAt(points[n].at);
      pen.globalAlpha = .55;
      pen.fillRect(left, top + tall - height, right - left + .4, height);
      pen.globalAlpha = 1;
      pen.fillRect(left, top + tall - height, right - left + .4, 1.5);
    }
  }

  axis() {
    const pen = this.pen, step = [5, 10, 15, 30, 60, 180].find(each => this.window_s / each <= 6);
    for (let ago = 0; ago <= this.window_s; ago += step) {
      const at = Math.round(this.x(this.now_s - ago)) - .5;
      pen.globalAlpha = .25;
      pen.fillStyle = this.look.faint;
      pen.fillRect(at, TOP, 1, this.height - AXIS - TOP);
      pen.globalAlpha = 1;
      pen.textAlign = ago ? "center" : "right";
      pen.textBaseline = "middle";
      if (ago < this.window_s || !ago) pen.fillText(ago ? "−" + seconds(ago) : "now", ago ? at : at + 1, this.height - 8);
    }
  }

  label(text, at, strong = false) {
    const pen = this.pen;
    pen.font = (strong ? "600 12px" : "11px") + " system-ui, sans-serif";
    pen.fillStyle = strong ? this.look.ink : this.look.faint;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(text.length > 9 ? text.slice(0, 8) + "…" : text, LEFT - 8, at);
    pen.font = "11px system-ui, sans-serif";
  }

  point(event) {
    const tip = $("tip"), at = this.now_s - (1 - (event.offsetX - LEFT) / (this.width - LEFT - RIGHT)) * this.window_s;
    const names = [...this.lanes.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const name = names[Math.floor((event.offsetY - TOP - FLEET - GAP) / (LANE + GAP))];
    const points = name ? this.lanes.get(name).rates : this.totals;
    const point = points.find(each => each.at >= at);
    const within = each => each.from <= at && at <= each.to;
    tip.hidden = !point || event.offsetX < LEFT;
    if (tip.hidden) return;
    const lane = this.lanes.get(name), state = lane?.states.find(within)?.kind, version = lane?.versions.find(within)?.version;
    tip.textContent = [name ?? "fleet", version === undefined ? "" : "v" + version, state, number(point.rate) + " tokens/s",
      seconds(this.now_s - at) + " ago"].filter(Boolean).join(", ");
    const left = this.canvas.offsetLeft + event.offsetX;
    tip.style.left = Math.min(left + 12, Math.max(this.width - tip.offsetWidth, 0)) + "px";
    tip.style.top = this.canvas.offsetTop + event.offsetY + 14 + "px";
  }
}

// The last span goes on, or another begins where it ends.
function extend(spans, now, now_s) {
  const last = spans.at(-1);
  if (last && now_s - last.to < 5) last.to = now_s;
  if (!last || last.kind !== now.kind || last.version !== now.version)
    spans.push({ ...now, from: last?.to ?? now_s, to: now_s });
}

function trim(points, now_s, end) {
  while (points.length && now_s - points[0][end] > KEPT_S) points.shift();
}
