// The playground: one conversation, kept here and sent whole with every turn.

import { ApiError } from "./api.js";
import { AnswerClock, Turn } from "./turn.js";

const by = (id) => document.getElementById(id);

export class Chat {
  #api = null;
  #messages = [];
  #abort = null;

  constructor() {
    by("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(by("prompt").value);
    });
    by("prompt").addEventListener("keydown", (event) => this.#onKey(event));
    by("stop").addEventListener("click", () => this.stop());
    by("new-conversation").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    for (const example of document.querySelectorAll(".example")) {
      example.addEventListener("click", () => this.#send(example.textContent));
    }
  }

  start(api) {
    this.#api = api;
    this.clear();
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#messages = [];
    by("transcript").replaceChildren(by("empty"));
    by("empty").hidden = false;
    by("prompt").focus();
  }

  showModels(models) {
    const names = models.flatMap(({ id, aliases, can_chat: canChat }) =>
      canChat ? [id, ...aliases] : [],
    );
    const select = by("model");
    if (names.join("\n") === [...select.options].map(({ value }) => value).join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  #onKey(event) {
    // While an input method composes a character, Enter confirms it.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    by("composer").requestSubmit();
  }

  async #send(prompt) {
    if (this.#abort || !prompt.trim()) return;
    const conversation = this.#messages;
    const answer = new Turn("assistant");
    const question = new Turn("user", prompt);
    by("empty").hidden = true;
    by("transcript").append(question.element, answer.element);
    by("prompt").value = "";
    conversation.push({ role: "user", content: prompt });
    await this.#answer(answer);
    if (answer.text) conversation.push({ role: "assistant", content: answer.text });
    else this.#takeBack(conversation, prompt);
    scrollToEnd();
  }

  async #answer(turn) {
    const clock = new AnswerClock();
    const abort = new AbortController();
    this.#setRunning(abort, turn);
    try {
      for await (const event of this.#api.messageEvents(this.#body(), abort.signal)) {
        this.#show(event, turn, clock);
      }
    } catch (error) {
      if (error.name === "AbortError") clock.stopped();
      else turn.fail(error instanceof ApiError ? error.inWords : String(error));
    } finally {
      turn.note(clock.toString());
      this.#setRunning(null, turn);
    }
  }

  #show(event, turn, clock) {
    if (event.type === "content_block_delta") {
      const follows = isAtEnd();
      clock.text();
      turn.append(event.delta.text);
      if (follows) scrollToEnd();
    } else if (event.type === "message_delta") {
      clock.finished(event);
    }
  }

  #body() {
    const system = by("system").value;
    const temperature = by("temperature").valueAsNumber;
    return {
      model: by("model").value,
      max_tokens: by("max-tokens").valueAsNumber,
      ...(Number.isNaN(temperature) ? {} : { temperature }),
      ...(system.trim() ? { system } : {}),
      messages: this.#messages,
    };
  }

  /** A turn without an answer is not part of the conversation: its text goes back to be edited. */
  #takeBack(conversation, prompt) {
    conversation.pop();
    if (conversation === this.#messages && !by("prompt").value) by("prompt").value = prompt;
  }

  #setRunning(abort, turn) {
    this.#abort = abort;
    turn.isStreaming = abort !== null;
    by("send").hidden = abort !== null;
    by("stop").hidden = abort === null;
    by("transcript").setAttribute("aria-busy", abort !== null);
    if (abort) scrollToEnd();
  }
}

function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = by("transcript");
  return scrollHeight - scrollTop - clientHeight < 40;
}

function scrollToEnd() {
  by("transcript").scrollTop = by("transcript").scrollHeight;
}
