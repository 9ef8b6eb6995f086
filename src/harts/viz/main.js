"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const model = buildModel(data);
  const names = model.trajectories;
  const make = (tag, properties = {}, ...inner) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...inner);
    return element;
  };

  // -- head ----------------------------------------------------------------------------------------------------------
  $("title").textContent = data.title;
  const groups = new Set(names.group).size;
  $("counts").textContent = `${shown(names.id.length)} trajectories in ${shown(groups)} group${groups === 1 ? "" : "s"} · ` +
    `${shown(model.count)} segments · longest path ${shown(model.depth)} tokens`;
  const { calls, prefix, tree } = data.sizes;
  for (const [letter, name, size] of [["A", "one row a model call", calls], ["B", "prefixes merged", prefix], ["C", "prefix tree", tree]]) {
    const fill = make("span", { className: "fill" });
    fill.style.width = `${(size / calls) * 78}%`;
    const times = size < calls ? ` · ${(calls / size).toFixed(calls / size < 10 ? 2 : 1)}x less` : "";
    $("sizes").append(make("div", { className: "size" },
      make("span", { className: "name" }, make("b", { textContent: `${letter} ` }), name),
      make("span", { className: "rail" }, fill, make("span", { textContent: `${shown(size)} tokens${times}` }))));
  }

  // -- tooltip -------------------------------------------------------------------------------------------------------
  const tip = $("tip");
  const tell = (parts, x, y) => {
    tip.hidden = !parts;
    if (!parts) return;
    tip.replaceChildren(...parts);
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 16, innerWidth - width - 12))}px`;
    tip.style.top = `${y + height + 24 > innerHeight ? Math.max(8, y - height - 12) : y + 16}px`;
  };
  const headline = (s) => {
    const share = model.trained[s] / model.length[s];
    let text = `${shown(model.length[s])} tokens × ${shown(model.multiplicity[s])}`;
    if (share) text += ` · ${percent(share)} trained`;
    if (model.value && model.value[s] !== null) text += ` · ${names.valueName} ${model.value[s].toFixed(2)}`;
    return text;
  };
  const around = (s, share) => { // what is written under the pointer, as well as tokens and characters agree
    const { start, gap, end } = segmentText(model, s);
    const whole = gap ? start : start + end;
    const at = Math.floor(Math.min(Math.max(share, 0), 0.9999) * (whole.length + gap + (gap ? end.length : 0)));
    const from = Math.max(0, Math.min(at, whole.length) - 110);
    const left = whole.slice(from, at), right = whole.slice(at, at + 190);
    const parts = [from ? "…" : "", left, make("mark", { textContent: "▏" }), right];
    if (at + 190 < whole.length || gap) parts.push("…");
    return make("div", { className: "text" }, ...parts);
  };

  // -- tree ----------------------------------------------------------------------------------------------------------
  const view = new TreeView($("tree"), model, {
    hover: (s, x, y, share) => tell(s < 0 ? null : [make("b", { textContent: headline(s) }),
      make("div", { textContent: `tokens ${shown(model.x[s])} to ${shown(model.x[s] + model.length[s])}` }), around(s, share)], x, y),
    pick: (s) => choose(s),
  });

  const choose = (s, trajectory = -1) => {
    if (s < 0) {
      view.select(-1, null);
      panel(-1);
      return;
    }
    const lit = new Set(model.path(s));
    const stack = trajectory < 0 ? [s] : [];
    while (stack.length) for (const child of model.children[stack.pop()]) { lit.add(child); stack.push(child); }
    view.select(s, lit);
    panel(s, trajectory);
    $("live").textContent = `${headline(s)}, tokens ${shown(model.x[s])} to ${shown(model.x[s] + model.length[s])}. ` +
      segmentText(model, s).start.slice(0, 160);
  };

  const marked = (text) => text.split(/(<\|im_start\|>\w*|<\|im_end\|>|<\/?(?:think|tool_call|tool_response)>)/).map((part, at) =>
    at % 2 ? make("span", { className: "tag", textContent: part }) : part);
  const SHOWN = 12000;

  const panel = (s, trajectory = -1) => {
    const box = $("panel");
    if (s < 0) {
      box.replaceChildren(make("h3", { textContent: "Nothing selected" }), make("p", { className: "soft",
        textContent: "Click a bar to light up its path and read its text. Arrow keys walk the tree from there." }));
      return;
    }
    const path = model.path(s);
    const crumbs = make("div", { className: "crumbs" });
    const skipped = Math.max(0, path.length - 60);
    if (skipped) crumbs.append(`… ${skipped} above `);
    for (const each of path.slice(skipped)) {
      const chip = make("button", { type: "button", textContent: `${shown(model.length[each])}×${model.multiplicity[each]}`, onclick: () => choose(each) });
      chip.style.borderLeft = `4px solid ${Colours.many(model.weight[each]).css}`;
      if (each === s) chip.setAttribute("aria-current", "true");
      crumbs.append(chip);
    }
    const ending = model.ends.get(s) || [];
    const { start, gap, end } = segmentText(model, s);
    const pre = make("pre", { tabIndex: 0 }, ...marked(start.slice(0, SHOWN)));
    if (start.length > SHOWN) {
      const more = make("button", { type: "button", textContent: `Show ${shown(start.length - SHOWN)} more characters`,
        onclick: () => more.replaceWith(...marked(start.slice(SHOWN))) });
      pre.append(make("br"), more);
    }
    if (gap) pre.append(make("span", { className: "gap", textContent: `\n… ${shown(gap)} ${data.decoded ? "characters" : "tokens"} are not in this page …\n` }), ...marked(end));
    const facts = [`tokens ${shown(model.x[s])} to ${shown(model.x[s] + model.length[s])}`];
    if (model.value && model.value[s] !== null) facts.push(`mean ${names.valueName} ${model.value[s].toFixed(3)}`);
    const parts = [make("h3", { textContent: `${shown(model.length[s])} tokens × ${shown(model.multiplicity[s])}` +
      (model.trained[s] ? ` · ${percent(model.trained[s] / model.length[s])} trained` : "") }),
      make("div", { className: "soft", textContent: facts.join(" · ") }), crumbs];
    if (trajectory >= 0) parts.unshift(make("h3", { textContent: names.id[trajectory] }), make("div", { className: "soft", textContent: `group ${names.group[trajectory]}` }));
    if (ending.length) {
      const few = ending.slice(0, 8).map((index) => names.id[index] + (names.value && names.value[index] !== null ? ` (${names.valueName} ${names.value[index]})` : ""));
      parts.push(make("div", { className: "soft", textContent: `ends here: ${few.join(", ")}${ending.length > 8 ? ` and ${ending.length - 8} more` : ""}` }));
    }
    box.replaceChildren(...parts, pre);
  };

  $("tree").addEventListener("keydown", (event) => {
    const s = view.selected;
    const siblings = s < 0 ? model.roots : model.parent[s] < 0 ? model.roots : model.children[model.parent[s]];
    const at = siblings.indexOf(s);
    const go = (next) => { if (next !== undefined && next >= 0) choose(next); };
    const keys = {
      ArrowRight: () => go(s < 0 ? model.roots[0] : model.children[s][0]),
      ArrowLeft: () => go(s < 0 ? model.roots[0] : model.parent[s]),
      ArrowDown: () => go(s < 0 ? model.roots[0] : siblings[at + 1]),
      ArrowUp: () => go(s < 0 ? model.roots[0] : siblings[at - 1]),
      Enter: () => view.show(s),
      Escape: () => choose(-1),
      "0": () => view.show(-1, true),
      "+": () => view.zoom(1.5),
      "=": () => view.zoom(1.5),
      "-": () => view.zoom(1 / 1.5),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  $("in").onclick = () => view.zoom(1.6);
  $("out").onclick = () => view.zoom(1 / 1.6);
  $("fit").onclick = () => view.show(-1, true);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== $("find")) { event.preventDefault(); $("find").focus(); }
  });

  // -- search --------------------------------------------------------------------------------------------------------
  if (names.id.length <= 6000) $("ids").append(...names.id.map((id) => make("option", { value: id })));
  const search = () => {
    const wanted = $("find").value.trim().toLowerCase();
    if (!wanted) return;
    let found = names.id.findIndex((id) => id.toLowerCase() === wanted);
    if (found < 0) found = names.id.findIndex((id) => id.toLowerCase().includes(wanted));
    $("find").setAttribute("aria-invalid", String(found < 0));
    if (found < 0) { $("live").textContent = `No trajectory is called ${wanted}`; return; }
    choose(names.end[found], found);
    view.show(names.end[found]);
  };
  $("find").addEventListener("change", search);
  $("find").addEventListener("keydown", (event) => { if (event.key === "Enter") search(); if (event.key === "Escape") $("tree").focus(); });

  // -- colours -------------------------------------------------------------------------------------------------------
  const choices = [["multiplicity", "multiplicity"], ...(model.value ? [["value", names.valueName]] : []), ["trained", "trained share"]];
  for (const [key, label] of choices) {
    $("colour").append(make("button", { type: "button", textContent: label, onclick: () => paintBy(key) }));
    $("colour").lastChild.setAttribute("role", "radio");
  }
  const paintBy = (key) => {
    view.colour = key;
    [...$("colour").children].forEach((button, at) => button.setAttribute("aria-checked", String(choices[at][0] === key)));
    const strip = make("canvas", { width: 110, height: 10 });
    const c = strip.getContext("2d");
    for (let x = 0; x < 110; x++) {
      c.fillStyle = (key === "value" ? Colours.signed(x / 54.5 - 1) : Colours.many(x / 109)).css;
      c.fillRect(x, 0, 1, 10);
    }
    const ends = { multiplicity: ["1", shown(names.id.length)], trained: ["0", "100 %"],
      value: [(model.middle - model.spread).toFixed(2), (model.middle + model.spread).toFixed(2)] }[key];
    $("legend").replaceChildren(ends[0], strip, ends[1]);
    view.draw();
  };

  // -- plan and mask -------------------------------------------------------------------------------------------------
  const mask = new MaskView($("mask"), model);
  const unit = { rows: "rows", flops: "FLOPs", seconds: "s" }[data.plan.unit];
  const cost = (value) => (data.plan.unit === "rows" ? shown(value) : value.toPrecision(3));
  const plan = new PlanView($("plan"), data.plan, {
    hover: (found, x, y) => {
      if (!found) return tell(null);
      const [unique, recomputed, replayed, price, members] = data.plan.slots[found[0]][found[1]];
      const lines = members.length ? [`${members.length} trajectories · ${shown(unique)} unique rows`,
        `${shown(recomputed)} recomputed · ${shown(replayed)} replayed`, `${cost(price)} ${unit}, ${percent((unique + recomputed + replayed) / data.plan.budget)} of the budget`] : ["empty: it runs a dummy row"];
      return tell([make("b", { textContent: `slot ${found[0]}, replica ${found[1]}` }), ...lines.map((line) => make("div", { textContent: line }))], x, y);
    },
    pick: (slot, replica) => microbatch(slot, replica, true),
  });
  const microbatch = (slot, replica, light) => {
    const members = data.plan.slots[slot][replica][4];
    mask.set(members);
    $("maskline").textContent = members.length ? `slot ${slot}, replica ${replica}: ${shown(mask.rows)} rows, ${rounded(mask.pairs)} visible pairs, ` +
      `${(mask.separate / mask.pairs).toFixed(2)}x fewer than separate rows` : `slot ${slot}, replica ${replica} is empty`;
    $("mask").setAttribute("aria-label", `Attention mask: ${$("maskline").textContent}`);
    if (light) { view.select(-1, members.length ? segmentsOf(model, members) : null); panel(-1); }
    $("live").textContent = $("maskline").textContent;
  };
  const p = data.plan;
  $("planline").textContent = `${p.slots.length} slot${p.slots.length === 1 ? "" : "s"} × ${p.replicas} replica${p.replicas === 1 ? "" : "s"} · budget ${shown(p.budget)} rows · ` +
    `${percent(p.idle)} idle · ${percent(p.makespan / p.bound - 1)} above the bound · ${p.speedup.toFixed(2)}x over separate rows`;
  $("planhint").append(make("span", { className: "swatch unique" }), " unique rows  ", make("span", { className: "swatch again" }), " recomputed  ",
    make("span", { className: "swatch replayed" }), " replayed  ",
    make("span", { className: "swatch free" }), " idle. Choose a microbatch to light it up in the tree and see its mask.", ...p.hints.map((hint) => ` ${hint[0].toUpperCase()}${hint.slice(1)}.`));

  // -- theme and size ------------------------------------------------------------------------------------------------
  const refresh = () => { Colours.refresh(); paintBy(view.colour); plan.resize(); mask.resize(); if (view.selected >= 0) panel(view.selected); };
  $("theme").onclick = () => { document.documentElement.dataset.theme = Colours.refresh() === "dark" ? "light" : "dark"; refresh(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  addEventListener("resize", () => { view.resize(); plan.resize(); mask.resize(); });
  Colours.refresh();
  panel(-1);
  view.resize();
  $("panel").style.maxHeight = `${view.height}px`;
  plan.resize();
  paintBy("multiplicity");
  microbatch(0, 0, false);
  window.harts = { view, model, plan, mask, choose };
})();
