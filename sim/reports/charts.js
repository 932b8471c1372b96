// Makes the charts of a page answer: values under the pointer, a part of a chart enlarged, series
// hidden by their legend. What a chart shows is in its SVG alone, which is whole without this
// script; numbers told here are read back from its coordinates, and rounded to what those hold.
"use strict";

const COORDINATE = 0.01; // the last place that coordinates are written to, pixels of the drawing
const DRAG_MIN = 8; // below it a drag is a click, pixels of the drawing
const NEAR = 24; // as far as a dot answers, pixels of the drawing
const ENLARGED_MAX = 1000; // beyond it coordinates of two places would show as steps
const SVG = document.querySelector("svg")?.namespaceURI;

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// An axis of sim/reports/charts.py, of which the window [from, to], shares of its length, is shown.
class Axis {
  constructor({ low, high, unit, title, logarithmic, whole }) {
    Object.assign(this, { low, high, unit, title, logarithmic, step: whole ? 1 : 0 });
    this.whole();
  }

  whole() {
    this.from = 0;
    this.to = 1;
  }

  // A share of the whole length as one of what is shown, and back.
  shown = (share) => (share - this.from) / (this.to - this.from);
  share = (shown) => this.from + shown * (this.to - this.from);

  value = (share) =>
    this.logarithmic
      ? this.low * (this.high / this.low) ** share
      : this.low + share * (this.high - this.low);

  shareOf = (value) =>
    this.logarithmic
      ? Math.log(value / this.low) / Math.log(this.high / this.low)
      : (value - this.low) / (this.high - this.low);

  // A value as exact as a coordinate tells it, at most four digits.
  told(share, length) {
    const value = this.value(share);
    const off = Math.abs(this.value(share + COORDINATE / length) - value);
    const places = Math.floor(-Math.log10(off || 1));
    const digits = value ? 3 - Math.floor(Math.log10(Math.abs(value))) : 0;
    const number = value.toLocaleString("en-US", {
      maximumFractionDigits: clamp(Math.min(places, digits), 0, 12),
    });
    return this.unit ? `${number} ${this.unit}` : number;
  }

  // Round values between the ends of what is shown, with their labels.
  marks() {
    const low = this.value(this.from);
    const high = this.value(this.to);
    const rough = (high - low) / 5;
    let step = 10 ** Math.floor(Math.log10(rough));
    step = Math.max(this.step, step * [1, 2, 5, 10].find((size) => size * step >= rough));
    const even = [];
    for (let at = Math.ceil(low / step); at <= high / step; at += 1) even.push([at * step, step]);
    const growing = [];
    if (this.logarithmic)
      for (let decade = Math.floor(Math.log10(low)); 10 ** decade <= high; decade += 1)
        for (const size of high > 100 * low ? [1] : [1, 2, 5])
          growing.push([size * 10 ** decade, 10 ** decade]);
    const found = growing.filter(([value]) => low <= value && value <= high);
    // Less than a decade or so is nearly straight.
    return (found.length < 3 ? even : found).map(([value, exact]) => {
      const places = clamp(-Math.floor(Math.log10(exact) + 1e-9), 0, 12);
      const label = value.toLocaleString("en-US", { maximumFractionDigits: places });
      return { share: this.shareOf(value), label };
    });
  }
}

function set(mark, attributes) {
  for (const [key, value] of Object.entries(attributes)) mark.setAttribute(key, value);
}

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  set(made, attributes);
  made.textContent = text;
  return made;
}

// What is told of the place under the pointer, in the figure that holds the chart.
class Note {
  constructor(figure) {
    this.figure = figure;
    this.box = document.createElement("div");
    this.box.className = "note";
    this.box.setAttribute("role", "status");
    this.box.hidden = true;
    figure.append(this.box);
  }

