"use strict";
// Which rows each row of a microbatch sees, at the scale of its rows.
class MaskView {
  constructor(canvas, model) {
    Object.assign(this, { canvas, model, members: [] });
    this.context = canvas.getContext("2d");
  }

  set(members) {
    const { model } = this;
    this.members = members;
    const segments = [...segmentsOf(model, members)].sort((a, b) => a - b);
    const place = new Map(segments.map((s, at) => [s, at]));
    this.start = [];
    this.stop = [];
    this.parent = segments.map((s) => (model.parent[s] < 0 ? -1 : place.get(model.parent[s])));
    this.segments = segments;
    let rows = 0, pairs = 0;
    segments.forEach((s) => {
      const d = model.x[s], n = model.length[s];
      this.start.push(rows);
      rows += n;
      this.stop.push(rows);
      pairs += n * d + (n * (n + 1)) / 2;
    });
    this.rows = rows;
    this.pairs = pairs;
    this.separate = members.reduce((sum, index) => {
      const s = model.trajectories.end[index], n = model.x[s] + model.length[s];
      return sum + (n * (n + 1)) / 2;
    }, 0);
    this.resize();
  }

  resize() {
    const { canvas, context: c } = this;
    if (!this.members.length) { canvas.style.height = "0"; return; }
    const side = Math.min(canvas.parentElement.clientWidth - 34, 520);
    const ratio = Math.min(devicePixelRatio || 1, 2), pixels = Math.round(side * ratio);
    canvas.style.width = canvas.style.height = `${side}px`;
    canvas.width = canvas.height = pixels;
    c.fillStyle = Colours.variable("--free");
    c.fillRect(0, 0, pixels, pixels);
    const scale = pixels / this.rows;
    const inside = Colours.many(0.5).css, most = Math.log(Math.max(2, this.members.length));
    const lanes = new Float64Array(this.segments.length);
    const ends = new Set(this.members.map((index) => this.model.trajectories.end[index]));
    for (let at = this.segments.length - 1; at >= 0; at--) {
      if (ends.has(this.segments[at])) lanes[at] += 1;
      if (this.parent[at] >= 0) lanes[this.parent[at]] += lanes[at];
    }
    const shade = Array.from(lanes, (count) => Colours.many(0.3 + 0.7 * Math.log(Math.max(count, 1)) / most).css);
    let at = 0;
    for (let y = 0; y < pixels; y++) { // one line of pixels at a time: the work does not grow with the tree
      const row = (y + 0.5) / scale;
      while (at + 1 < this.segments.length && this.stop[at] <= row) at++;
      for (let above = this.parent[at]; above >= 0; above = this.parent[above]) {
        c.fillStyle = shade[above];
        const from = Math.floor(this.start[above] * scale); // whole pixels, so that no seams show
        c.fillRect(from, y, Math.ceil(this.stop[above] * scale) - from, 1);
      }
      c.fillStyle = this.parent[at] < 0 || lanes[at] > 1 ? shade[at] : inside;
      const from = Math.floor(this.start[at] * scale);
      c.fillRect(from, y, Math.ceil(row * scale) - from, 1);
    }
  }
}
