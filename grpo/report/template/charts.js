// Line charts in SVG. Each shows all runs, with gaps where values are missing. Mouse, touch or arrow keys move a cursor through all charts
// of the page, which then show their values there.
const FIGURES = [];
const LEFT = 50, RIGHT = 14, TOP = 10, BOTTOM = 24;

// Exponential moving average, without the bias of its first value towards 0.
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

function logTicks(low, high) {
  const found = [], units = high / low < 1000 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    found.push(...units.map((unit) => unit * 10 ** power).filter((value) => value >= low && value <= high));
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

function tickText(value) {
  const short = +value.toPrecision(6), size = Math.abs(short);
  return size && (size >= 1e5 || size < 1e-3) ? short.toExponential().replace("e+", "e") : String(short);
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

// A figure. figure.redraw() draws it again, which also happens when its width changes; figure.showCursor() shows the values at the cursor.
function chart(title, help, getLines, options = {}) {
  const reading = el("output", { class: "reading", "aria-live": "off" });
  const holder = el("div"), scale = el("span", { class: "scale" });
  const figure = el("figure", { "data-chart": title }, el("h3", {}, options.label || title, scale), holder, reading, help ? el("figcaption", {}, help) : null);
  let lines = [], drawing = null;
  figure.redraw = () => {
    lines = getLines();
    drawing = draw(title, lines, Math.max(holder.clientWidth || 360, 220), options);
    scale.textContent = view.log ? drawing.scale : "";
    holder.replaceChildren(drawing.root);
    figure.showCursor();
  };
  figure.showCursor = () => {
    drawing.showCursor();
    const x = view.cursor, at = lines.length && x !== null ? lines[0].x[nearest(lines[0].x, x)] : null;
    reading.replaceChildren(lines.length ? (isNumber(at) ? `${view.axis.replace(/s$/, "")} ${formatNumber(at)}: ` : "last: ") : "");
    lines.forEach((line, k) => {
      const i = x === null ? line.x.length - 1 : nearest(line.x, x);
      const text = formatNumber(line.raw[i]) + (line.shown === line.raw || !isNumber(line.shown[i]) ? "" : ` (smoothed ${formatNumber(line.shown[i])})`);
      const name = lines.length > 1 ? el("b", {}, line.name) : "";
      if (name) name.style.color = line.colour;
      reading.append(k ? " \u00b7 " : "", name, name ? " " + text : text);
    });
  };
  new ResizeObserver(() => { if (holder.clientWidth && holder.clientWidth !== figure.width) { figure.width = holder.clientWidth; figure.redraw(); } }).observe(holder);
  FIGURES.push(figure);
  return figure;
}

function nearest(xs, x) {
  let best = 0;
  for (let i = 0; i < xs.length; i++) if (isNumber(xs[i]) && Math.abs(xs[i] - x) < Math.abs((xs[best] ?? Infinity) - x)) best = i;
  return best;
}

// {root: the SVG, scale: a note on its vertical axis if a logarithmic one is wanted, showCursor: a function}
function draw(title, lines, width, options) {
  const height = options.height || 190;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: "0" });
  const values = lines.flatMap((line) => [line.raw, ...(line.band || []).filter(Boolean)]).flat().filter(isNumber);
  const isLog = view.log && !options.fromZero && values.every((value) => value >= 0) && values.some((value) => value > 0);
  const hasZeros = isLog && values.includes(0), positive = (list) => list.map((value) => value > 0 ? value : null);
  if (hasZeros) lines = lines.map((line) => {
    const raw = positive(line.raw), shown = line.shown === line.raw ? raw : smooth(raw, view.smoothing);
    return { ...line, raw, shown, band: line.band && line.band.map((list) => list && positive(list)) };
  });
  const xRange = extent(lines.map((line) => line.x)), yRange = extent(lines.flatMap((line) => [line.raw, ...(line.band || []).filter(Boolean)]));
  root.setAttribute("aria-label", title + (yRange ? `: from ${formatNumber(yRange[0])} to ${formatNumber(yRange[1])}` : ": no values"));
  if (!xRange || !yRange) {
    root.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values yet"));
    return { root, scale: "", showCursor() {} };
  }
  const to = isLog ? Math.log10 : (y) => y;
  let [x0, x1] = xRange, [y0, y1] = (options.fromZero ? [0, yRange[1]] : yRange).map(to);
  if (x0 === x1) x1 = x0 + 1;
  if (y0 === y1) { const margin = Math.abs(y0) * 0.1 || 1; y0 -= options.fromZero || y0 === 0 ? 0 : margin; y1 += margin; }
  const margin = (y1 - y0) * 0.05;
  y1 += margin; if (!options.fromZero) y0 -= margin;
  const px = (x) => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT);
  const py = (y) => TOP + (y1 - to(y)) / (y1 - y0) * (height - TOP - BOTTOM);
  for (const y of isLog ? logTicks(10 ** y0, 10 ** y1) : ticks(y0, y1, Math.round(height / 40))) {
    root.append(svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: py(y), y2: py(y) }));
    root.append(svg("text", { x: LEFT - 5, y: py(y) + 4, "text-anchor": "end" }, tickText(y)));
  }
  for (const x of ticks(x0, x1, Math.max(2, Math.floor(width / 90)))) {
    if (view.axis === "step" && !Number.isInteger(x)) continue;
    root.append(svg("text", { x: px(x), y: height - 7, "text-anchor": "middle" }, tickText(x)));
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
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, x1: 0, x2: 0, visibility: "hidden" });
  root.append(cursor);
  const grid = [...new Set(lines.flatMap((line) => line.x.filter(isNumber)))].sort((a, b) => a - b);
  const showCursor = () => {
    const isInside = view.cursor !== null && view.cursor >= x0 && view.cursor <= x1;
    set(cursor, { visibility: isInside ? "visible" : "hidden", x1: isInside ? px(view.cursor) : 0, x2: isInside ? px(view.cursor) : 0 });
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect();
    moveCursor(grid[nearest(grid, x0 + ((event.clientX - box.left) * width / box.width - LEFT) / (width - LEFT - RIGHT) * (x1 - x0))]);
  });
  root.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") moveCursor(null); });
  root.addEventListener("keydown", (event) => {
    const here = view.cursor === null ? grid.length - 1 : nearest(grid, view.cursor);
    const target = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: grid.length - 1 }[event.key];
    if (target === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    moveCursor(grid[Math.min(Math.max(target, 0), grid.length - 1)]);
  });
  return { root, scale: isLog ? (hasZeros ? "log, without zeros" : "log") : options.fromZero ? "linear" : "linear: has values below 0", showCursor };
}

function moveCursor(x) {
  view.cursor = x;
  for (const figure of FIGURES) figure.showCursor();
}
