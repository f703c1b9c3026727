// The settings of the page, and what a page that reloads itself keeps: settings, open sections and the position on the page. They are kept
// in the browser's history entry of the page, which also works for a local file.
const kept = history.state && history.state.grpo || {};
const view = { axis: "step", smoothing: 0, isSmoothingChosen: false, log: false, cursor: null, samples: {}, ...kept.view };
view.hidden = new Set(view.hidden);
const FOLDS = "details[data-key]";

function reload() {
  const open = [...document.querySelectorAll(FOLDS)].map((node) => [node.dataset.key, node.open]);
  const state = { view: { ...view, hidden: [...view.hidden] }, open, top: window.scrollY };
  history.replaceState({ grpo: state }, "");
  location.reload();
}

// After the sections are built.
function restore() {
  if (!kept.open) return;
  const open = new Map(kept.open);
  for (const node of document.querySelectorAll(FOLDS)) if (open.has(node.dataset.key)) node.open = open.get(node.dataset.key);
  history.scrollRestoration = "manual";
  window.scrollTo(0, kept.top);
  history.replaceState(null, "");
}

// While the run goes on, `--watch` rewrites the file and the page reloads itself; not while a person reads tokens, marks text or uses keys.
function followRun(parent) {
  if (!DATA.reload_s) return;
  const box = el("input", { type: "checkbox", checked: true });
  parent.append(el("label", { id: "live" }, box, `reloads every ${DATA.reload_s} s`));
  setInterval(() => {
    const isBusy = document.hidden || document.querySelector(".tokens, :focus-visible") || !getSelection().isCollapsed;
    if (box.checked && !isBusy) reload();
  }, 1000 * DATA.reload_s);
}
