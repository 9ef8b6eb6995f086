"use strict";
// The plan as a time line: a lane a replica, a column a slot as wide as its slowest microbatch.
class PlanView {
  constructor(canvas, plan, events) {
    Object.assign(this, { canvas, plan, events, slot: 0, replica: 0 });
    this.context = canvas.getContext("2d");
    canvas.addEventListener("pointermove", (event) => {
      const found = this.find(event.offsetX, event.offsetY);
      events.hover(found, event.clientX, event.clientY);
    });
    canvas.addEventListener("pointerleave", () => events.hover(null));
    canvas.addEventListener("click", (event) => { const found = this.find(event.offsetX, event.offsetY); if (found) this.choose(...found); });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const slot = Math.min(Math.max(this.slot + step[0], 0), plan.slots.length - 1);
      this.choose(slot, Math.min(Math.max(this.replica + step[1], 0), plan.replicas - 1));
    });
  }

  choose(slot, replica) {
    Object.assign(this, { slot, replica });
    this.paint();
    this.events.pick(slot, replica);
  }

  resize() {
    const { canvas, plan } = this;
    this.lane = Math.min(Math.max(360 / plan.replicas, 7), 84);
    this.height = Math.round(this.lane * plan.replicas + 20);
    canvas.style.height = `${this.height}px`;
    const ratio = Math.min(devicePixelRatio || 1, 2);
    this.width = canvas.clientWidth;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    let at = 34;
    const scale = (this.width - 38) / plan.makespan;
    this.columns = plan.slots.map((slot) => {
      const width = Math.max(...slot.map((one) => one[3])) * scale;
      const column = { x: at, width };
      at += width;
      return column;
    });
    this.scale = scale;
    this.paint();
  }

  paint() {
    const { context: c, plan, lane } = this;
    const free = Colours.variable("--free"), again = Colours.variable("--again"), soft = Colours.variable("--soft");
    c.clearRect(0, 0, this.width, this.height);
    c.font = "11px ui-sans-serif, system-ui, sans-serif";
    c.textBaseline = "middle";
    plan.slots.forEach((slot, at) => {
      const { x, width } = this.columns[at];
      slot.forEach(([unique, recomputed, replayed, cost, members], replica) => {
        const y = 18 + replica * lane, h = lane - (lane > 10 ? 2 : 1);
        c.fillStyle = free;
        c.fillRect(x, y, Math.max(width - 1, 0.6), h);
        const filled = Math.max(cost * this.scale - 1, members.length ? 0.6 : 0), rows = unique + recomputed || 1;
        c.fillStyle = Colours.variable("--rows");
        c.fillRect(x, y, filled, h);
        c.fillStyle = again;
        c.fillRect(x, y, (filled * recomputed) / rows, h);
        if (replayed) {
          c.fillStyle = Colours.variable("--twice");
          c.fillRect(x, y + h - Math.min(3, h / 4), Math.min((filled * replayed) / rows, filled), Math.min(3, h / 4));
        }
        if (at === this.slot && replica === this.replica) {
          c.strokeStyle = Colours.variable("--accent");
          c.lineWidth = 2;
          c.strokeRect(x + 1, y + 1, Math.max(width - 3, 2), h - 2);
        }
      });
      if (width > 26 || at === 0) { c.fillStyle = soft; c.textAlign = "left"; c.fillText(at === 0 ? "slot 0" : String(at), x, 8); }
    });
    c.fillStyle = soft;
    for (let replica = 0; replica < plan.replicas && lane > 11; replica++) {
      c.textAlign = "right";
      c.fillText(String(replica), 26, 18 + (replica + 0.5) * lane);
    }
    c.textAlign = "left";
  }

  find(px, py) {
    const replica = Math.floor((py - 18) / this.lane);
    if (replica < 0 || replica >= this.plan.replicas) return null;
    const slot = this.columns.findIndex(({ x, width }) => px >= x && px < x + width);
    return slot < 0 ? null : [slot, replica];
  }
}
