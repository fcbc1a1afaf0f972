// Each control changes the state, and draws the figures that depend on it again.
"use strict";
const drawAll = () =>
  [drawFrequencies, drawVectors, drawHeat, drawScore, drawAngles, ...(withAxes.length ? [drawAxes] : [])].forEach(
    (drawFigure) => drawFigure(),
  );

function fill(select, labels, selected) {
  select.replaceChildren(...labels.map((label, i) => new Option(label, i, false, i === selected)));
}

// Fill the choices that depend on the rope, and draw its figures.
function chooseCurve(index) {
  const curve = curves[index];
  const lengths = curve.angles ? curve.angles.lengths : [];
  const end = curve.heat[1].positions;
  Object.assign(state, {
    curve: index,
    stride: Math.min(state.stride, curve.vectors.strides.length - 1),
    length: Math.max(0, lengths.length - 1),
    scaled: 1,
  });
  $$("select.curve").forEach((select) => {
    select.value = index;
  });
  fill(
    $("select.stride"),
    curve.vectors.strides.map((s) => (s === 1 ? "1 token per step" : `${count(s)} tokens per step`)),
    state.stride,
  );
  fill(
    $("select.range"),
    [`the first ${count(curve.heat[0].positions.length)}`, `1 to ${count(end[end.length - 1])}, logarithmic`],
    state.range,
  );
  fill(
    $("select.length"),
    lengths.map((n) => `${count(n)} tokens`),
    state.length,
  );
  fill(
    $("select.scaled"),
    curve.before ? ["before scaling", `after scaling (${curve.scheme})`] : ["without scaling"],
    curve.before ? 1 : 0,
  );
  $$("#angles .controls label:not(:first-child)").forEach((label) => {
    label.hidden = !curve.angles;
  });
  Object.assign($("#vectors input"), { max: curve.vectors.steps, value: state.step });
  [drawVectors, drawHeat, drawAngles].forEach((drawFigure) => drawFigure());
}

function fillChips() {
  const toggle = (i) => {
    if (!state.shown.delete(i)) state.shown.add(i);
    showChips();
  };
  for (const chips of $$(".chips")) {
    chips.replaceChildren(
      ...curves.map((curve, i) => {
        const button = document.createElement("button");
        button.type = "button";
        button.innerHTML =
          '<svg viewBox="0 0 24 12" aria-hidden="true"><line x1="0" x2="24" y1="6" y2="6" stroke-width="2"/>' +
          `<path d="${OUTLINES[lap(curve)]}z"/></svg>`;
        button.append(curve.label);
        button.addEventListener("click", () => toggle(i));
        return button;
      }),
    );
    if (curves.length > 4) {
      for (const [text, shown] of [
        ["Show all", [...curves.keys()]],
        ["Show none", []],
      ]) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "every";
        button.textContent = text;
        button.addEventListener("click", () => {
          state.shown = new Set(shown);
          showChips();
        });
        chips.append(button);
      }
    }
  }
}

function showChips() {
  for (const chips of $$(".chips")) {
    curves.forEach((curve, i) => {
      const button = chips.children[i];
      button.setAttribute("aria-pressed", state.shown.has(i));
      const svg = $("svg", button);
      svg.style.stroke = svg.style.fill = `var(${colourName(curve)})`;
    });
  }
  drawFrequencies();
  drawScore();
}

let playing = null;
function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => moveTo((state.step + 1) % (curves[state.curve].vectors.steps + 1)), 150) : null;
  $(".play").textContent = on ? "Pause" : "Play";
}
function moveTo(step) {
  state.step = step;
  $("#vectors input").value = step;
  drawVectors();
}

const onChange = (selector, key, then) =>
  $(selector).addEventListener("change", (event) => {
    state[key] = Number(event.target.value);
    then();
  });
$$("select.curve").forEach((select) => {
  fill(
    select,
    curves.map((curve) => curve.label),
    0,
  );
  select.addEventListener("change", () => chooseCurve(Number(select.value)));
});
onChange("select.stride", "stride", drawVectors);
onChange("select.range", "range", drawHeat);
onChange("select.length", "length", drawAngles);
onChange("select.scaled", "scaled", drawAngles);
onChange("select.tower", "axes", drawAxes);
$("#vectors input").addEventListener("input", (event) => {
  play(false);
  moveTo(Number(event.target.value));
});
$(".play").addEventListener("click", () => play(playing === null));
fill(
  $("select.tower"),
  withAxes.map((curve) => curve.label),
  0,
);
$("#axes").hidden = !withAxes.length;
fillChips();
showChips();
chooseCurve(0);
if (withAxes.length) drawAxes();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) {
    width = window.innerWidth;
    drawAll();
  }
});
