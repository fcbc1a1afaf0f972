// Each function draws one figure from the state.
"use strict";
function drawFrequencies() {
  const traces = [];
  const mostPairs = largest((curve) => curve.after.speed.length);
  for (const curve of shownCurves()) {
    const { turns } = curve.before ?? curve.after; // turns within the trained length
    for (const [row, dashed] of [
      [curve.before, true],
      [curve.after, false],
    ]) {
      if (!row) continue;
      const which = !curve.before ? "" : dashed ? ", before scaling" : `, after scaling (${plain(curve.scheme)})`;
      traces.push({
        type: "scatter",
        mode: dashed ? "lines" : "lines+markers",
        name: plain(curve.label) + which,
        x: row.speed.map((_, i) => i),
        y: row.speed,
        text: row.speed.map((_, i) => hoverText(curve, which, row, i)),
        hoverinfo: "text",
        line: { color: colour(curve), width: dashed ? 1.2 : 1.5, dash: dashed ? "dash" : "solid" },
        opacity: dashed ? 0.75 : 1,
        marker: {
          symbol: symbol(curve),
          size: turns ? 7 : 4,
          line: { width: 1.3, color: colour(curve) },
          color: row.speed.map((_, i) => (turns && turns[i] < 1 ? css("--page") : colour(curve))),
        },
      });
    }
  }
  draw(
    "frequencies",
    traces,
    layout(narrow() ? 380 : 460, {
      xaxis: axis("pair (0 rotates fastest)", { range: [-0.8, mostPairs - 0.2] }),
      yaxis: axis(speedTitle("token"), SPEEDS),
    }),
  );
}

function drawVectors() {
  const curve = curves[state.curve];
  const { pairs, strides, steps, xy } = curve.vectors;
  const { values } = decodeArray(xy);
  const at = (step, i) => {
    const start = ((state.stride * (steps + 1) + step) * pairs.length + i) * 2;
    return [values[start], values[start + 1]];
  };
  const reach = Math.max(1, curve.factor);
  const columns = Math.min(pairs.length, narrow() ? 2 : 3);
  const label = narrow() ? 0.8 : 0.5; // the height of the text above each circle
  const gap = 2 * reach + 0.6; // from centre to centre
  const tall = 2 * reach + label + 0.1;
  const centre = (i) => [(i % columns) * gap, -Math.floor(i / columns) * tall];
  const arms = (step) => ({
    x: pairs.flatMap((_, i) => [centre(i)[0], centre(i)[0] + at(step, i)[0], null]),
    y: pairs.flatMap((_, i) => [centre(i)[1], centre(i)[1] + at(step, i)[1], null]),
  });
  const tips = (step) => ({
    x: pairs.map((_, i) => centre(i)[0] + at(step, i)[0]),
    y: pairs.map((_, i) => centre(i)[1] + at(step, i)[1]),
  });
  const past = Array.from({ length: Math.min(8, state.step) }, (_, i) => state.step - 1 - i);
  const position = state.step * strides[state.stride];
  const hover = pairs.map(
    (pair, i) =>
      `pair ${pair} at position ${count(position)}<br>(${at(state.step, i)
        .map((x) => x.toFixed(4))
        .join(", ")})`,
  );
  const lines = Math.ceil(pairs.length / columns);
  const width = $("#vectors .plot").clientWidth;
  const across = columns * gap;
  const down = lines * tall;
  draw(
    "vectors",
    [
      { type: "scatter", mode: "lines", ...arms(0), line: { color: css("--line"), width: 2 }, hoverinfo: "skip" },
      {
        type: "scatter",
        mode: "markers",
        x: past.flatMap((step) => tips(step).x),
        y: past.flatMap((step) => tips(step).y),
        hoverinfo: "skip",
        marker: { size: 5, color: colour(curve), opacity: past.flatMap((_, i) => pairs.map(() => 0.6 * (1 - i / 8))) },
      },
      {
        type: "scatter",
        mode: "lines",
        ...arms(state.step),
        line: { color: colour(curve), width: 3 },
        hoverinfo: "skip",
      },
      {
        type: "scatter",
        mode: "markers",
        ...tips(state.step),
        text: hover,
        hoverinfo: "text",
        marker: { size: 10, color: colour(curve) },
      },
    ],
    layout(Math.min(lines * (narrow() ? 215 : 280), (width * down) / across), {
      margin: { l: 0, r: 0, t: 0, b: 0 },
      dragmode: false,
      xaxis: { visible: false, fixedrange: true, range: [-gap / 2, across - gap / 2] },
      yaxis: { visible: false, fixedrange: true, range: [reach + label - down, reach + label], scaleanchor: "x" },
      shapes: pairs.map((_, i) => ({
        type: "circle",
        x0: centre(i)[0] - 1,
        x1: centre(i)[0] + 1,
        y0: centre(i)[1] - 1,
        y1: centre(i)[1] + 1,
        line: { color: css("--line"), width: 1 },
        layer: "below",
      })),
      annotations: pairs.map((pair, i) => ({
        x: centre(i)[0],
        y: centre(i)[1] + reach + 0.08,
        yanchor: "bottom",
        showarrow: false,
        text: `<b>pair ${pair}</b>${narrow() ? "<br>" : ", "}${
          curve.after.wavelength[pair] === null ? "idle" : `${number(curve.after.wavelength[pair])} tokens per turn`
        }`,
        font: { size: narrow() ? 11 : 13 },
      })),
    }),
  );
  $("#vectors output").textContent = `position ${count(position)}`;
  $("#vectors .reading").textContent =
    curve.factor === 1
      ? ""
      : `The vectors are ${number(curve.factor)} long, since ${curve.scheme} multiplies cos and sin by this attention factor.`;
}