  // `lines`: [class of the colour, text]; `x`, `y`: of the pointer in the window.
  tell(lines, x, y) {
    this.box.replaceChildren(
      ...lines.map(([colour, text]) => {
        const line = document.createElement("div");
        if (colour) line.append(Object.assign(document.createElement("i"), { className: colour }));
        line.append(text);
        return line;
      }),
    );
    this.box.hidden = false;
    const around = this.figure.getBoundingClientRect();
    const { width, height } = this.box.getBoundingClientRect();
    // Beside the pointer, on the side where there is more room, never outside the figure.
    const left = x - around.left + (x > around.left + around.width / 2 ? -width - 14 : 14);
    this.box.style.left = `${clamp(left, 4, Math.max(4, around.width - width - 4))}px`;
    this.box.style.top = `${Math.max(4, y - around.top - height - 10)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}

// A chart with two axes.
class Plot {
  constructor(svg, number) {
    const { x, y, left, right, top, bottom } = JSON.parse(svg.dataset.plot);
    Object.assign(this, { svg, left, right, top, bottom, x: new Axis(x), y: new Axis(y) });
    const figure = svg.closest("figure");
    this.note = new Note(figure);
    this.grid = svg.querySelector(".axes");
    this.drawnGrid = [...this.grid.childNodes];
    this.series = [...svg.querySelectorAll("[data-series]")].map((group) => this.read(group));
    this.clip = `plot-${number}`;
    this.cross = element("g", { class: "cross" });
    this.band = element("rect", { class: "band" });
    svg.append(this.cross);
    this.back = document.createElement("button");
    Object.assign(this.back, { type: "button", className: "back", textContent: "Whole chart" });
    this.back.hidden = true;
    this.back.addEventListener("click", () => this.whole());
    svg.after(this.back);
    this.listen();
  }

  // The coordinates of a series as shares of the axes, and what draws them.
  read(group) {
    const shares = (x, y) => [
      (x - this.left) / (this.right - this.left),
      (this.bottom - y) / (this.bottom - this.top),
    ];
    const of = (line) =>
      line
        .getAttribute("points")
        .split(" ")
        .filter(Boolean)
        .map((pair) => shares(...pair.split(",").map(Number)));
    const lines = [...group.querySelectorAll("polyline")].map((mark) => ({
      mark,
      points: of(mark),
      told: mark.dataset.told,
    }));
    const dots = [...group.querySelectorAll("circle")].map((mark) => ({
      mark,
      point: shares(Number(mark.getAttribute("cx")), Number(mark.getAttribute("cy"))),
    }));
    const line = lines.find((one) => one.told === undefined);
    const whiskers = lines.filter((one) => one.told !== undefined);
    const points = line ? line.points : dots.map((one) => one.point);
    const colour = (lines[0] || dots[0])?.mark.getAttribute("class") ?? "";
    return { group, name: group.dataset.name, colour, lines, dots, points, whiskers, line };
  }

  across = (share) => this.left + this.x.shown(share) * (this.right - this.left);
  up = (share) => this.bottom - this.y.shown(share) * (this.bottom - this.top);

  get enlarged() {
    return this.x.to - this.x.from < 1 || this.y.to - this.y.from < 1;
  }

  // Where in the drawing an event is.
  place(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }

  // Where in the window a place of the drawing is.
  inWindow(x, y) {
    const box = this.svg.getBoundingClientRect();
    const scale = box.width / this.svg.viewBox.baseVal.width;
    return [box.left + x * scale, box.top + y * scale];
  }

  listen() {
    const { svg } = this;
    svg.addEventListener("pointermove", (event) => this.move(event));
    svg.addEventListener("pointerdown", (event) => this.press(event));
    svg.addEventListener("pointerup", (event) => this.release(event));
    svg.addEventListener("pointercancel", () => this.forget());
    // What a finger has read stays until it touches something else.
    svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.forget();
    });
    svg.addEventListener("blur", () => this.forget());
    svg.addEventListener("dblclick", (event) => this.closer(...this.place(event)));
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  forget() {
    this.begun = null;
    this.band.remove();
    this.cross.replaceChildren();
    this.note.hide();
  }

  press(event) {
    if (event.button) return;
    const [x, y] = this.place(event);
    if (x < this.left || x > this.right || y < this.top || y > this.bottom) return;
    this.tell(x, y);
    if (event.pointerType === "touch") return; // a finger reads values, and its double tap enlarges
    this.begun = [x, y];
    this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    const [x, y] = this.place(event);
    this.tell(x, y);
    if (!this.begun) return;
    const [from, to, top, bottom] = this.dragged(x, y);
    set(this.band, { x: from, y: top, width: to - from, height: bottom - top });
    this.svg.append(this.band);
  }

  // The part between where the drag began and here: of the whole height if it is hardly upright.
  dragged(x, y) {
    const [beginX, beginY] = this.begun;
    const xs = [beginX, clamp(x, this.left, this.right)].sort((one, other) => one - other);
    const ys = [beginY, clamp(y, this.top, this.bottom)].sort((one, other) => one - other);
    return ys[1] - ys[0] < 3 * DRAG_MIN ? [...xs, this.top, this.bottom] : [...xs, ...ys];
  }

  release(event) {
    if (!this.begun) return;
    const [from, to, top, bottom] = this.dragged(...this.place(event));
    this.begun = null;
    this.band.remove();
    if (to - from < DRAG_MIN) return;
    const width = this.right - this.left;
    const height = this.bottom - this.top;
    this.enlarge(
      [(from - this.left) / width, (to - this.left) / width],
      [(this.bottom - bottom) / height, (this.bottom - top) / height],
    );
  }

  // Shows a part of what is shown, in shares of that.
  enlarge(across, up) {
    for (const [axis, part] of [[this.x, across], [this.y, up]]) {
      const [from, to] = part.map(axis.share);
      if (to - from < 1 / ENLARGED_MAX) continue;
      [axis.from, axis.to] = [clamp(from, 0, 1), clamp(to, 0, 1)];
    }
    this.draw();
  }

  whole() {
    this.x.whole();
    this.y.whole();
    this.draw();
  }

  draw() {
    this.crop();
    const at = ([x, y]) => [this.across(x).toFixed(2), this.up(y).toFixed(2)];
    for (const { group, lines, dots } of this.series) {
      for (const { mark, points } of lines) mark.setAttribute("points", points.map(at).join(" "));
      for (const { mark, point } of dots) {
        const [cx, cy] = at(point);
        set(mark, { cx, cy });
      }
      if (this.enlarged) set(group, { "clip-path": `url(#${this.clip})` });
      else group.removeAttribute("clip-path");
    }
    this.grid.replaceChildren(...(this.enlarged ? this.marks() : this.drawnGrid));
    this.back.hidden = !this.enlarged;
    this.cross.replaceChildren();
    this.note.hide();
  }

