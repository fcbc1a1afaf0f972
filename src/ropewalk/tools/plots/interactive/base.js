// Shared by all figures: the numbers of the page, its state, texts and colours.
"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const curves = page.curves;
const withAxes = [...curves, ...page.towers].filter((curve) => curve.axis);
const SYMBOLS = ["circle", "diamond", "square", "triangle-up", "cross"];
// The same symbols as SVG paths, for a legend that is 24 wide and 12 high.
const OUTLINES = ["M12 2a4 4 0 1 0 .01 0", "M12 1l5 5-5 5-5-5", "M8 2h8v8H8", "M12 1l5 9H7", "M10 1h4v10h-4"];
const NARROW = 600; // pixels
const state = {
  shown: new Set(curves.length > 6 ? [0, 1, 2, 3] : curves.keys()),
  curve: 0,
  step: 12,
  stride: 0,
  range: 1,
  length: 0,
  scaled: 1,
  axes: 0,
};

const $ = (selector, inside = document) => inside.querySelector(selector);
const $$ = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// There are ten colours. From the eleventh rope on they repeat, with another symbol.
const colourName = (curve) => `--c${curves.indexOf(curve) % 10}`;
const colour = (curve) => css(colourName(curve));
const lap = (curve) => Math.floor(curves.indexOf(curve) / 10) % SYMBOLS.length;
const symbol = (curve) => SYMBOLS[lap(curve)];
const units = (curve) => (curve.unit === "patch" ? "patches" : `${curve.unit}s`);
const count = (number) => number.toLocaleString("en-US");
// Three significant digits below 100, integers from 100 to a million, and millions above.
const number = (x) =>
  Math.abs(x) >= 1e6
    ? `${Number((x / 1e6).toPrecision(3)).toLocaleString("en-US")} million`
    : Math.abs(x) >= 100
      ? count(Math.round(x))
      : Number(x.toPrecision(3)).toString();
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;"); // Plotly interprets some HTML tags in its texts
const narrow = () => window.innerWidth < NARROW;

// Decode an array of little-endian bytes in base64. Return the values, and the shape as numbers.
const decodeArray = ({ dtype, bdata, shape }) => {
  const bytes = Uint8Array.from(atob(bdata), (c) => c.charCodeAt(0));
  const values = dtype === "f4" ? new Float32Array(bytes.buffer) : new Int8Array(bytes.buffer);
  return { values, shape: shape.split(", ").map(Number) };
};

const config = { displaylogo: false, displayModeBar: false };
const axis = (title, more = {}) => ({
  title: { text: title, standoff: 8 },
  gridcolor: css("--line"),
  linecolor: css("--line"),
  zeroline: false,
  automargin: true,
  fixedrange: narrow(),
  ...more,
});
const layout = (height, more) => ({
  height,
  margin: { l: 8, r: 12, t: 12, b: 8 },
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 12 : 13, color: css("--text") },
  hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--text") }, align: "left" },
  showlegend: false,
  hovermode: "closest",
  dragmode: narrow() ? false : "zoom",
  ...more,
});
const LEGEND = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 };
const draw = (id, traces, shape) => {
  const plot = $(`#${id} .plot`);
  return Plotly.react(plot, traces, { width: plot.clientWidth, ...shape }, config);
};
const speedTitle = (unit) => (narrow() ? `radians per ${unit}` : `inverse frequency (radians per ${unit})`);
const powers = Array.from({ length: 13 }, (_, i) => i);
const SPEEDS = {
  type: "log",
  tickvals: powers.map((i) => 10 ** -i),
  ticktext: powers.map((i) =>
    i < 3 ? `${10 ** -i}` : `10⁻${[...String(i)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("")}`,
  ),
};
const TOKENS = {
  type: "log",
  tickvals: powers.slice(0, 10).map((i) => 10 ** i),
  ticktext: ["1", "10", "100", "1k", "10k", "100k", "1M", "10M", "100M", "1G"],
};

const hoverText = (curve, which, row, i) => {
  const lines = [
    `<b>${plain(curve.label)}</b>${which}`,
    `pair ${i}`,
    row.speed[i] === null ? "does not rotate" : `wavelength ${number(row.wavelength[i])} ${units(curve)}`,
  ];
  if (row.turns) lines.push(`${number(row.turns[i])} turns within ${count(curve.trained)} tokens`);
  if (curve.axis) lines.push(`axis: ${plain(curve.axisNames[curve.axis[i]])}`);
  return lines.join("<br>");
};
const shownCurves = () => curves.filter((_, i) => state.shown.has(i));
// The largest value of a measure over the ropes shown, or over all ropes if none is shown.
const largest = (measure) => Math.max(...(state.shown.size ? shownCurves() : curves).map(measure));
