"use strict";
// The tree as arrays over segments, in preorder: x is depth in tokens, y is lanes, one lane a leaf.
const buildModel = (data) => {
  const { parent, length, multiplicity, trained, text } = data.segments;
  const count = parent.length;
  const x = new Float64Array(count), row = new Float64Array(count), top = new Float64Array(count), lanes = new Float64Array(count);
  const children = Array.from({ length: count }, () => []);
  const roots = [];
  let rows = 0, depth = 0;
  for (let s = 0; s < count; s++) {
    const p = parent[s];
    x[s] = p < 0 ? 0 : x[p] + length[p];
    row[s] = rows;
    rows += length[s];
    depth = Math.max(depth, x[s] + length[s]);
    (p < 0 ? roots : children[p]).push(s);
  }
  for (let s = count - 1; s >= 0; s--) {
    if (!children[s].length) lanes[s] = 1;
    if (parent[s] >= 0) lanes[parent[s]] += lanes[s];
  }
  let all = 0;
  const next = new Float64Array(count); // the first free lane below each segment
  for (let s = 0; s < count; s++) {
    const p = parent[s];
    if (p < 0) { top[s] = all; all += lanes[s]; } else { top[s] = next[p]; next[p] += lanes[s]; }
    next[s] = top[s];
  }
  const t = data.trajectories;
  const ends = new Map();
  t.end.forEach((segment, index) => { if (!ends.has(segment)) ends.set(segment, []); ends.get(segment).push(index); });
  const most = Math.log(Math.max(2, t.end.length));
  const weight = Float64Array.from(multiplicity, (value) => Math.log(value) / most); // 0: one trajectory, 1: all
  const path = (segment) => { const found = []; for (; segment >= 0; segment = parent[segment]) found.push(segment); return found.reverse(); };
  const model = { data, count, parent, length, multiplicity, trained, text, x, row, top, lanes, children, roots, rows, depth,
    allLanes: all, ends, path, trajectories: t, weight, value: null, spread: 1, middle: 0 };
  if (t.value) colourValues(model);
  return model;
};

// The mean value of the trajectories through each segment, and its place between the extremes.
const colourValues = (model) => {
  const sum = new Float64Array(model.count), weight = new Float64Array(model.count);
  model.trajectories.end.forEach((segment, index) => {
    const value = model.trajectories.value[index];
    if (value === null) return;
    sum[segment] += value;
    weight[segment] += 1;
  });
  for (let s = model.count - 1; s >= 0; s--) {
    const p = model.parent[s];
    if (p >= 0) { sum[p] += sum[s]; weight[p] += weight[s]; }
  }
  model.value = Array.from(sum, (total, s) => (weight[s] ? total / weight[s] : null));
  const known = model.trajectories.value.filter((value) => value !== null);
  model.middle = model.trajectories.valueName === "advantage" ? 0 : known.reduce((a, b) => a + b, 0) / known.length;
  model.spread = Math.max(1e-12, ...known.map((value) => Math.abs(value - model.middle)));
};

const segmentText = (model, s) => {
  const text = model.text[s];
  return typeof text === "string" ? { start: text, gap: 0, end: "" } : { start: text[0], gap: text[1], end: text[2] };
};

// All segments on the paths of some trajectories.
const segmentsOf = (model, trajectories) => {
  const found = new Set();
  for (const index of trajectories) {
    for (let s = model.trajectories.end[index]; s >= 0 && !found.has(s); s = model.parent[s]) found.add(s);
  }
  return found;
};

const shown = (number) => Math.round(number).toLocaleString("en-US");
const rounded = (number) => {
  const at = [[1e12, "trillion"], [1e9, "billion"], [1e6, "million"]].find(([size]) => number >= size);
  return at ? `${(number / at[0]).toPrecision(3)} ${at[1]}` : shown(number);
};
const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
