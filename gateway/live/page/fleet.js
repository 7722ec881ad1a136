// The fleet at one moment: totals, workers, sessions, weight updates.
import { $, bar, make, number, seconds, versionChip, versionStyle } from "./elements.js";

const GOOD = ["ready", "updating"], OLD_BEAT_MS = 1500, PHASES = ["preparing", "recording", "committing", "committed"];
const KEPT_UPDATES = 6;

export function showTotals(frame) {
  const states = {};
  for (const row of frame.rows) states[row.state] = (states[row.state] ?? 0) + 1;
  const nAway = Object.keys(frame.absent).length;
  const committed = Object.entries(frame.committed).map(([policy, v]) =>
    (policy === "default" ? "" : policy + " ") + "v" + v).join(", ");
  const facts = [
    ["tokens/s", number(frame.tokens_per_s)],
    ["weights", committed || "none"],
    ["workers", (states.ready ?? 0) + (states.updating ?? 0) + " of " + (frame.rows.length + nAway),
     nAway ? "bad" : frame.rows.some(row => !GOOD.includes(row.state)) ? "warn" : ""],
    ["running", frame.n_running + " of " + frame.n_slots],
    ["queue", number(frame.n_queued), frame.n_queued ? "warn" : ""],
    ["sessions", number(frame.n_sessions)],
    ["clients", number(frame.n_clients)],
    ["router", "epoch " + frame.router_epoch, frame.is_recovering ? "warn" : ""],
  ];
  if (frame.pause) facts.unshift(["fleet", "paused: " + frame.pause, "warn"]);
  $("totals").replaceChildren(...facts.map(([name, value, className]) =>
    make("div", { className }, make("dt", { text: name }), make("dd", { text: value, title: value }))));
}

export function showWorkers(frame) {
  const rows = frame.rows.flatMap(row => {
    const behind = row.n_behind ? make("span", { className: "faint", text: " −" + row.n_behind, title: "versions behind" }) : "";
    const cells = [
      ["", row.name, "", row.name],
      ["", make("span", { text: row.state, className: "chip " + (GOOD.includes(row.state) ? "good" : row.state === "paused" || row.state === "asleep" ? "warn" : "bad") })],
      ["", make("span", {}, versionChip(row.version), behind)],
      ["running", make("span", { className: "load" }, bar(row.n_running / Math.max(row.slots, 1)), row.n_running + "/" + row.slots)],
      ["tok/s", row.tokens_per_s === null ? "–" : number(row.tokens_per_s), "n"],
      ["sessions", number(row.n_sessions), "n"],
      ["stall", row.stalled_ms ? number(row.stalled_ms, 1) + " ms" : "–", "n"],
      ["cache", row.cache_used === null ? "–" : Math.round(row.cache_used * 100) + " %", "n"],
      ["beat", make("span", { text: number(row.beat_age_ms) + " ms", className: row.beat_age_ms > OLD_BEAT_MS ? "chip bad" : "" }), "n"],
    ];
    const why = Object.entries(row.blocked_by).map(([word, sentence]) => word + ": " + sentence);
    if (row.problem) why.push(row.problem);
    return [tr(cells), ...why.map(reason)];
  });
  const away = Object.entries(frame.absent).map(([name, why]) => [name, "gone", why]).concat(
    Object.entries(frame.troubled).filter(([name]) => !(name in frame.absent) && !frame.rows.some(row => row.name === name))
      .map(([name, why]) => [name, "failing", why]));
  for (const [name, what, why] of away) {
    const row = tr([["", name, "", name], ["", make("span", { text: what, className: "chip bad" })]], "gone");
    row.lastElementChild.colSpan = 8;
    rows.push(row, reason(why));
  }
  $("workers").querySelector("tbody").replaceChildren(...rows);
}

function tr(cells, className = "") {
  const row = make("tr", { className });
  for (const [name, content, kind, title] of cells)
    row.append(make("td", { className: kind, title, data: name ? { name } : {} }, content));
  return row;
}
function reason(why) {
  const cell = make("td", { text: why });
  cell.colSpan = 9;
  return make("tr", { className: "why" }, cell);
}

export function showSessions(frame) {
  const most = Math.max(...frame.rows.map(row => row.n_sessions), 1);
  $("n-sessions").textContent = frame.n_sessions + " open";
  $("places").replaceChildren(...frame.rows.map(row => make("div", { className: "place" },
    make("b", { text: row.name }), bar(row.n_sessions / most, ofVersion(row.version)), make("span", { text: row.n_sessions }))));
  $("moves").replaceChildren(...Object.entries(frame.sessions).filter(([, n]) => n).map(([name, n]) =>
    make("span", { className: "chip", text: name.replace("sessions_", "").replaceAll("_", " ") + " " + number(n) })));
}

// Updates under way with their phases, and those that ended while the page was open.
export class Updates {
  constructor() { this.seen = new Map(); this.committed = null; }

  show(frame, now_s) {
    const here = new Set();
    for (const told of frame.updates) {
      const update = { n_prepared: 0, n_active: 0, is_catch_up: false, ...told };
      const key = [update.policy, update.version, update.is_catch_up].join(" ");
      here.add(key);
      const known = this.seen.get(key) ?? { began_s: now_s - update.age_ms / 1000, phases: [] };
      if (known.phases.at(-1)?.[0] !== update.phase) known.phases.push([update.phase, now_s]);
      this.seen.set(key, { ...known, ...update, ended_s: null });
    }
    for (const [key, known] of this.seen) if (!here.has(key)) known.ended_s ??= now_s;
    for (const [policy, version] of Object.entries(frame.committed)) {
      const key = [policy, version, false].join(" ");
      if (this.committed && this.committed[policy] !== version && !this.seen.has(key))  // faster than we look
        this.seen.set(key, { policy, version, phases: [], n_targets: frame.rows.filter(r => r.policy === policy).length, ended_s: now_s, began_s: null });
    }
    this.committed = frame.committed;
    while (this.seen.size > KEPT_UPDATES) this.seen.delete(this.seen.keys().next().value);
    $("updates").replaceChildren(...[...this.seen.values()].reverse().map(each => this.item(each, frame, now_s)));
  }

  item(update, frame, now_s) {
    const isIn = (frame.committed[update.policy] ?? -1) >= update.version;
    const isOver = update.ended_s !== null;
    const took = update.began_s === null ? "" : " in " + seconds((update.ended_s ?? now_s) - update.began_s);
    const who = (update.policy === "default" ? "" : update.policy + " ") + (update.is_catch_up ? "catching up " : "");
    const told = isOver ? (isIn ? "committed" + took + ", " : "given up" + took + ", ") + seconds(now_s - update.ended_s) + " ago"
      : update.phase + ", " + update.n_prepared + " of " + update.n_targets + " prepared, " + update.n_active + " active";
    const item = make("li", { style: versionStyle(update.version) }, who, versionChip(update.version), " ",
      make("span", { text: told, className: isOver && !isIn ? "chip bad" : "faint" }));
    if (isOver) return item;
    const at = PHASES.indexOf(update.phase);
    const part = (update.phase === "preparing" ? update.n_prepared : update.n_active) / Math.max(update.n_targets ?? 1, 1);
    item.append(make("div", { className: "phases" }, ...PHASES.map((phase, n) => make("span", {
      className: n < at ? "done" : n === at ? "now" : "", text: phase, style: { "--part": part } }, make("i")))));
    return item;
  }
}
