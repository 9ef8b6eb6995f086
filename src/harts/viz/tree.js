"use strict";
// The icicle: zoom, pan, hover, selection. Only what can be seen is drawn.
class TreeView {
  constructor(canvas, model, events) {
    Object.assign(this, { canvas, model, events, colour: "multiplicity", hover: -1, selected: -1, lit: null, frame: 0, drawn: 0 });
    this.context = canvas.getContext("2d");
    this.axis = 20;
    this.listen();
  }

  resize() {
    const lanes = this.model.allLanes;
    const height = Math.round(Math.min(Math.max(lanes * 34 + this.axis, 260), Math.max(340, innerHeight * 0.58)));
    this.canvas.style.height = `${height}px`;
    this.ratio = Math.min(devicePixelRatio || 1, 2);
    this.width = this.canvas.clientWidth;
    this.height = height;
    this.canvas.width = Math.round(this.width * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
    const whole = { x: 0, y: 0, kx: (this.width - 8) / this.model.depth, ky: (height - this.axis - 6) / lanes };
    const first = !this.whole;
    this.whole = whole;
    this.view = first ? { ...whole } : this.clamped(this.view);
    this.draw();
  }

  clamped({ x, y, kx, ky }) {
    kx = Math.min(Math.max(kx, this.whole.kx), Math.max(24, this.whole.kx));
    ky = Math.min(Math.max(ky, this.whole.ky), Math.max(160, this.whole.ky));
    const width = (this.width - 8) / kx, height = (this.height - this.axis - 6) / ky;
    x = Math.min(Math.max(x, -0.25 * width), this.model.depth - 0.25 * width);
    y = Math.min(Math.max(y, -0.25 * height), this.model.allLanes - 0.25 * height);
    if (kx <= this.whole.kx * 1.001) x = 0;
    if (ky <= this.whole.ky * 1.001) y = 0;
    return { x, y, kx, ky };
  }

  fill(s) { // colour of a segment
    const { model } = this;
    if (this.colour === "value" && model.value) {
      const value = model.value[s];
      return value === null ? Colours.signed(0) : Colours.signed((value - model.middle) / model.spread);
    }
    if (this.colour === "trained") return Colours.many(model.trained[s] / model.length[s]);
    return Colours.many(model.weight[s]);
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); });
  }

  paint() {
    const start = performance.now();
    const { context: c, model, view, axis } = this;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    c.font = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
    c.textBaseline = "middle";
    const right = view.x + this.width / view.kx, bottom = view.y + (this.height - axis) / view.ky;
    const trainedColour = Colours.variable("--trained");
    const accent = Colours.variable("--accent");
    const stack = model.roots.slice().reverse();
    const marked = [];
    this.drawn = 0;
    while (stack.length) {
      const s = stack.pop();
      if (model.top[s] > bottom || model.top[s] + model.lanes[s] < view.y || model.x[s] > right) continue;
      const below = model.children[s];
      const h = model.lanes[s] * view.ky;
      for (let at = below.length - 1; at >= 0; at--) stack.push(below[at]);
      if (model.x[s] + model.length[s] < view.x) continue;
      this.bar(s, h, trainedColour);
      if (s === this.hover || s === this.selected) marked.push(s);
    }
    for (const s of marked) {
      const box = this.box(s);
      c.strokeStyle = s === this.selected ? accent : Colours.variable("--ink");
      c.lineWidth = 2;
      c.strokeRect(box.x + 1, box.y + 1, Math.max(box.w - 2, 2), Math.max(box.h - 2, 2));
    }
    this.ticks();
    this.lastPaint = performance.now() - start;
  }

  box(s) {
    const { model, view } = this;
    const x = (model.x[s] - view.x) * view.kx + 4, y = (model.top[s] - view.y) * view.ky + this.axis;
    return { x, y, w: model.length[s] * view.kx, h: model.lanes[s] * view.ky };
  }

  bar(s, h, trainedColour) {
    const { context: c, model, view } = this;
    const box = this.box(s);
    const x = Math.max(box.x, -2), w = Math.min(box.x + box.w, this.width + 2) - x;
    const gap = h > 4 ? 1 : h > 2 ? 0.4 : 0;
    const colour = this.fill(s);
    const dim = this.lit && !this.lit.has(s);
    if (dim) c.globalAlpha = 0.34;
    c.fillStyle = colour.css;
    c.fillRect(x, box.y, Math.max(w - (w > 3 ? 1 : 0), 0.7), Math.max(h - gap, 0.7));
    this.drawn += 1;
    if (model.trained[s] && h > 5) {
      c.fillStyle = trainedColour;
      const thick = Math.min(4, h / 5);
      for (const [from, length] of this.spans(s)) {
        const at = Math.max(box.x + from * view.kx, x), to = Math.min(box.x + (from + length) * view.kx, x + w);
        if (to > at) c.fillRect(at, box.y + h - gap - thick, Math.max(to - at, 0.8), thick);
      }
    }
    if (h > 15 && w > 46) {
      const room = Math.floor((w - 10) / 6.65);
      c.fillStyle = colour.text;
      c.fillText(this.label(s, room, Math.max(0, x - box.x) / view.kx), x + 5, box.y + Math.min(h / 2, 60));
    }
    if (dim) c.globalAlpha = 1;
  }

  label(s, room, skipped) { // text from the left edge of what can be seen
    const text = segmentText(this.model, s);
    const whole = text.gap ? text.start : text.start + text.end;
    const from = Math.floor((skipped / this.model.length[s]) * whole.length);
    return whole.slice(from, from + room * 2).replace(/<\|im_start\|>/g, "▸").replace(/<\|im_end\|>/g, "").replace(/\s+/g, " ").trim().slice(0, room);
  }

  spans(s) { // trained spans within a segment, as [start, length]
    const { model } = this;
    this.cache ||= new Map();
    if (!this.cache.has(s)) {
      const all = model.data.trained, first = model.row[s], last = first + model.length[s];
      let low = 0, high = all.length / 2;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (all[2 * middle] + all[2 * middle + 1] <= first) low = middle + 1; else high = middle;
      }
      const found = [];
      for (let at = low; at < all.length / 2 && all[2 * at] < last; at++) {
        const from = Math.max(all[2 * at], first), to = Math.min(all[2 * at] + all[2 * at + 1], last);
        found.push([from - first, to - from]);
      }
      this.cache.set(s, found);
    }
    return this.cache.get(s);
  }

  ticks() {
    const { context: c, view } = this;
    const rough = 110 / view.kx, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) || power * 10;
    c.fillStyle = Colours.variable("--card");
    c.fillRect(0, 0, this.width, this.axis - 2);
    c.fillStyle = Colours.variable("--soft");
    for (let at = Math.max(0, Math.ceil(view.x / step) * step); at <= this.model.depth; at += step) {
      const x = (at - view.x) * view.kx + 4;
      if (x > this.width) break;
      c.fillRect(x, this.axis - 6, 1, 4);
      c.fillText(step < 1 ? at.toFixed(1) : shown(at), x + 3, 8);
    }
  }

  find(px, py) { // segment under a point, -1 for none
    const { model, view } = this;
    const x = (px - 4) / view.kx + view.x, y = (py - this.axis) / view.ky + view.y;
    if (py < this.axis) return -1;
    let some = model.roots;
    for (;;) {
      let low = 0, high = some.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (model.top[some[middle]] <= y) low = middle; else high = middle - 1;
      }
      const s = some[low];
      if (s === undefined || y < model.top[s] || y >= model.top[s] + model.lanes[s] || x < model.x[s]) return -1;
      if (x < model.x[s] + model.length[s]) return s;
      some = model.children[s];
    }
  }

  zoom(factor, px = this.width / 2, py = this.height / 2, axes = "xy") {
    const { view } = this;
    const x = (px - 4) / view.kx + view.x, y = (py - this.axis) / view.ky + view.y;
    const kx = axes.includes("x") ? view.kx * factor : view.kx, ky = axes.includes("y") ? view.ky * factor : view.ky;
    const { kx: a, ky: b } = this.clamped({ ...view, kx, ky });
    this.view = this.clamped({ kx: a, ky: b, x: x - (px - 4) / a, y: y - (py - this.axis) / b });
    this.draw();
  }

  show(s, whole = false) { // glides to a segment, or to all
    const { model } = this;
    let to = { ...this.whole };
    if (!whole && s >= 0) {
      const kx = (this.width * 0.82) / Math.max(model.length[s], 12), ky = (this.height - this.axis) * 0.7 / Math.max(model.lanes[s], 1);
      const fit = this.clamped({ ...this.view, kx, ky });
      to = this.clamped({ ...fit, x: model.x[s] - this.width * 0.09 / fit.kx, y: model.top[s] - ((this.height - this.axis) / fit.ky - model.lanes[s]) / 2 });
    }
    const from = { ...this.view }, began = performance.now();
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1 : 0;
    const run = ++this.glide || (this.glide = 1);
    const step = () => {
      if (run !== this.glide) return;
      const t = still || Math.min((performance.now() - began) / 260, 1), e = 1 - (1 - t) ** 3;
      const kx = from.kx * (to.kx / from.kx) ** e, ky = from.ky * (to.ky / from.ky) ** e;
      const share = (a, b, k0, k1, k) => (k0 === k1 ? e : (1 / k0 - 1 / k) / (1 / k0 - 1 / k1));
      this.view = { kx, ky, x: from.x + (to.x - from.x) * share(0, 0, from.kx, to.kx, kx), y: from.y + (to.y - from.y) * share(0, 0, from.ky, to.ky, ky) };
      this.draw();
      if (t < 1) requestAnimationFrame(step);
    };
    step();
  }

  select(s, lit) {
    this.selected = s;
    this.lit = lit;
    this.draw();
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.glide = (this.glide || 0) + 1;
      const delta = (event.deltaY || event.deltaX) * (event.deltaMode ? 16 : 1);
      this.zoom(Math.exp(-delta * 0.0016), event.offsetX, event.offsetY, event.shiftKey ? "x" : event.altKey ? "y" : "xy");
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.offsetX, y: event.offsetY, view: { ...this.view }, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
        if (Math.hypot(dx, dy) > 4) drag.moved = true;
        if (drag.moved) {
          this.glide = (this.glide || 0) + 1;
          canvas.classList.add("dragging");
          this.view = this.clamped({ ...drag.view, x: drag.view.x - dx / drag.view.kx, y: drag.view.y - dy / drag.view.ky });
          this.events.hover(-1);
          this.draw();
          return;
        }
      }
      const s = this.find(event.offsetX, event.offsetY);
      if (s !== this.hover) { this.hover = s; this.draw(); }
      const share = s < 0 ? 0 : ((event.offsetX - 4) / this.view.kx + this.view.x - this.model.x[s]) / this.model.length[s];
      this.events.hover(s, event.clientX, event.clientY, share);
    });
    const release = (event) => {
      if (drag && !drag.moved && event.type === "pointerup") this.events.pick(this.find(event.offsetX, event.offsetY));
      drag = null;
      canvas.classList.remove("dragging");
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", () => { this.hover = -1; this.events.hover(-1); this.draw(); });
    canvas.addEventListener("dblclick", (event) => { const s = this.find(event.offsetX, event.offsetY); if (s >= 0) this.show(s); });
  }
}
