// The first screen: the evaluation before and after, and the curve of the reward.
function headlineRows(run) {
  const accuracies = run.comparison.filter((row) => /^eval\/(greedy_accuracy$|mean@)/.test(row.name));
  const rows = (accuracies.length ? accuracies : run.comparison).slice(0, 2).map((row) => ({ ...row, label: row.name.slice(5).replaceAll("_", " ") }));
  return [...rows, ...(run.reward ? [run.reward] : [])].slice(0, RUNS.length > 1 ? 1 : 3);
}

function tile(row) {
  const hasIntervals = row.before && row.after && isNumber(row.after.low);
  const change = changeOf(row), number = (value) => row.is_rate ? formatPercent(value) : formatNumber(value);
  const side = (cell, name) => el("div", { class: name },
    el("div", { class: "value" }, cell ? number(cell.value) : "\u2013"),
    el("div", { class: "interval" }, cell ? intervalText(cell, row.is_rate) || (cell.first === undefined ? `step ${cell.step}` : `steps ${cell.first}\u2013${cell.step}`) : name === "after" ? "not yet" : "not evaluated"));
  return el("div", { class: "tile" },
    el("div", { class: "label" }, row.label, hasIntervals ? el("span", {}, `step ${row.before.step} \u2192 ${row.after.step}`) : null),
    el("div", { class: "sides" }, side(row.before, "before"), el("span", { class: "arrow", "aria-label": "to" }, "\u2192"), side(row.after, "after"), row.before && row.after ? el("div", { class: "change " + change.class }, change.text) : null,
      hasIntervals ? el("span", { class: "interval confidence" }, "95% CI") : null));
}

function buildHeadline(section) {
  const isOne = RUNS.length === 1;
  document.getElementById("title").textContent = isOne ? RUNS[0].name : `${RUNS.length} runs`;
  const status = (run) => `${run.last_step} steps in ${formatDuration(run.seconds)}, ${run.status}`;
  const about = document.getElementById("about");
  if (isOne) appendText(about, RUNS[0].subject).append(el("br"));
  about.append((isOne ? status(RUNS[0]) + " \u00b7 " : "") + `written ${DATA.generated}`);
  followRun(about);
  const tiles = el("div", { class: "tiles" }), lines = el("ul");
  for (const note of DATA.notes) lines.append(el("li", { class: "hint" }, note));
  RUNS.forEach((run, index) => {
    const own = headlineRows(run).map(tile), title = isOne ? null : el("div", { class: "of-run" }, head(index), appendText(el("span", { class: "note" }, status(run) + " \u00b7 "), run.subject));
    if (title && own.length) own[0].prepend(title);
    tiles.append(...(own.length ? own : [title || ""]));
    const prefix = isOne ? "" : run.name + ", ";
    for (const [step, hint] of run.hints) lines.append(el("li", { class: "hint" }, `${prefix}step ${step}: ${hint}`));
    for (const note of run.notes) lines.append(el("li", { class: "note" }, isOne ? note : `${run.name}: ${note}`));
  });
  const figure = chart("reward", "", () => linesOf("reward"), { height: window.innerWidth < 640 ? 200 : 290, label: "Reward per step" });
  section.append(el("div", { class: "headline" }, tiles, figure));
  if (lines.children.length) section.append(lines);
}
