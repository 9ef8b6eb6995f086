"use strict";
// Colours of the canvases, in tables of 256 steps. They follow the page's theme.
const Colours = (() => {
  const ramps = {
    light: { many: ["#d6e6ec", "#9cc9d3", "#4aa3b5", "#2a6f97", "#1b3a6b"], signed: ["#d1603d", "#e9e5db", "#2a7ab0"], text: ["#1d2733", "#ffffff"] },
    dark: { many: ["#26384a", "#22577a", "#2a9d8f", "#8ad6a2", "#f4e285"], signed: ["#ff8f5e", "#323b45", "#5ab4f0"], text: ["#0d1116", "#f2efe8"] },
  };
  const parse = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const step = (stops, t, text) => {
    const place = t * (stops.length - 1), at = Math.min(Math.floor(place), stops.length - 2);
    const from = parse(stops[at]), to = parse(stops[at + 1]);
    const rgb = from.map((value, channel) => Math.round(value + (to[channel] - value) * (place - at)));
    const bright = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140;
    return { css: `rgb(${rgb[0]},${rgb[1]},${rgb[2]})`, text: text[bright ? 0 : 1] };
  };
  const table = (stops, text) => Array.from({ length: 256 }, (_, at) => step(stops, at / 255, text));
  let many, signed, variables;
  const at = (t) => Math.round(Math.min(Math.max(t, 0), 1) * 255);
  return {
    refresh() { // reads the theme; returns its name
      const chosen = document.documentElement.dataset.theme;
      const theme = chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
      many = table(ramps[theme].many, ramps[theme].text);
      signed = table(ramps[theme].signed, ramps[theme].text);
      variables = new Map();
      return theme;
    },
    variable(name) { // a colour of the style sheet
      if (!variables.has(name)) variables.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
      return variables.get(name);
    },
    many: (t) => many[at(t)], // t in [0, 1]: one trajectory to all of them
    signed: (t) => signed[at((t + 1) / 2)], // t in [-1, 1]
  };
})();
