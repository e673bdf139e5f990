// Server-sent events of a fetch body: EventSource can send neither a body nor a key.
// https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation

/** Yields the JSON of every event's data. Comments, ids and event names are dropped. */
export async function* decodeEvents(body) {
  let data = [];
  for await (const line of lines(body)) {
    if (line === "") {
      if (data.length) yield JSON.parse(data.join("\n"));
      data = [];
    } else if (line.startsWith("data:")) {
      data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const line of parts) yield line.replace(/\r$/, "");
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
