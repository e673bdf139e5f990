// One turn of the conversation on the page. Text goes in as text, never as markup.

import { count, element } from "./meter.js";

const ENDINGS = {
  max_tokens: "cut at max tokens",
  model_context_window_exceeded: "context window full",
  stop_sequence: "stop sequence",
};

export class Turn {
  #text = document.createTextNode("");
  #note = element("p", "turn-note");

  constructor(role, text = "") {
    this.element = element("article", `turn ${role}`);
    const body = element("div", "turn-text");
    body.append(this.#text);
    this.element.append(
      element("p", "turn-who", role === "user" ? "You" : "Model"),
      body,
      ...(role === "user" ? [] : [this.#note]),
    );
    this.append(text);
  }

  get text() {
    return this.#text.data;
  }

  append(text) {
    this.#text.appendData(text);
  }

  set isStreaming(isStreaming) {
    this.element.classList.toggle("streaming", isStreaming);
  }

  note(text) {
    this.#note.textContent = text;
  }

  fail(message) {
    this.element.append(element("p", "error", message));
  }
}

/** The clock and the usage of one answer; times in milliseconds of performance.now. */
export class AnswerClock {
  #sent_ms = performance.now();
  #first_ms = null;
  #last_ms = null;
  #usage = null;
  #ending = null;

  text() {
    this.#last_ms = performance.now();
    this.#first_ms ??= this.#last_ms;
  }

  finished({ usage, delta }) {
    this.#usage = usage;
    this.#ending = ENDINGS[delta.stop_reason] ?? null;
  }

  stopped() {
    this.#ending = "stopped";
  }

  toString() {
    const ttft =
      this.#first_ms === null
        ? null
        : `first token ${duration(this.#first_ms - this.#sent_ms)}`;
    return [ttft, this.#rate(), this.#tokens(), this.#ending].filter(Boolean).join(" · ");
  }

  /** Tokens after the first over the time after the first. */
  #rate() {
    const decode_ms = this.#last_ms - this.#first_ms;
    if (!this.#usage || this.#usage.output_tokens < 2 || !(decode_ms > 0)) return null;
    const rate = ((this.#usage.output_tokens - 1) * 1000) / decode_ms;
    return `${rate < 100 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`;
  }

  #tokens() {
    if (!this.#usage) return null;
    const { input_tokens: fresh, cache_read_input_tokens: cached, output_tokens: out } = this.#usage;
    return `${count(fresh + cached)} in (${count(cached)} cached), ${count(out)} out`;
  }
}

function duration(milliseconds) {
  return milliseconds < 1000
    ? `${milliseconds.toFixed(0)} ms`
    : `${(milliseconds / 1000).toFixed(2)} s`;
}
