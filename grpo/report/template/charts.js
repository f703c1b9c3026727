// Line charts in SVG. Each shows all runs, with gaps where values are missing. Mouse, touch or arrow keys move a cursor that shows values.
const HEIGHT = 190, LEFT = 50, RIGHT = 10, TOP = 10, BOTTOM = 24;
const PHASES = ["time/rollout", "time/reward", "time/logprobs", "time/update"];
const GROUPS = [
  ["Reward", /^(reward$|reward_std|frac_|rewards\/.*\/mean)/, "Weighted sum of the reward functions, and each function, over all completions of a step."],
  ["Evaluation", /^eval\//, "On held-out problems."],
  ["Policy", /^(kl|entropy|clip_ratio|ratio|loss|grad_norm|learning_rate|sampling|skipped)/, ""],
  ["Completions", /^completions\/(mean_length|clipped_ratio)/, ""],
  ["Time", /^(step_time|tokens_per_second|time\/eval)/, ""],
];
const BANDS = { "completions/mean_length": ["completions/min_length", "completions/max_length"] };
const view = { axis: "step", smoothing: 0, hidden: new Set() };

function smooth(values, weight) {
  let mean = null, mass = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    mean = mean === null ? value * (1 - weight) : mean * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((unit) => unit * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
  return found;
}

function tickText(value) {
  const short = +value.toPrecision(6), size = Math.abs(short);
  return size && (size >= 1e5 || size < 1e-3) ? short.toExponential().replace("e+", "e") : String(short);
}

function axisOf(run, isEvaluation) {
  const steps = isEvaluation ? run.eval_steps : run.steps;
  if (view.axis === "step" || isEvaluation && view.axis !== "step" && !run.steps.length) return steps;
  const values = view.axis === "tokens" ? run.series.num_tokens || [] : run.clock;
  if (!isEvaluation) return run.steps.map((_, i) => values[i]);
  return steps.map((step) => step === 0 ? 0 : values[run.steps.findIndex((other) => other >= step)] ?? null);
}

function linesOf(metric) {
  const isEvaluation = metric.startsWith("eval/");
  return RUNS.flatMap((run, index) => {
    const raw = (isEvaluation ? run.eval_series : run.series)[metric];
    if (!raw || view.hidden.has(index) || !raw.some(isNumber)) return [];
    const band = BANDS[metric] && BANDS[metric].map((name) => run.series[name]);
    const smoothed = view.smoothing && !isEvaluation ? smooth(raw, view.smoothing) : raw;
    return [{ name: run.name, colour: runColour(index), x: axisOf(run, isEvaluation), raw, shown: smoothed, band, marks: isEvaluation }];
  });
}

function path(x, y, px, py) {
  let d = "", pen = false;
  for (let i = 0; i < y.length; i++) {
    if (!isNumber(y[i]) || !isNumber(x[i])) { pen = false; continue; }
    d += (pen ? "L" : "M") + px(x[i]).toFixed(1) + " " + py(y[i]).toFixed(1);
    pen = true;
  }
  return d;
}

function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > high ? null : [low, high];
}

// A figure; figure.redraw() draws it again, which also happens when its width changes.
function chart(title, help, getLines, options) {
  const reading = el("output", { class: "reading", "aria-live": "off" });
  const holder = el("div");
  const figure = el("figure", { "data-chart": title }, el("h3", {}, title), holder, reading, help ? el("figcaption", {}, help) : null);
  let cursorX = null;
  figure.redraw = () => {
    const lines = getLines(), width = Math.max(holder.clientWidth || 360, 220);
    holder.replaceChildren(draw(title, lines, width, options || {}, (x) => { cursorX = x; showValues(lines); }, cursorX));
    showValues(lines);
  };
  function showValues(lines) {
    const parts = lines.map((line) => {
      const i = cursorX === null ? line.x.length - 1 : nearest(line.x, cursorX);
      return line.name + " " + formatNumber(line.raw[i]);
    });
    const at = lines.length && cursorX !== null ? lines[0].x[nearest(lines[0].x, cursorX)] : null;
    reading.textContent = (isNumber(at) ? view.axis.replace(/s$/, "") + " " + formatNumber(at) + ": " : lines.length ? "last: " : "") + parts.join(" \u00b7 ");
  }
  new ResizeObserver(() => { if (holder.clientWidth && holder.clientWidth !== figure.width) { figure.width = holder.clientWidth; figure.redraw(); } }).observe(holder);
  return figure;
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 0; i < xs.length; i++) if (isNumber(xs[i]) && Math.abs(xs[i] - x) < Math.abs((xs[best] ?? Infinity) - x)) best = i;
  return best;
}