  // Nothing may be drawn beyond the axes of an enlarged part.
  crop() {
    this.cropped?.remove();
    if (!this.enlarged) return;
    const { left, right, top, bottom } = this;
    this.cropped = element("clipPath", { id: this.clip });
    this.cropped.append(
      element("rect", { x: left, y: top, width: right - left, height: bottom - top }),
    );
    this.svg.append(this.cropped);
  }

  marks() {
    const { left, right, bottom } = this;
    const up = this.y.marks().flatMap(({ share, label }) => {
      const y = this.up(share);
      return [
        element("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        element("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, label),
      ];
    });
    let free = -Infinity; // labels must not touch
    const across = this.x.marks().flatMap(({ share, label }) => {
      const x = this.across(share);
      const half = label.length * 4 + 4;
      if (x - half < free) return [];
      free = x + half;
      return [element("text", { x, y: bottom + 18, "text-anchor": "middle" }, label)];
    });
    return [...up, ...across, ...this.drawnGrid.slice(-2)];
  }

  // The values of all series that are not hidden at the place `x`, `y` of the drawing.
  tell(x, y) {
    const found = this.found(x, y);
    this.cross.replaceChildren();
    if (!found.length) return this.note.hide();
    const one = found[0];
    const at = this.across(one.point[0]);
    const lines = [["", `${this.x.title || "x"}: ${this.told(this.x, one.point[0], "x")}`]];
    if (one.series.line)
      this.cross.append(element("line", { x1: at, x2: at, y1: this.top, y2: this.bottom }));
    for (const { series, point } of found) {
      const value = this.told(this.y, point[1], "y");
      const whisker = series.whiskers.find(
        ({ points }) => Math.abs(points[0][0] - point[0]) * (this.right - this.left) < 0.1,
      );
      const name = series.name ? `${series.name}: ` : "";
      lines.push([series.colour, `${name}${value}${whisker ? ` (${whisker.told})` : ""}`]);
      const [cx, cy] = [this.across(point[0]), this.up(point[1])];
      if (this.top <= cy && cy <= this.bottom)
        this.cross.append(element("circle", { cx, cy, r: 4.5, class: series.colour }));
    }
    this.note.tell(lines, ...this.inWindow(at, y));
    return undefined;
  }

