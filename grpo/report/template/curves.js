// The curves: a few that matter first, the others folded by section, and those that do not move as a table of values.
const PHASES = ["time/rollout", "time/reward", "time/logprobs", "time/update"];
const BANDS = { "completions/mean_length": ["completions/min_length", "completions/max_length"] };
const FIRST = [/^rewards\/.*\/mean$/, /^eval\/(greedy_accuracy$|mean@)/, /^completions\/mean_length$/, /^kl$/, /^entropy$/, /^grad_norm$/];
const NOT_SMOOTHED = /^(eval\/|time\/eval|learning_rate|num_tokens)/;
const GROUPS = [
  ["Reward", /^(reward|frac_)/],
  ["Evaluation", /^eval\//],
  ["Policy", /^(kl|entropy|clip_ratio|ratio|loss|grad_norm|learning_rate|sampling|skipped)/],
  ["Completions", /^completions\//],
  ["Time and tokens", /^(step_time|tokens_per_second|num_tokens|completion_tokens|time\/)/],
  ["Other", /^/],
];

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
    const smoothed = view.smoothing && !NOT_SMOOTHED.test(metric) ? smooth(raw, view.smoothing) : raw;
    return [{ name: run.name, colour: runColour(index), x: axisOf(run, isEvaluation), raw, shown: smoothed, band, marks: isEvaluation }];
  });
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

// The steps at which a run has a metric, with the values.
function valuesOf(run, metric) {
  const isEvaluation = metric.startsWith("eval/"), steps = isEvaluation ? run.eval_steps : run.steps;
  const values = (isEvaluation ? run.eval_series : run.series)[metric] || [];
  return steps.map((step, i) => [step, values[i]]).filter(([, value]) => isNumber(value));
}

// True if a chart would show nothing: in each run two values at most, or one value in all steps.
function isFlat(metric) {
  return RUNS.every((run) => {
    const values = valuesOf(run, metric).map(([, value]) => value);
    return values.length <= 2 || values.every((value) => value === values[0]);
  });
}

function valuesText(run, metric) {
  const found = valuesOf(run, metric), values = [...new Set(found.map(([, value]) => formatNumber(value)))];
  if (values.length < 2) return values[0] || "none";
  return found.map(([step, value]) => `${formatNumber(value)} (step ${step})`).join(", ");
}

function folded(title, names, content) {
  const list = el("span", { class: "names" }, names.join(", "));
  return el("details", { class: "group", "data-key": "curves " + title }, el("summary", {}, title, list), content);
}

function redraw() {
  for (const figure of FIGURES) figure.redraw();
}

function buildCurves(section) {
  const content = section.querySelector(".content");
  const first = el("div", { class: "grid" });
  content.append(first);
  const metrics = [...new Set(RUNS.flatMap((run) => [...Object.keys(run.series), ...Object.keys(run.eval_series)]))];
  if (!metrics.length) content.append(el("p", { class: "note" }, "No step has been written yet."));
  const parts = metrics.filter((metric) => FIRST[0].test(metric)), used = new Set(["reward", "epoch"]);
  const take = (chosen) => chosen.forEach((metric) => used.add(metric));
  const add = (metric, parent) => parent.append(chart(metric, BANDS[metric] ? "Shaded: from the shortest to the longest completion." : "", () => linesOf(metric)));
  for (const [metric, band] of Object.entries(BANDS)) if (![metric, ...band].every(isFlat)) take(band);
  const flat = metrics.filter((metric) => !used.has(metric) && isFlat(metric) && !(BANDS[metric] || []).some((name) => used.has(name)));
  take(flat);
  if (parts.length === 1) FIRST.shift(); // the curve of the reward shows it already
  for (const pattern of FIRST) {
    const members = metrics.filter((metric) => pattern.test(metric) && !used.has(metric));
    take(members);
    for (const metric of members) add(metric, first);
  }
  const hasPhases = PHASES.some((phase) => metrics.includes(phase) && !flat.includes(phase));
  if (hasPhases) take(PHASES);
  for (const [name, pattern] of GROUPS) {
    const members = metrics.filter((metric) => pattern.test(metric) && !used.has(metric)), grid = el("div", { class: "grid" });
    take(members);
    for (const metric of members) add(metric, grid);
    if (name.startsWith("Time") && hasPhases) {
      for (const run of RUNS.filter((one) => one.series["time/rollout"])) {
        const figure = chart("time by phase" + (RUNS.length > 1 ? ": " + run.name : ""), "Seconds per step, stacked by phase.", () => phaseLines(run), { fromZero: true });
        figure.append(...PHASES.map((phase, i) => el("span", { class: "legend" }, swatch(runColour(i)), phase.slice(5))));
        grid.append(figure);
      }
    }
    if (grid.children.length) content.append(folded(name, [...grid.children].map((figure) => figure.dataset.chart), grid));
  }
  const shownAbove = (metric) => RUNS.some((run) => run.comparison.some((row) => row.name === metric && (row.before || row.after)));
  const still = flat.filter((metric) => !shownAbove(metric));
  if (still.length) {
    const rows = still.map((metric) => el("tr", {}, el("th", { scope: "row" }, metric), ...RUNS.map((run) => el("td", {}, valuesText(run, metric)))));
    const names = el("tr", {}, el("th", {}, "metric"), ...RUNS.map((_, index) => el("th", {}, RUNS.length > 1 ? head(index) : "value")));
    content.append(folded("Constant, or two values at most", still, el("div", { class: "scroll" }, el("table", { id: "still" }, el("thead", {}, names), el("tbody", {}, ...rows)))));
  }
  buildChartControls(section.querySelector(".controls"));
  redraw();
}

function buildChartControls(controls) {
  if (RUNS.length > 1) RUNS.forEach((run, index) => {
    const box = el("input", { type: "checkbox", checked: !view.hidden.has(index), onchange: () => { box.checked ? view.hidden.delete(index) : view.hidden.add(index); redraw(); } });
    controls.append(el("label", {}, box, swatch(runColour(index)), run.name));
  });
  if (!view.isSmoothingChosen) view.smoothing = RUNS.some((run) => run.steps.length > 50) ? 0.6 : 0;
  const weight = el("span", { class: "weight" }, view.smoothing.toFixed(2));
  const slider = el("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing,
    oninput: () => { view.smoothing = +slider.value; view.isSmoothingChosen = true; weight.textContent = view.smoothing.toFixed(2); redraw(); },
  });
  controls.append(el("label", { title: "Weight of the past in an exponential moving average; 0 is off" }, "Smoothing", slider, weight));
  const log = el("input", { type: "checkbox", checked: view.log, onchange: () => { view.log = log.checked; redraw(); } });
  controls.append(el("label", { title: "Of charts without negative values" }, log, "Log axis"));
  const axis = choice("Horizontal axis", [["step", "steps"], ["seconds", "seconds"], ["tokens", "tokens"]], (value) => { view.axis = value; view.cursor = null; redraw(); });
  axis.value = view.axis;
  controls.append(labelled("Horizontal axis", axis));
}

function swatch(colour) {
  const node = el("span", { class: "swatch" });
  node.style.background = colour;
  return node;
}