function draw(title, lines, width, options, onCursor, cursorX) {
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", tabindex: "0" });
  const xRange = extent(lines.map((line) => line.x)), yRange = extent(lines.flatMap((line) => [line.raw, ...(line.band || []).filter(Boolean)]));
  root.setAttribute("aria-label", title + (yRange ? `: from ${formatNumber(yRange[0])} to ${formatNumber(yRange[1])}` : ": no values"));
  if (!xRange || !yRange) {
    root.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no values yet"));
    return root;
  }
  let [x0, x1] = xRange, [y0, y1] = options.fromZero ? [0, yRange[1]] : yRange;
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) { const margin = Math.abs(y0) * 0.1 || 1; y0 -= options.fromZero || y0 === 0 ? 0 : margin; y1 += margin; }
  const margin = (y1 - y0) * 0.05;
  y1 += margin; if (!options.fromZero) y0 -= margin;
  const px = (x) => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  const py = (y) => TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
  for (const y of ticks(y0, y1, 5)) {
    root.append(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: py(y), y2: py(y) }));
    root.append(svg("text", { x: LEFT - 5, y: py(y) + 4, "text-anchor": "end" }, tickText(y)));
  }
  for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 90)))) {
    root.append(svg("text", { x: px(x), y: HEIGHT - 7, "text-anchor": "middle" }, tickText(x)));
  }
  for (const line of lines) {
    if (line.area) {
      root.append(svg("path", { d: path(line.x, line.area[1], px, py) + path([...line.x].reverse(), [...line.area[0]].reverse(), px, py).replace("M", "L") + "Z", fill: line.colour, "fill-opacity": 0.75 }));
      continue;
    }
    if (line.band && line.band.every(Boolean)) {
      const ok = line.x.map((_, i) => i).filter((i) => isNumber(line.band[0][i]) && isNumber(line.band[1][i]));
      const pick = (list) => ok.map((i) => list[i]);
      root.append(svg("path", { d: path(pick(line.x), pick(line.band[1]), px, py) + path(pick(line.x).reverse(), pick(line.band[0]).reverse(), px, py).replace("M", "L") + "Z", fill: line.colour, "fill-opacity": 0.13 }));
    }
    if (line.shown !== line.raw) root.append(svg("path", { d: path(line.x, line.raw, px, py), fill: "none", stroke: line.colour, "stroke-opacity": 0.25 }));
    root.append(svg("path", { d: path(line.x, line.shown, px, py), fill: "none", stroke: line.colour, "stroke-width": 1.6, "stroke-linejoin": "round" }));
    const isIsolated = (i) => isNumber(line.shown[i]) && !isNumber(line.shown[i - 1]) && !isNumber(line.shown[i + 1]);
    line.x.forEach((x, i) => {
      if (isNumber(x) && isNumber(line.shown[i]) && (line.marks || isIsolated(i))) root.append(svg("circle", { cx: px(x), cy: py(line.shown[i]), r: 3, fill: line.colour }));
    });
  }
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
  root.append(cursor);
  const grid = [...new Set(lines.flatMap((line) => line.x.filter(isNumber)))].sort((a, b) => a - b);
  function moveCursor(x) {
    cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); cursor.setAttribute("visibility", "visible");
    cursorX = x; onCursor(x);
  }
  if (cursorX !== null && cursorX >= x0 && cursorX <= x1) { cursor.setAttribute("x1", px(cursorX)); cursor.setAttribute("x2", px(cursorX)); cursor.setAttribute("visibility", "visible"); }
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    moveCursor(grid[nearest(grid, x0 + ((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT) * (x1 - x0))]);
  });
  root.addEventListener("keydown", (event) => {
    const here = cursorX === null ? grid.length - 1 : nearest(grid, cursorX);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: grid.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    moveCursor(grid[Math.min(Math.max(to, 0), grid.length - 1)]);
  });
  return root;
}

