// Streams as they are sampled: each token shaded by how surprising it was, underlined in the colour
// of the version that sampled it.
import { $, make, versionChip, versionStyle } from "./elements.js";

const KEPT_TOKENS = 250, SURPRISE = 7;
const SIGNS = { "\n": "↵\n", "\t": "→\t", "": "·" };

class Card {
  constructor() {
    this.tokens = [];
    this.name = make("b");
    this.facts = make("span", { className: "faint" });
    this.body = make("div");
    this.head = make("header");
    // In a reversed column the end stays in sight by itself.
    this.frame = make("div", { className: "tokens" }, this.body);
    this.frame.tabIndex = 0;
    this.element = make("article", {}, this.head, this.frame);
  }

  begin(rid) {
    this.rid = rid;
    this.tokens = [];
    this.version = null;
    this.attempt = null;
    this.body.replaceChildren();
    this.frame.setAttribute("aria-label", "tokens of " + rid);
    this.element.classList.remove("ended");
    this.n = 0;
  }

  add(stream) {
    while (this.tokens.at(-1)?.index >= stream.start) this.tokens.pop().parts.forEach(part => part.remove());
    const next = this.tokens.length ? this.tokens.at(-1).index + 1 : 0;
    if (stream.ids.length && stream.start > next)
      this.body.append(make("em", { text: `(${stream.start - next} tokens not shown) ` }));
    this.version = this.tokens.at(-1)?.version ?? null;
    const fragment = document.createDocumentFragment();
    for (let n = Math.max(stream.ids.length - KEPT_TOKENS, 0); n < stream.ids.length; n++) fragment.append(...this.token(stream, stream.ids[n], n));
    this.body.append(fragment);
    while (this.tokens.length > KEPT_TOKENS) this.tokens.shift().parts.forEach(part => part.remove());
    this.n = Math.max(stream.start + stream.ids.length, this.n);
    const ended = stream.end === null ? "" : stream.end || "end not heard";
    this.element.classList.toggle("ended", stream.end !== null);
    const version = this.tokens.at(-1)?.version;
    if (version !== undefined) this.element.style.setProperty("--v", ofVersion(version));
    this.attempt ??= stream.attempt.join();
    const [client, serial] = [stream.rid.slice(0, stream.rid.lastIndexOf("/") + 1), stream.rid.slice(stream.rid.lastIndexOf("/") + 1)];
    this.name.textContent = client + (serial.length > 8 ? "…" + serial.slice(-6) : serial);
    this.name.title = stream.rid;
    this.facts.textContent = this.n + " tokens" + (ended ? ", " + ended : "");
    this.head.replaceChildren(this.name, make("span", { text: stream.worker, className: "chip" }),
      ...(version === undefined ? [] : [versionChip(version)]),
      ...(stream.attempt.join() === this.attempt ? [] : [make("span", { className: "chip warn", text: "again", title: "its worker was lost: it went on with another attempt" })]), this.facts);
  }

  token(stream, id, n) {
    const version = stream.versions[n], logprob = stream.logprobs[n], parts = [];
    if (this.version !== null && this.version !== version) parts.push(versionChip(version));
    this.version = version;
    const text = stream.texts ? SIGNS[stream.texts[n]] ?? stream.texts[n] : String(id);
    const likely = logprob === null ? "" : `, ${(100 * Math.exp(logprob)).toPrecision(3)} % (logprob ${logprob.toFixed(3)})`;
    parts.push(make("span", { text, className: stream.texts ? "" : "id", title: `token ${id}${likely}, v${version}`,
      style: { "--s": Math.min(Math.max(-(logprob ?? 0) / SURPRISE, 0), 1), "--v": ofVersion(version) } }));
    this.tokens.push({ index: stream.start + n, version, parts });
    return parts;
  }
}

export class Streams {
  constructor(nCards) {
    this.nCards = nCards;
    this.cards = new Map();
    $("cards").dataset.empty = "Nothing is sampled as a stream now.";
  }

  show(streams) {
    for (const stream of streams) {
      const card = this.cards.get(stream.rid) ?? this.place(stream.rid);
      card.add(stream);
    }
  }

  // A new card, or that of the stream that ended first.
  place(rid) {
    let card = this.cards.size >= this.nCards && [...this.cards.values()].find(each => each.element.classList.contains("ended"));
    if (card) this.cards.delete(card.rid);
    else $("cards").append((card = new Card()).element);
    card.begin(rid);
    this.cards.set(rid, card);
    return card;
  }

  clear() {
    this.cards.clear();
    $("cards").replaceChildren();
  }
}
