// A labelled bar: so much used of so much.

const numbers = new Intl.NumberFormat("en");

export function count(value) {
  return numbers.format(value);
}

export class Meter {
  constructor(label) {
    this.element = element("div", "meter");
    this.text = element("span", "meter-text");
    this.track = element("div", "track");
    this.fill = element("div", "fill");
    this.track.setAttribute("role", "meter");
    this.track.setAttribute("aria-label", label);
    this.track.setAttribute("aria-valuemin", "0");
    const top = element("div", "meter-top");
    top.append(element("span", "meter-label", label), this.text);
    this.track.append(this.fill);
    this.element.append(top, this.track);
  }

  update(used, total, text) {
    const share = total > 0 ? Math.min(1, Math.max(0, used / total)) : 0;
    this.text.textContent = text;
    this.fill.style.width = `${share * 100}%`;
    this.track.classList.toggle("nearly-full", share >= 0.9);
    this.track.setAttribute("aria-valuemax", total);
    this.track.setAttribute("aria-valuenow", used);
    this.track.setAttribute("aria-valuetext", text);
  }
}

/** Meters by name, kept between updates so that bars glide instead of blinking. */
export class Meters {
  #container;
  #byName = new Map();

  constructor(container) {
    this.#container = container;
  }

  update(entries) {
    const names = new Set(entries.map((entry) => entry.name));
    for (const [name, meter] of this.#byName) {
      if (names.has(name)) continue;
      meter.element.remove();
      this.#byName.delete(name);
    }
    for (const { name, label, used, total, text } of entries) {
      if (!this.#byName.has(name)) {
        this.#byName.set(name, new Meter(label));
        this.#container.append(this.#byName.get(name).element);
      }
      this.#byName.get(name).update(used, total, text);
    }
  }
}

export function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}