// The seconds of each phase of one run, stacked.
function phaseLines(run) {
  const total = run.steps.map(() => 0);
  return PHASES.filter((name) => run.series[name]).map((name, i) => {
    const raw = run.series[name], below = [...total];
    raw.forEach((value, k) => { total[k] += value || 0; });
    return { name: name.slice(5), colour: runColour(i), x: axisOf(run, false), raw, shown: raw, area: [below, [...total]], band: [below, [...total]] };
  });
}

function buildCurves(section) {
  const content = section.querySelector(".content"), controls = section.querySelector(".controls"), figures = [];
  const redraw = () => figures.forEach((figure) => figure.redraw());
  const metrics = [...new Set(RUNS.flatMap((run) => [...Object.keys(run.series), ...Object.keys(run.eval_series)]))];
  const used = new Set([...PHASES, "epoch", ...Object.values(BANDS).flat()]);
  const add = (figure, parent) => { figures.push(figure); parent.append(figure); };
  for (const [name, pattern, help] of GROUPS) {
    const members = metrics.filter((metric) => pattern.test(metric) && !used.has(metric));
    if (!members.length) continue;
    content.append(el("h3", { class: "group" }, name, help ? el("span", { class: "help" }, "  " + help) : null));
    for (const metric of members) {
      used.add(metric);
      add(chart(metric, BANDS[metric] ? "Shaded: from the shortest to the longest completion." : "", () => linesOf(metric)), content);
    }
    if (name === "Time") {
      for (const run of RUNS.filter((one) => one.series["time/rollout"])) {
        const label = "time by phase" + (RUNS.length > 1 ? ": " + run.name : "");
        const legend = PHASES.map((phase, i) => el("span", { class: "legend" }, swatch(runColour(i)), phase.slice(5)));
        const figure = chart(label, "Seconds per step, stacked by phase.", () => phaseLines(run), { fromZero: true });
        figure.append(...legend);
        add(figure, content);
      }
    }
  }
  const rest = metrics.filter((metric) => !used.has(metric));
  if (rest.length) {
    const more = el("div", { class: "grid" });
    content.append(el("details", { class: "group", ontoggle: redraw }, el("summary", {}, `${rest.length} more`), more));
    for (const metric of rest) add(chart(metric, "", () => linesOf(metric)), more);
  }
  if (!metrics.length) content.append(el("p", { class: "note" }, "No step has been written yet."));
  if (RUNS.length > 1) RUNS.forEach((run, index) => {
    const box = el("input", { type: "checkbox", checked: true, onchange: () => { box.checked ? view.hidden.delete(index) : view.hidden.add(index); redraw(); } });
    controls.append(el("label", {}, box, swatch(runColour(index)), run.name));
  });
  const slider = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, oninput: () => { view.smoothing = +slider.value; redraw(); } });
  controls.append(labelled("Smoothing", slider));
  controls.append(labelled("Horizontal axis", choice("Horizontal axis", [["step", "steps"], ["seconds", "seconds"], ["tokens", "tokens"]], (value) => { view.axis = value; redraw(); })));
  redraw();
}

function swatch(colour) {
  const node = el("span", { class: "swatch" });
  node.style.background = colour;
  return node;
}
