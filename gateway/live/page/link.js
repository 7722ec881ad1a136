// The connection to the gateway: server-sent events over fetch, so that a key goes in a header and
// never in an address. Tells `told` each event, and `changed` how the connection is.
const FIRST_S = 0.5, LONGEST_S = 8;

async function* eventsOf(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();  // a slow page reads late, and is told what it missed
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

export class Link {
  constructor(told, changed) {
    this.told = told;
    this.changed = changed;
    this.match = "";
    this.key = sessionStorage.getItem("key") ?? "";
    this.round = 0;
  }

  use(key) {
    this.key = key;
    sessionStorage.setItem("key", key);
    this.open();
  }

  // Begin anew; the connection before ends.
  async open() {
    this.abort?.abort();
    const round = ++this.round;
    for (let wait_s = FIRST_S; round === this.round; wait_s = Math.min(2 * wait_s, LONGEST_S)) {
      this.abort = new AbortController();
      const began = Date.now();
      const why = await this.read(this.abort.signal, round);
      if (round !== this.round || why === null) return;
      if (Date.now() - began > 5000) wait_s = FIRST_S;
      this.changed("lost", why);
      await new Promise(done => setTimeout(done, wait_s * 1000));
    }
  }

  // Why it ended; null: only a person can help.
  async read(signal, round) {
    try {
      const headers = this.key ? { Authorization: "Bearer " + this.key } : {};
      const query = this.match ? "?match=" + encodeURIComponent(this.match) : "";
      const reply = await fetch("live" + query, { headers, signal, cache: "no-store", credentials: "omit" });
      if (!reply.ok) {
        const problem = (await reply.json().catch(() => null))?.error?.message ?? reply.statusText;
        if (reply.status !== 401) return problem;
        sessionStorage.removeItem("key");
        this.changed("locked", this.key ? problem : "");
        this.key = "";
        return null;
      }
      this.changed("live", "");
      for await (const event of eventsOf(reply)) {
        if (round !== this.round) return null;
        if (event.error) return event.error.message;
        this.told(event);
      }
      return "the gateway has ended the connection";
    } catch (error) {
      return error.name === "AbortError" ? null : "the gateway does not answer";
    }
  }
}
