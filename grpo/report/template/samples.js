// Completions by step, with filters and pages; for each token its log-prob, ratio, advantage and KL.
const PER_PAGE = 5;
const FILTERS = {
  all: ["all", () => true],
  up: ["advantage above 0", (s) => s.advantage > 0],
  down: ["advantage below 0", (s) => s.advantage < 0],
  cut: ["truncated", (s) => !s.finished],
  unscorable: ["unscorable", (s) => !isNumber(s.reward)],
};
const SORTS = {
  order: ["as sampled", null],
  best: ["highest reward first", (a, b) => rank(b.reward) - rank(a.reward)],
  worst: ["lowest reward first", (a, b) => rank(a.reward) - rank(b.reward)],
  longest: ["longest first", (a, b) => b.length - a.length],
};
const QUANTITIES = {
  // label, value of a token, whether it can be negative, value with the strongest colour (null: the largest), meaning of the colour
  logprob: ["log-prob", (t) => t.logprob, false, 5, (most) => `stronger colour: less likely; strongest at ${formatNumber(-most)} and below`],
  ratio: ["ratio after the step", (t) => isNumber(t.ratio) ? Math.log(t.ratio) : null, true, null,
    (most) => `green: more likely after the step, red: less likely; strongest at ${formatNumber(Math.exp(most))} and ${formatNumber(Math.exp(-most))}`],
  advantage: ["advantage", (t) => t.advantage, true, null, () => "green: above 0, red: below"],
  kl: ["KL to the reference", (t) => t.kl, false, null, (most) => `stronger colour: larger; strongest at ${formatNumber(most)}`],
};

function rank(value) {
  return isNumber(value) ? value : -Infinity;
}

// Sets a background colour; share 0 is no colour, 1 the strongest.
function shade(node, share, colour) {
  const strength = Math.round(60 * Math.min(Math.max(share, 0), 1));
  if (strength > 0) node.style.background = `color-mix(in srgb, ${colour} ${strength}%, transparent)`;
}

function chip(label, value, low, high) {
  const node = el("span", { class: "chip" }, label + " " + (isNumber(value) ? formatNumber(value) : "unscorable"));
  if (isNumber(value) && high > low) {
    const position = (value - low) / (high - low);
    shade(node, Math.abs(position - 0.5) * 2, position >= 0.5 ? "var(--good)" : "var(--bad)");
  }
  return node;
}

