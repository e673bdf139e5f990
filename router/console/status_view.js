// The numbers of the cluster, brought up to date every two seconds while somebody can see them.

import { Meters, count } from "./meter.js";
import { Throughput } from "./throughput.js";

const POLL_MS = 2000;
const by = (id) => document.getElementById(id);

export class StatusView {
  #api;
  #onStatus;
  #onRefused;
  #timer = null;
  #isStopped = false;
  #throughput = new Throughput();
  #kvTiers = new Meters(by("kv-tiers"));
  #limits = new Meters(by("limits"));
  #onVisibility = () => this.#resume();

  /** `onRefused` hears of a key that is no longer accepted. */
  constructor(api, { onStatus, onRefused }) {
    this.#api = api;
    this.#onStatus = onStatus;
    this.#onRefused = onRefused;
    document.addEventListener("visibilitychange", this.#onVisibility);
  }

  start(status) {
    this.#show(status);
    this.#schedule();
  }

  stop() {
    this.#isStopped = true;
    clearTimeout(this.#timer);
    document.removeEventListener("visibilitychange", this.#onVisibility);
    this.#kvTiers.update([]);
    this.#limits.update([]);
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (!this.#isStopped && !document.hidden) {
      this.#timer = setTimeout(() => this.#poll(), POLL_MS);
    }
  }

  #resume() {
    this.#throughput.pause();
    this.#schedule();
  }

  async #poll() {
    try {
      const status = await this.#api.status();
      if (!this.#isStopped) this.#show(status);
    } catch (error) {
      if (this.#isStopped) return;
      if (error.status === 401) return this.#onRefused(error);
      this.#showUnreachable(error);
    }
    this.#schedule();
  }

  #show(status) {
    by("console").classList.remove("stale");
    showHealth(status.ready ? "ready" : "not-ready", healthText(status));
    by("about").textContent = aboutText(status);
    this.#showEngine(status.engine);
    this.#kvTiers.update(status.kv_tiers.map(tierMeter));
    this.#showLimits(status);
    this.#onStatus(status);
  }

  #showUnreachable(error) {
    by("console").classList.add("stale");
    this.#throughput.pause();
    showHealth("unreachable", error.message);
  }

  #showEngine(engine) {
    this.#throughput.add(engine.completion_tokens_total, performance.now());
    const rate = this.#throughput.tokensPerS;
    by("tokens-per-s").textContent = rateText(rate);
    this.#throughput.draw(by("sparkline-line"), by("sparkline-area"));
    by("num-running").textContent = count(engine.num_running);
    by("num-waiting").textContent = count(engine.num_waiting);
    by("requests-note").textContent = `${count(engine.preemptions_total)} preempted so far`;
    const { cached_tokens_total: cached, prompt_tokens_total: prompt } = engine;
    by("hit-share").textContent = prompt ? `${((cached / prompt) * 100).toFixed(1)} %` : "–";
    by("hit-note").textContent = `${count(cached)} of ${count(prompt)} were cached`;
  }

  #showLimits({ limits, limits_reason: reason }) {
    const entries = Object.entries(limits ?? {}).filter(([, limit]) => limit !== null);
    by("limits-card").hidden = !entries.length && !reason;
    by("limits-reason").textContent = reason;
    this.#limits.update(entries.map(limitMeter));
  }
}

function rateText(rate) {
  if (rate === null) return "–";
  return rate < 100 ? rate.toFixed(1) : count(Math.round(rate));
}

function showHealth(state, text) {
  by("health").dataset.state = state;
  by("health-text").textContent = text;
}

function healthText({ ready, reason, models }) {
  const name = models[0]?.display_name ?? "no model";
  return ready ? `${name} is ready` : `${name} is not ready: ${reason}`;
}

function aboutText({ version, uptime_s: uptime, team }) {
  return [`team ${team}`, version && `v${version}`, `up ${duration(uptime)}`]
    .filter(Boolean)
    .join(" · ");
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}

function tierMeter({ name, num_used_blocks: used, num_blocks: total }) {
  const text = total ? `${count(used)} used, ${count(total - used)} free` : "unknown";
  return { name, label: `${name} blocks`, used, total, text };
}

function limitMeter([name, { limit, remaining }]) {
  const used = limit - remaining;
  const text = `${count(used)} of ${count(limit)} used`;
  return { name, label: name.replaceAll("_", " "), used, total: limit, text };
}
