// Signing in and out. The key stays in memory; in sessionStorage only when its owner ticks the box.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { StatusView } from "./status_view.js";

const STORED_KEY = "flashray-key";
const by = (id) => document.getElementById(id);
const chat = new Chat();
let statusView = null;

async function connect(key) {
  by("connect").disabled = true;
  try {
    const api = new Api(key);
    const status = await api.status();
    if (by("remember").checked) sessionStorage.setItem(STORED_KEY, key);
    open(api, status);
  } catch (error) {
    close(error);
  } finally {
    by("connect").disabled = false;
  }
}

function open(api, status) {
  by("key").value = "";
  by("key-error").textContent = "";
  setOpen(true);
  statusView = new StatusView(api, {
    onStatus: ({ models }) => chat.showModels(models),
    onRefused: close,
  });
  statusView.start(status);
  chat.start(api);
}

function close(error = null) {
  statusView?.stop();
  statusView = null;
  chat.clear();
  if (!error || error.status === 401) sessionStorage.removeItem(STORED_KEY);
  by("key-error").textContent = error ? (error.inWords ?? String(error)) : "";
  setOpen(false);
  by("key").focus();
}

function setOpen(isOpen) {
  by("sign-in").hidden = isOpen;
  for (const id of ["console", "health", "about", "sign-out"]) by(id).hidden = !isOpen;
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  connect(by("key").value.trim());
});
by("sign-out").addEventListener("click", () => close());

const storedKey = sessionStorage.getItem(STORED_KEY);
if (storedKey) {
  by("remember").checked = true;
  connect(storedKey);
}