function buildSamples(section) {
  const content = section.querySelector(".content"), controls = section.querySelector(".controls");
  const withSamples = RUNS.map((run, index) => index).filter((index) => RUNS[index].samples.length);
  if (!withSamples.length) {
    content.append(el("p", { class: "note" }, "This run kept no completions (see logging.log_completions)."));
    return;
  }
  const state = { run: withSamples[0], step: null, isNewest: true, filter: "all", sort: "order", search: "", page: 0, quantity: "ratio", ...view.samples };
  view.samples = state;
  const steps = () => [...new Set(RUNS[state.run].samples.map((sample) => sample.step))];
  if (!withSamples.includes(state.run)) state.run = withSamples[0];
  if (state.isNewest || state.step !== null && !steps().includes(state.step)) state.step = steps().at(-1);
  const stepSelect = choice("Step", [], (value) => update({ step: value === "every" ? null : +value }));
  const slider = el("input", { type: "range", min: 0, "aria-label": "Step", oninput: () => update({ step: steps()[+slider.value] }) });
  const earlier = el("button", { type: "button", onclick: () => move(-1) }, "Earlier step");
  const later = el("button", { type: "button", onclick: () => move(1) }, "Later step");
  const search = el("input", { type: "search", value: state.search, placeholder: "Search the text", "aria-label": "Search the text", oninput: () => update({ search: search.value.toLowerCase() }) });
  if (withSamples.length > 1) {
    const runs = choice("Run", withSamples.map((index) => [index, RUNS[index].name]), (value) => {
      state.run = +value;
      update({ step: steps().at(-1) });
    });
    runs.value = state.run;
    controls.append(labelled("Run", runs));
  }
  const filter = choice("Show", Object.entries(FILTERS).map(([key, [text]]) => [key, text]), (value) => update({ filter: value }));
  const sort = choice("Order", Object.entries(SORTS).map(([key, [text]]) => [key, text]), (value) => update({ sort: value }));
  [filter.value, sort.value] = [state.filter, state.sort];
  controls.append(labelled("Step", stepSelect), slider, earlier, later, labelled("Show", filter), labelled("Order", sort), search);
  const count = el("p", { class: "note", "aria-live": "polite", id: "sample-count" });
  const list = el("div", { id: "sample-list" });
  const previous = el("button", { type: "button", onclick: () => update({ page: state.page - 1 }) }, "Previous page");
  const next = el("button", { type: "button", onclick: () => update({ page: state.page + 1 }) }, "Next page");
  const pageNumber = el("span", { class: "note", id: "sample-page" });
  content.append(count, list, el("div", { class: "controls" }, previous, pageNumber, next));

  function move(by) {
    const all = steps(), here = state.step === null ? all.length : all.indexOf(state.step);
    update({ step: all[Math.min(Math.max(here + by, 0), all.length - 1)] });
  }
  function update(change) {
    Object.assign(state, { page: 0 }, change);
    show();
  }
  function show() {
    const run = RUNS[state.run], all = steps();
    state.isNewest = state.step === all.at(-1);
    stepSelect.replaceChildren(el("option", { value: "every" }, "every"), ...all.map((step) => el("option", { value: step }, String(step))));
    stepSelect.value = state.step === null ? "every" : String(state.step);
    slider.max = all.length - 1;
    slider.value = state.step === null ? all.length - 1 : all.indexOf(state.step);
    earlier.disabled = state.step === all[0];
    later.disabled = state.step === all.at(-1);
    let chosen = run.samples.filter((sample) => (state.step === null || sample.step === state.step) && FILTERS[state.filter][1](sample));
    if (state.search) chosen = chosen.filter((s) => (promptText(s.prompt) + "\n" + s.completion).toLowerCase().includes(state.search));
    if (SORTS[state.sort][1]) chosen = [...chosen].sort(SORTS[state.sort][1]);
    const pages = Math.max(Math.ceil(chosen.length / PER_PAGE), 1);
    state.page = Math.min(Math.max(state.page, 0), pages - 1);
    count.textContent = `${chosen.length} completion${chosen.length === 1 ? "" : "s"}` + (state.step === null ? "" : ` of step ${state.step}`);
    pageNumber.textContent = `page ${state.page + 1} of ${pages}`;
    previous.disabled = state.page === 0;
    next.disabled = state.page === pages - 1;
    list.replaceChildren(...chosen.slice(state.page * PER_PAGE, (state.page + 1) * PER_PAGE).map((sample, i) => card(sample, run, state, i)));
  }
  show();
}

function card(sample, run, state, position) {
  run.ranges = run.ranges || rangesOf(run.samples);
  const facts = el("div", { class: "facts" }, el("strong", {}, `step ${sample.step}, problem ${sample.problem}`));
  facts.append(chip("reward", sample.reward, ...run.ranges.reward));
  for (const [name, value] of Object.entries(sample.rewards)) facts.append(chip(name, value, ...run.ranges[name]));
  const advantage = el("span", { class: "chip" }, "advantage " + formatSigned(sample.advantage));
  if (sample.advantage) shade(advantage, Math.abs(sample.advantage) / run.ranges.advantage, sample.advantage > 0 ? "var(--good)" : "var(--bad)");
  facts.append(advantage, el("span", {}, `${sample.length} tokens, ${sample.stop_reason || (sample.finished ? "finished" : "truncated")}`));
  const node = el("article", { class: "sample" }, facts);
  const prompt = appendText(el("div", { class: "text" }), promptText(sample.prompt));
  node.append(el("details", { "data-key": "prompt " + position, open: position === 0 }, el("summary", {}, "Prompt"), prompt));
  node.append(appendText(el("div", { class: "text completion" }), sample.completion));
  if (sample.answer !== null) node.append(el("div", { class: "answer" }, "Reference answer", appendText(el("div", { class: "text" }), sample.answer)));
  if (sample.tokens && sample.logprobs) {
    const holder = el("div");
    const button = el("button", {
      type: "button", "aria-expanded": "false",
      onclick: () => {
        const open = button.getAttribute("aria-expanded") === "true";
        button.setAttribute("aria-expanded", String(!open));
        holder.replaceChildren(...(open ? [] : [tokenView(sample, state)]));
      },
    }, "Tokens");
    node.append(button, holder);
  }
  return node;
}

