// The router's API as this page uses it. The key lives in a private field and travels in a header.

import { decodeEvents } from "./event_stream.js";

const ANTHROPIC_VERSION = "2023-06-01";

export class ApiError extends Error {
  constructor(message, { status = 0, retryAfterS = null, requestId = "" } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
    this.requestId = requestId;
  }

  get inWords() {
    const retry = this.retryAfterS === null ? "" : ` Try again in ${this.retryAfterS} s.`;
    const id = this.requestId ? ` (${this.requestId})` : "";
    return `${this.message}${retry}${id}`;
  }
}

export class Api {
  #key;

  constructor(key) {
    // Other characters cannot travel in a header: fetch would throw something nobody understands.
    if (!/^[\x21-\x7e]+$/.test(key)) {
      throw new ApiError("An API key has no spaces and only ASCII characters. Copy it again.");
    }
    this.#key = key;
  }

  async status() {
    return (await this.#fetch("v1/status")).json();
  }

  /** The events of one streamed message. Throws ApiError, and AbortError after `signal`. */
  async *messageEvents(body, signal) {
    const response = await this.#fetch("v1/messages", {
      method: "POST",
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    });
    let hasStopped = false;
    try {
      for await (const event of decodeEvents(response.body)) {
        if (event.type === "error") throw new ApiError(event.error.message);
        hasStopped = event.type === "message_stop";
        yield event;
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw brokenStream();
    }
    if (!hasStopped) throw brokenStream();
  }

  async #fetch(path, init = {}) {
    const headers = {
      "x-api-key": this.#key,
      "anthropic-version": ANTHROPIC_VERSION,
      ...(init.body ? { "content-type": "application/json" } : {}),
    };
    let response;
    try {
      response = await fetch(path, { ...init, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The router does not answer. Check that it runs and can be reached.");
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const retryAfter = response.headers.get("retry-after");
  return new ApiError(body?.error?.message ?? `The router answered with status ${response.status}.`, {
    status: response.status,
    retryAfterS: retryAfter === null ? null : Number(retryAfter),
    requestId: response.headers.get("request-id") ?? "",
  });
}

function brokenStream() {
  return new ApiError("The connection broke before the answer was complete. Send it again.");
}
