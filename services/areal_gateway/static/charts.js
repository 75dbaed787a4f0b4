// Small line and area charts in SVG: axes, bounds, stacking, a cursor with values. No dependencies.

import { ticks, thin } from "./scales.js";

const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, parent = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    // The page's security policy forbids style attributes, not styles set from a script.
    if (key === "style") element.style.cssText = value;
    else element.setAttribute(key, value);
  }
  if (parent) parent.append(element);
  return element;
}

function path(points) {
  return points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

// spec: {
//   series: [{label, color, points: [[x, y]], kind: "line" | "area" | "stack" | "dots" | "marks", width, opacity,
//             end (show the last value at the line's end), quiet (not in the cursor's list)}],
//   y: {min, max, format, ticks, gutter}, x: {min, max, format, ticks, head, hidden, whole}, bound: {y, label},
//   title, empty, bare (a sparkline: no axes), label (for screen readers)
// }
export class Chart {
  constructor(host) {
    this.host = host;
    this.svg = node("svg", { role: "img" });
    host.append(this.svg);
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    host.append(this.tip);
    this.spec = null;
    this.pointer = null;
    new ResizeObserver(() => this.draw()).observe(host);
    host.addEventListener("pointermove", (event) => {
      this.pointer = event.clientX - host.getBoundingClientRect().left;
      this.drawCursor();
    });
    host.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.drawCursor();
    });
  }

  update(spec) {
    this.spec = spec;
    this.draw();
  }

  draw() {
    const { spec, svg, host } = this;
    const width = host.clientWidth;
    const height = host.clientHeight;
    if (!spec || width < 20 || height < 10) return;
    svg.replaceChildren();
    host.querySelector(".empty")?.remove();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-label", spec.label ?? "");
    const drawn = this.prepare(width);
    if (!drawn.some((s) => s.points.length)) {
      this.frame = null;
      this.tip.hidden = true;
      if (spec.empty) {
        const empty = document.createElement("div");
        empty.className = "empty";
        empty.textContent = spec.empty;
        host.append(empty);
      }
      return;
    }
    this.frame = this.scales(drawn, width, height);
    if (!spec.bare) this.drawAxes();
    for (const series of drawn) this.drawSeries(series);
    if (spec.bound) this.drawBound();
    this.cursor = node("g", {}, svg);
    this.drawCursor();
  }

  // Series thinned to the width; stacked ones lie on top of each other.
  prepare(width) {
    const limit = Math.max(40, Math.floor(width / 2));
    let floor = null;
    return this.spec.series.map((series) => {
      const points = thin(series.points, limit, series.kind === "dots");
      if (series.kind !== "stack") return { ...series, points, base: null };
      const base = floor ?? points.map(([x]) => [x, 0]);
      floor = points.map(([x, y], i) => [x, y + (base[i]?.[1] ?? 0)]);
      return { ...series, values: points, points: floor, base };
    });
  }

  scales(drawn, width, height) {
    const { spec } = this;
    const all = drawn.flatMap((s) => s.points);
    const xs = all.map((p) => p[0]);
    const ys = all.map((p) => p[1]);
    if (spec.bound) ys.push(spec.bound.y);
    let low = spec.y?.min ?? Math.min(...ys);
    let high = spec.y?.max ?? Math.max(...ys);
    if (high - low < 1e-9) high = low + (Math.abs(low) || 1);
    const pad = (high - low) * (spec.bare ? 0.12 : 0.08);
    if (spec.y?.max === undefined) high += pad;
    if (spec.y?.min === undefined) low -= pad;
    const marks = spec.bare ? [] : ticks(low, high, spec.y?.ticks ?? Math.max(2, Math.floor(height / 46)));
    const every = marks.length > 1 ? marks[1] - marks[0] : 1;
    const format = (value) => (spec.y?.format ?? String)(value, every);
    const gutter = spec.y?.gutter ?? Math.max(...marks.map((m) => format(m).length), 1) * 6.6 + 8;
    const ends = drawn.some((s) => s.end);
    const box = spec.bare
      ? { left: 1, right: width - 4, top: 3, bottom: height - 3 }
      : { left: gutter, right: width - (ends ? 40 : 6), top: spec.title ? 18 : 6, bottom: height - (spec.x?.hidden ? 4 : 18) };
    const x0 = spec.x?.min ?? Math.min(...xs);
    let x1 = spec.x?.max ?? Math.max(...xs);
    if (x1 <= x0) x1 = x0 + 1;
    const X = (x) => box.left + ((x - x0) / (x1 - x0)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((y - low) / (high - low)) * (box.bottom - box.top);
    return { drawn, box, X, Y, x0, x1, low, high, marks, format };
  }

  drawAxes() {
    const { spec, svg } = this;
    const { box, X, Y, x0, x1, low, marks, format } = this.frame;
    for (const mark of marks) {
      const y = Y(mark);
      const kind = Math.abs(mark - low) < 1e-9 ? "baseline" : "gridline";
      node("line", { class: kind, x1: box.left, x2: box.right, y1: y, y2: y }, svg);
      const text = node("text", { x: box.left - 8, y: y + 4, "text-anchor": "end" }, svg);
      text.textContent = format(mark);
    }
    const places = spec.x?.hidden ? [] : spec.x?.ticks ?? ticks(x0, x1, Math.max(2, Math.floor((box.right - box.left) / 90)), spec.x?.whole);
    const taken = [];
    for (const place of places) {
      const x = X(place);
      const label = (spec.x?.format ?? String)(place);
      const room = label.length * 6.2 + 6;
      if (x < box.left - 1 || x > box.right + 1 || taken.some((other) => Math.abs(other - x) < room)) continue;
      taken.push(x);
      const anchor = x > box.right - 16 ? "end" : x < box.left + 12 ? "start" : "middle";
      const text = node("text", { x, y: box.bottom + 15, "text-anchor": anchor }, svg);
      text.textContent = label;
    }
    if (spec.title) {
      const title = node("text", { class: "title", x: box.left, y: 10 }, svg);
      title.textContent = spec.title;
    }
  }

  drawSeries(series) {
    const { svg } = this;
    const { X, Y, box, format } = this.frame;
    const line = series.points.map(([x, y]) => [X(x), Y(y)]);
    if (!line.length) return;
    const paint = `fill:none;stroke:${series.color};stroke-width:${series.width ?? 1.75};stroke-linejoin:round;stroke-linecap:round;opacity:${series.opacity ?? 1}`;
    if (series.kind === "dots" || series.kind === "marks") {
      const r = series.kind === "dots" ? 1.6 : 4;
      if (r > 2) node("path", { d: path(line), style: `${paint};stroke-dasharray:4 3` }, svg);
      for (const [x, y] of line) {
        node("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r, style: `fill:${series.color}` }, svg);
      }
    } else if (series.kind === "stack") {
      const back = series.base.map(([x, y]) => [X(x), Y(y)]).reverse();
      node("path", { d: `${path(line)}${path(back).replace("M", "L")}Z`, style: `fill:${series.color};opacity:${series.opacity ?? 0.85}` }, svg);
    } else {
      if (series.kind === "area") {
        const floor = `L${line[line.length - 1][0].toFixed(1)} ${box.bottom}L${line[0][0].toFixed(1)} ${box.bottom}Z`;
        node("path", { d: path(line) + floor, style: `fill:${series.color};opacity:.11` }, svg);
      }
      node("path", { d: path(line), style: paint }, svg);
    }
    const [x, y] = line[line.length - 1];
    if (series.end || line.length === 1) {
      node("circle", { cx: x, cy: y, r: 3.2, style: `fill:${series.color}` }, svg);
    }
    if (series.end) {
      const text = node("text", { x: x + 8, y: y + 4, style: `fill:${series.color};font-weight:600;font-size:12px` }, svg);
      text.textContent = (series.format ?? format)(series.points[series.points.length - 1][1]);
    }
  }

  drawBound() {
    const { spec, svg } = this;
    const { box, Y } = this.frame;
    const y = Y(spec.bound.y);
    node("line", { class: "bound", x1: box.left, x2: box.right, y1: y, y2: y }, svg);
    const text = node("text", { x: box.right - 2, y: y - 5, "text-anchor": "end" }, svg);
    text.textContent = spec.bound.label;
  }

  drawCursor() {
    const { spec, frame, tip } = this;
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    tip.hidden = true;
    if (this.pointer === null || !frame || spec.bare) return;
    const { box, X, Y, drawn, format } = frame;
    const places = drawn.find((s) => s.points.length).points.map((p) => p[0]);
    const at = places.reduce((best, x, i) =>
      Math.abs(X(x) - this.pointer) < Math.abs(X(places[best]) - this.pointer) ? i : best, 0);
    const x = X(places[at]);
    node("line", { class: "cursor", x1: x, x2: x, y1: box.top, y2: box.bottom }, this.cursor);
    tip.replaceChildren();
    const head = document.createElement("div");
    head.className = "head";
    head.textContent = (spec.x?.head ?? spec.x?.format ?? String)(places[at]);
    tip.append(head);
    for (const series of drawn) {
      if (series.quiet || !series.points.length) continue;
      const index = series.points.findIndex((p) => p[0] >= places[at]);
      const i = index < 0 ? series.points.length - 1 : index;
      node("circle", { cx: x, cy: Y(series.points[i][1]), r: 3, style: `fill:${series.color}` }, this.cursor);
      const row = document.createElement("div");
      const key = document.createElement("span");
      key.className = `key${series.kind === "stack" ? " block" : ""}`;
      key.style.setProperty("--key", series.color);
      const value = document.createElement("b");
      value.textContent = (series.format ?? format)((series.values ?? series.points)[i][1]);
      row.append(key, series.label, value);
      tip.append(row);
    }
    tip.hidden = false;
    const left = x + 14 + tip.offsetWidth > this.host.clientWidth ? x - tip.offsetWidth - 14 : x + 14;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = `${box.top}px`;
  }
}