function rangesOf(samples) {
  const ranges = { reward: extent([samples.map((s) => s.reward)]) || [0, 0] };
  for (const sample of samples) for (const name of Object.keys(sample.rewards)) {
    ranges[name] = ranges[name] || extent([samples.map((s) => s.rewards[name])]) || [0, 0];
  }
  ranges.advantage = Math.max(1e-9, ...samples.map((s) => Math.abs(s.advantage || 0)));
  return ranges;
}

function tokenView(sample, state) {
  const facts = sample.tokens.map((text, i) => {
    const logprob = sample.logprobs[i], after = sample.updated_logprobs ? sample.updated_logprobs[i] : null;
    const d = sample.ref_logprobs ? sample.ref_logprobs[i] - logprob : null;
    return {
      text, logprob, after, isMasked: sample.sampled ? !sample.sampled[i] : false,
      advantage: sample.sampled && !sample.sampled[i] ? null : sample.advantage,
      ratio: isNumber(after) && isNumber(logprob) ? Math.exp(after - logprob) : null,
      kl: isNumber(d) ? Math.exp(d) - d - 1 : null,
    };
  });
  const strip = el("div", { class: "strip", role: "group", "aria-label": "Tokens; the arrow keys move between them" });
  const reading = el("output", { class: "reading" });
  const nodes = facts.map((token, i) => {
    const shown = token.text === "\n" ? "\u23ce\n" : token.text === "" ? "\u2205" : token.text;
    const node = appendText(el("span", { class: token.isMasked ? "token masked" : "token", tabindex: i ? "-1" : "0" }), shown);
    node.addEventListener("focus", () => describe(i));
    node.addEventListener("pointerenter", () => describe(i));
    node.addEventListener("click", () => node.focus());
    return node;
  });
  function describe(i) {
    const t = facts[i];
    reading.replaceChildren();
    if (t.isMasked) return appendText(reading, `token ${i + 1} of ${facts.length} \u201c${t.text}\u201d: written by a tool or the environment, and not trained on`);
    appendText(reading, `token ${i + 1} of ${facts.length} \u201c${t.text}\u201d: log-prob ${formatNumber(t.logprob)}`
      + (isNumber(t.logprob) ? ` (probability ${formatPercent(Math.exp(t.logprob))})` : "")
      + `, after the step ${formatNumber(t.after)}, ratio ${formatNumber(t.ratio)}, advantage ${formatSigned(t.advantage)}`
      + (t.kl === null ? "" : `, KL to the reference ${formatNumber(t.kl)}`));
  }
  strip.addEventListener("keydown", (event) => {
    const here = nodes.indexOf(document.activeElement);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (to === undefined || here < 0 || !nodes[to]) return;
    event.preventDefault();
    nodes[here].tabIndex = -1;
    nodes[to].tabIndex = 0;
    nodes[to].focus();
  });
  strip.append(...nodes);
  const available = Object.entries(QUANTITIES).filter(([, [, of]]) => facts.some((t) => isNumber(of(t))));
  const meaning = el("span", { class: "note", "aria-live": "polite" });
  function colour(name) {
    const [, of, hasSigns, fixed, meaningOf] = QUANTITIES[name];
    const most = fixed || Math.max(1e-12, ...facts.map((t) => Math.abs(of(t) || 0)));
    meaning.textContent = meaningOf(most);
    nodes.forEach((node, i) => {
      const value = of(facts[i]);
      node.style.background = "";
      if (!isNumber(value)) return;
      shade(node, Math.abs(value) / most, hasSigns ? (value > 0 ? "var(--good)" : "var(--bad)") : "var(--run-1)");
    });
  }
  const start = available.some(([key]) => key === state.quantity) ? state.quantity : (available[0] || ["logprob"])[0];
  const select = choice("Colour by", available.map(([key, [text]]) => [key, text]), (value) => { state.quantity = value; colour(value); });
  select.value = start;
  colour(start);
  return el("div", { class: "tokens" }, el("div", { class: "controls" }, labelled("Colour by", select), meaning), strip, reading);
}