function drawHeat() {
  const curve = curves[state.curve];
  const { positions, cos } = curve.heat[state.range];
  const { values, shape } = decodeArray(cos);
  const z = Array.from({ length: shape[0] }, (_, i) =>
    Array.from(values.subarray(i * shape[1], (i + 1) * shape[1]), (x) => x / 127),
  );
  const last = positions[positions.length - 1];
  const turn = curve.after.wavelength.map((w) => (w !== null && w >= positions[0] && w <= last ? w : null));
  draw(
    "heat",
    [
      {
        type: "heatmap",
        x: positions,
        z,
        zmin: -1,
        zmax: 1,
        colorscale: [
          [0, css("--low")],
          [0.5, css("--page")],
          [1, css("--high")],
        ],
        hovertemplate: "pair %{y}<br>position %{x:,}<br>cos %{z:.2f}<extra></extra>",
        colorbar: {
          title: { text: "cos(angle)", side: "right" },
          thickness: 12,
          outlinewidth: 0,
          tickvals: [-1, 0, 1],
          xpad: 6,
        },
      },
      {
        type: "scatter",
        mode: "lines",
        x: turn,
        y: turn.map((_, i) => i),
        hoverinfo: "skip",
        line: { color: css("--text"), width: 2.5 },
      },
    ],
    layout(narrow() ? 460 : 440, {
      xaxis: axis(
        "position (tokens)",
        state.range
          ? { ...TOKENS, range: [Math.log10(positions[0]), Math.log10(last)] }
          : { range: [positions[0] - 0.5, last + 0.5] },
      ),
      yaxis: axis("pair (0 rotates fastest)", { range: [shape[0] - 0.5, -0.5], showgrid: false }),
    }),
  );
}