  told = (axis, share, side) =>
    axis.told(share, side === "x" ? this.right - this.left : this.bottom - this.top);

  // [{series, point}]: of each line the place that it has there, or, if its points are marked, the
  // nearest marked one; of dots without a line the nearest of all, if it is near.
  found(x, y) {
    const seen = this.series.filter((one) => !one.group.hasAttribute("hidden"));
    const inside = ([across, up]) =>
      this.x.from <= across && across <= this.x.to && this.y.from <= up && up <= this.y.to;
    let best = null;
    for (const series of seen)
      for (const { point } of series.dots) {
        const up = series.line ? 0 : this.up(point[1]) - y;
        const distance = Math.hypot(this.across(point[0]) - x, up);
        if (inside(point) && !(best?.distance <= distance)) best = { series, point, distance };
      }
    const lines = seen.filter((one) => one.line);
    if (!lines.length) return best?.distance <= NEAR ? [best] : [];
    if (x < this.left || x > this.right) return [];
    const at = best ? best.point[0] : this.x.share((x - this.left) / (this.right - this.left));
    return lines.flatMap((series) => {
      const up = valueAt(series.line.points, at);
      return up === undefined ? [] : [{ series, point: [at, up] }];
    });
  }

  // Four times as large, round a place of the drawing.
  closer(x, y) {
    const half = 1 / 8;
    const shares = [
      (x - this.left) / (this.right - this.left),
      (this.bottom - y) / (this.bottom - this.top),
    ];
    if (shares.some((share) => share < 0 || share > 1)) return;
    const [across, up] = shares.map((share) => clamp(share, half, 1 - half));
    this.enlarge([across - half, across + half], [up - half, up + half]);
  }

  key(event) {
    const middle = (this.top + this.bottom) / 2;
    this.at ??= (this.left + this.right) / 2;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape" || event.key === "-") this.whole();
    else if (event.key === "+") this.closer(this.at, middle);
    else if (step) {
      this.at = clamp(this.at + (step * (this.right - this.left)) / 50, this.left, this.right);
      this.tell(this.at, middle);
    } else return;
    event.preventDefault();
  }
}

// Where a line of points is at the place `at`: the last of its steps there. Nothing beyond its ends.
function valueAt(points, at) {
  let value;
  for (let next = 0; next < points.length; next += 1) {
    const [x, y] = points[next];
    const [beforeX, beforeY] = points[Math.max(0, next - 1)];
    if (Math.abs(x - at) < 1e-9) value = y;
    else if (beforeX < at && at < x) value = beforeY + ((y - beforeY) * (at - beforeX)) / (x - beforeX);
  }
  return value;
}

// Bars: the title of each is told at once, and to fingers too.
function bars(svg) {
  const note = new Note(svg.closest("figure"));
  svg.addEventListener("pointerleave", () => note.hide());
  for (const title of svg.querySelectorAll("rect > title")) {
    const bar = title.parentElement;
    const text = title.textContent;
    title.remove(); // it would be told again, later
    bar.setAttribute("aria-label", text);
    for (const kind of ["pointermove", "pointerdown"])
      bar.addEventListener(kind, (event) =>
        note.tell([[bar.getAttribute("class"), text]], event.clientX, event.clientY),
      );
    bar.addEventListener("pointerleave", () => note.hide());
  }
}

// Names of a legend become buttons that hide and show their series in all charts of the figure.
function legend(entry) {
  const { series } = entry.dataset;
  const button = document.createElement("button");
  button.type = "button";
  button.append(...entry.childNodes);
  button.setAttribute("aria-pressed", "true");
  button.addEventListener("click", () => {
    const hide = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!hide));
    for (const one of entry.closest("figure").querySelectorAll(`svg [data-series="${series}"]`))
      one.toggleAttribute("hidden", hide);
  });
  entry.append(button);
}

document.querySelectorAll("svg[data-plot]").forEach((svg, number) => new Plot(svg, number));
document.querySelectorAll("svg:not([data-plot])").forEach(bars);
document.querySelectorAll(".legend [data-series]").forEach(legend);
