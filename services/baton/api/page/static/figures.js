// Figures of the last minute, and charts of the last five.

import { $, colour, count, el, rate, say, seconds } from "./dom.js";

const KEPT_SECONDS = 300;
// Places of the numbers of a point: baton/api/page/frames.py.
const AT = 0, REQUESTS = 1, TOKENS = 2, TTFT = 3, ITL = 6, GOODPUT = 9, RUNNING = 10;
const QUANTILES = ["p50", "p90", "p99"];
const LINES = ["one", "two", "three"];

let points = [];
let target = {};

function quantiles(name, title, first, about) {
  return {
    name, title, about, unit: seconds, series: [first, first + 1, first + 2], keys: QUANTILES, target: () => target[name],
    big: (frame) => split(seconds(frame.minute?.[name].p50)),
    sub: (frame) => QUANTILES.map((each, index) => [each, seconds(frame.minute?.[name][each]), LINES[index]]),
  };
}

const tiles = [
  {
    name: "requests", title: "Requests", unit: rate, series: [REQUESTS, GOODPUT], keys: ["ended", "in time"],
    about: "requests that ended, per second",
    big: (frame) => [rate(frame.minute?.requests), "/s"],
    sub: (frame) => [["running", count(frame.totals.running)], ["finished", count(frame.totals.finished)],
      ["failed", count(frame.totals.failed)]],
  },
  {
    name: "tokens", title: "Output tokens", unit: rate, series: [TOKENS], keys: ["tokens"],
    about: "output tokens per second",
    big: (frame) => [rate(frame.minute?.output_tokens), "/s"],
    sub: (frame) => [["since start", count(frame.totals.output_tokens)],
      ["prompts", `${count(frame.totals.prompt_tokens)}, ${share(frame.totals.cached_tokens, frame.totals.prompt_tokens)} cached`]],
  },
  quantiles("ttft", "Time to first token", TTFT, "seconds to the first token"),
  quantiles("itl", "Between tokens", ITL, "seconds between tokens"),
  {
    name: "goodput", title: "Goodput", unit: rate, series: [GOODPUT], keys: ["in time"],
    about: "requests per second that met both latency targets",
    big: (frame) => frame.minute && frame.minute.good !== null ? split(`${Math.round(100 * frame.minute.good)} %`) : ["–", ""],
    sub: (frame) => [["first token within", seconds(frame.targets.ttft)], ["others", seconds(frame.targets.itl)]],
  },
];

const split = (text) => { const [number, unit] = text.split(" "); return [number, unit ?? ""]; };
const share = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "0 %");

for (const tile of tiles) {
  tile.number = el("span", { id: `${tile.name}-big` });
  tile.small = el("small");
  tile.line = el("p", { className: "sub" });
  tile.chart = el("div", { className: "chart", role: "img" });
  $("tiles").append(el("article", { className: "card tile", "aria-label": tile.title },
    el("h3", {}, tile.title), el("p", { className: "big" }, tile.number, tile.small), tile.line, tile.chart));
}

function subLine(tile, parts) {
  const text = parts.map((part) => part.join(" ")).join("|");
  if (tile.line.dataset.text === text) return;
  tile.line.dataset.text = text;
  tile.line.replaceChildren(...parts.map(([name, value, key]) => el("span",
    { className: key ? "key" : "", css: key ? { "--key": `var(--${key})` } : {}, "data-figure": name }, `${name} ${value}`)));
}

export function showFigures(frame) {
  target = frame.targets;
  const newest = frame.whole ? 0 : points.at(-1)?.[AT] ?? 0; // a whole frame may have held some of these already
  points = (frame.whole ? [] : points).concat(frame.points.filter((point) => point[AT] > newest));
  const oldest = frame.at - KEPT_SECONDS;
  if (points.length && points[0][AT] < oldest) points = points.filter((point) => point[AT] >= oldest);
  for (const tile of tiles) {
    const [number, unit] = tile.big(frame);
    say(tile.number, number);
    say(tile.small, unit);
    subLine(tile, tile.sub(frame));
  }
  if (frame.whole || frame.points.length) draw(frame.at);
}

function draw(now) {
  for (const tile of tiles) {
    const data = [points.map((point) => point[AT]), ...tile.series.map((place) => points.map((point) => point[place]))];
    if (!tile.plot) tile.plot = new uPlot(options(tile), data, tile.chart);
    tile.plot.setData(data, false);
    tile.plot.setScale("x", { min: now - KEPT_SECONDS, max: now });
    describe(tile, data);
  }
}

/** In words, for those who do not see the chart. */
function describe(tile, data) {
  const words = tile.keys.map((key, index) => {
    const known = data[index + 1].filter((value) => value !== null);
    return known.length ? `${key} from ${tile.unit(Math.min(...known))} to ${tile.unit(Math.max(...known))}` : `${key}: none`;
  });
  tile.chart.setAttribute("aria-label", `${tile.about} in the last five minutes: ${words.join(", ")}`);
}

function options(tile) {
  const line = (index) => ({
    label: tile.keys[index], stroke: () => colour(LINES[index]), width: 1.5, points: { show: false }, spanGaps: false,
    fill: index === 0 && tile.series.length < 3 ? () => `${colour("one")}1c` : undefined,
  });
  const axis = { stroke: () => colour("soft"), font: "10px Inter, system-ui, sans-serif", ticks: { show: false },
    grid: { stroke: () => colour("grid"), width: 1 } };
  return {
    width: tile.chart.clientWidth, height: tile.chart.clientHeight, cursor: { show: false }, legend: { show: false },
    padding: [4, 8, 0, 0],
    scales: { x: { time: true }, y: { range: (plot, low, high) => [0, high > 0 ? 1.12 * high : 1] } },
    series: [{}, ...tile.series.map((_, index) => line(index))],
    axes: [
      { ...axis, size: 18, gap: 4, grid: { show: false }, space: 40, incrs: [120, 300], values: (plot, at) => at.map(clock) },
      { ...axis, size: 46, gap: 3, space: 26, values: (plot, ticks) => ticks.map((tick) => (plot.data[1].some((value) => value) ? (tick ? tile.unit(tick) : "0") : "")) },
    ],
    hooks: { draw: tile.target ? [(plot) => drawTarget(plot, tile.target())] : [] },
  };
}

const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 5);

function drawTarget(plot, value) {
  if (value === undefined || value > plot.scales.y.max) return;
  const { ctx, bbox } = plot, y = Math.round(plot.valToPos(value, "y", true));
  ctx.save();
  ctx.strokeStyle = colour("bad");
  ctx.setLineDash([4, 4]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
}

export function redrawFigures() {
  for (const tile of tiles) tile.plot?.redraw(false, true);
}

new ResizeObserver(() => {
  for (const tile of tiles) tile.plot?.setSize({ width: tile.chart.clientWidth, height: tile.chart.clientHeight });
}).observe($("tiles"));
