// The sections Before and after, Configuration, Environment.
function head(index) {
  return el("span", { class: "run-head" }, RUNS.length > 1 ? swatch(runColour(index)) : null, RUNS[index].name);
}

function side(cell, isRate) {
  if (!cell) return el("td", { class: "number" }, "\u2013");
  const number = isRate ? formatPercent(cell.value) : formatNumber(cell.value);
  const interval = intervalText(cell, isRate);
  return el("td", { class: "number" }, number, ...(interval ? [" ", el("span", { class: "interval" }, interval)] : []));
}

function intervalText(cell, isRate) {
  const bound = (value) => isRate ? (100 * value).toFixed(1) : formatNumber(value);
  return isNumber(cell.low) ? `${bound(cell.low)}\u2013${bound(cell.high)}` : "";
}

// The change of a row of the table, coloured if the two intervals do not overlap.
function changeOf(row) {
  if (!row.before || !row.after) return { text: "\u2013", class: "" };
  const change = row.after.value - row.before.value, good = row.name.endsWith("truncated") ? change < 0 : change > 0;
  const areApart = change && isNumber(row.before.low) && (row.after.low > row.before.high || row.after.high < row.before.low);
  return { text: row.is_rate ? points(change) : formatSigned(change), class: areApart && row.is_rate ? (good ? "better" : "worse") : "" };
}

function points(change) {
  const text = (100 * Math.abs(change)).toFixed(1);
  return text === "0.0" ? text : (change > 0 ? "+" : "\u2212") + text;
}

function buildEvaluation(section) {
  const content = section.querySelector(".content");
  const withEvaluation = RUNS.map((_, index) => index).filter((index) => RUNS[index].comparison.length);
  if (!withEvaluation.length) {
    content.append(el("p", { class: "note" }, "No evaluation has been written."));
    return;
  }
  const tables = el("div", { class: "tables" });
  content.append(tables);
  for (const index of withEvaluation) {
    const run = RUNS[index], body = el("tbody");
    for (const row of run.comparison) {
      const change = changeOf(row);
      body.append(el("tr", {}, el("th", { scope: "row" }, row.name.slice(5).replaceAll("_", " ")), side(row.before, row.is_rate), side(row.after, row.is_rate),
        el("td", { class: "number " + change.class }, change.text)));
    }
    const last = run.comparison.map((row) => row.after).find(Boolean);
    tables.append(el("div", { class: "scroll" }, el("table", {}, RUNS.length > 1 ? el("caption", {}, head(index)) : null,
      el("thead", {}, el("tr", {}, el("th", {}, ""), el("th", { class: "number" }, "before"), el("th", { class: "number" }, last ? `step ${last.step}` : "after"), el("th", { class: "number" }, "change"))), body)));
  }
  for (const note of DATA.notes) content.append(el("p", {}, note));
  content.append(el("p", { class: "note" }, "Beside a number: its 95% confidence interval over the evaluation problems, as the evaluation computed it. Changes of rates are in percentage points, coloured if the two intervals do not overlap."));
}

function buildConfig(section) {
  const content = section.querySelector(".content"), controls = section.querySelector(".controls");
  const isChanged = (key) => RUNS.some((run) => run.changed.includes(key));
  const keys = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].sort((a, b) => isChanged(b) - isChanged(a));
  if (!keys.length) {
    content.append(el("p", { class: "note" }, "No configuration was found."));
    return;
  }
  const rows = keys.map((key) => {
    const values = RUNS.map((run) => run.config[key]);
    const differs = RUNS.length > 1 ? new Set(values).size > 1 : isChanged(key);
    const cells = values.map((value) => appendText(el("td"), value === undefined ? "" : value));
    return { key, differs, node: el("tr", { class: differs ? "differs" : null }, el("th", { scope: "row" }, key), ...cells) };
  });
  const only = el("input", { type: "checkbox", checked: RUNS.length > 1, onchange: show, id: "only-differences" });
  const search = el("input", { type: "search", placeholder: "Search the keys", "aria-label": "Search the keys", oninput: show });
  if (RUNS.length > 1) controls.append(labelled("Only what differs", only));
  controls.append(search, el("span", { class: "note" }, "First: the keys that are not at their default."));
  const body = el("tbody");
  content.append(el("table", { style: `--columns: ${RUNS.length + 1}` }, el("thead", {}, el("tr", {}, el("th", {}, "key"), ...RUNS.map((_, index) => el("th", {}, head(index))))), body));
  function show() {
    const wanted = search.value.toLowerCase();
    const shown = rows.filter((row) => (RUNS.length === 1 || !only.checked || row.differs) && row.key.toLowerCase().includes(wanted));
    body.replaceChildren(...shown.map((row) => row.node));
    if (!shown.length) body.append(el("tr", {}, el("td", {}, "no key matches")));
  }
  show();
}

function buildEnvironment(section) {
  const content = section.querySelector(".content");
  const columns = RUNS.flatMap((run, index) => run.starts.map((start, number) => [index, number, start]));
  if (!columns.length) {
    content.append(el("p", { class: "note" }, "No starts.jsonl was found, which records where the run was started."));
    return;
  }
  const keys = [...new Set(columns.flatMap(([, , start]) => Object.keys(start)))];
  const body = el("tbody");
  for (const key of keys) {
    body.append(el("tr", {}, el("th", { scope: "row" }, key.replaceAll("_", " ")), ...columns.map(([, , start]) => appendText(el("td"), start[key] ?? ""))));
  }
  content.append(el("table", { style: `--columns: ${columns.length + 1}` }, el("thead", {}, el("tr", {}, el("th", {}, ""), ...columns.map(([index, number]) => el("th", {}, head(index), RUNS[index].starts.length > 1 ? ` start ${number + 1}` : "")))), body));
}