function drawScore() {
  const from = 1; // a logarithmic axis has no distance 0
  const x = page.distances.slice(from);
  const trace = (curve, panel) => ({
    type: "scatter",
    mode: "lines",
    name: plain(curve.label),
    x,
    y: Array.from(decodeArray(curve[panel]).values.subarray(from)),
    yaxis: panel === "bound" ? "y2" : "y",
    line: { color: colour(curve), width: narrow() ? 1 : 1.3, dash: lap(curve) ? "dot" : "solid" },
    hovertemplate: `<b>${plain(curve.label)}</b><br>distance %{x:,}<br>${panel} %{y:.3f}<extra></extra>`,
  });
  const traces = shownCurves().flatMap((curve) => [trace(curve, "score"), trace(curve, "bound")]);
  const longest = Math.max(
    2,
    largest((curve) => curve.longest),
  );
  draw(
    "score",
    traces,
    layout(narrow() ? 500 : 560, {
      xaxis: axis("distance between query and key (tokens)", { ...TOKENS, range: [0, Math.log10(longest)] }),
      yaxis: axis("score", { domain: [0, 0.46], zeroline: true, zerolinecolor: css("--quiet") }),
      yaxis2: axis("bound", { domain: [0.54, 1], type: "log", tickvals: [1, 2, 5, 10, 20, 50, 100] }),
    }),
  );
}

function drawAngles() {
  const curve = curves[state.curve];
  const reading = $("#angles .reading");
  if (!curve.angles) {
    reading.textContent = "The config does not state the length that this model was trained on.";
    Plotly.purge($("#angles .plot"));
    return;
  }
  const { seen } = curve.angles;
  const { part, words } = curve.angles[state.scaled ? "with" : "without"][state.length];
  const degrees = (from, to) => seen.map((s, i) => 360 * Math.max(0, to(s, part[i]) - from(s, part[i])));
  const bar = (name, base, y, fill) => ({
    type: "bar",
    name,
    x: seen.map((_, i) => i),
    base,
    y,
    marker: { color: css(fill) },
    hovertemplate: `pair %{x}<br>${name}: %{base:.3~g}° to %{customdata:.3~g}°<extra></extra>`,
    customdata: y.map((height, i) => base[i] + height),
  });
  const zero = seen.map(() => 0);
  draw(
    "angles",
    [
      bar(
        "met, and seen in training",
        zero,
        degrees(() => 0, Math.min),
        "--seen",
      ),
      bar(
        "met, but never seen in training",
        seen.map((s) => 360 * s),
        degrees(
          (s) => s,
          (s, p) => p,
        ),
        "--unseen",
      ),
      bar(
        "seen in training, but not met",
        part.map((p) => 360 * p),
        degrees(
          (s, p) => p,
          (s) => s,
        ),
        "--spare",
      ),
    ],
    layout(narrow() ? 380 : 400, {
      barmode: "overlay",
      bargap: seen.length > (narrow() ? 40 : 100) ? 0 : 0.12,
      showlegend: true,
      legend: LEGEND,
      xaxis: axis("pair (0 rotates fastest)", { range: [-0.6, seen.length - 0.4] }),
      yaxis: axis("angle (degrees)", { range: [0, 360], tickvals: [0, 90, 180, 270, 360] }),
    }),
  );
  reading.textContent = words;
}

function drawAxes() {
  const curve = withAxes[state.axes];
  const row = curve.after;
  const traces = curve.axisNames.map((name, a) => {
    const pairs = curve.axis.flatMap((of, i) => (of === a && row.speed[i] !== null ? [i] : []));
    return {
      type: "scatter",
      mode: "markers",
      name: plain(name),
      x: pairs,
      y: pairs.map((i) => row.speed[i]),
      text: pairs.map((i) => hoverText(curve, "", row, i)),
      hoverinfo: "text",
      marker: { size: 9, symbol: SYMBOLS[a % SYMBOLS.length], color: css(`--c${a % 10}`) },
    };
  });
  draw(
    "axes",
    traces,
    layout(narrow() ? 360 : 400, {
      showlegend: true,
      legend: LEGEND,
      xaxis: axis("pair", { range: [-0.8, row.speed.length - 0.2] }),
      yaxis: axis(speedTitle(curve.unit === "token" ? "position" : curve.unit), SPEEDS),
    }),
  );
}
