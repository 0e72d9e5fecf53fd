// Each KV pool as a map of its pages.

import { $, colour, count, el, plural, say } from "./dom.js";

// In the order of a run's numbers: baton/api/page/frames.py.
const USES = [["free", "free"], ["cached", "cached"], ["owned", "owned by a request"], ["leased", "leased"],
  ["pulling", "being pulled"], ["quarantined", "quarantined"]];
const HEIGHT = 190, LEAST = 4, MOST = 11; // of a map and of its cells, in pixels

const pools = new Map();

$("uses").append(...USES.map(([use, word]) => el("li", { css: { "--key": `var(--${use})` } }, word)));

export function showPools(frame) {
  if (frame.whole) for (const address of [...pools.keys()]) if (!(address in frame.pools)) remove(address);
  for (const [address, map] of Object.entries(frame.pools)) {
    if (map === null) { remove(address); continue; }
    const process = frame.processes.find((each) => each.address === address);
    const pool = pools.get(address) ?? add(address, process?.role ?? "");
    pool.map = map;
    pool.cells = cellsOf(map);
    describe(pool);
    draw(pool);
  }
  const addresses = frame.processes.map((each) => each.address);
  for (const address of [...pools.keys()]) if (!addresses.includes(address)) remove(address);
  const order = addresses.filter((address) => pools.has(address));
  if (order.join() !== [...$("pools").children].map((each) => each.dataset.address).join()) {
    $("pools").replaceChildren(...order.map((address) => pools.get(address).box));
  }
  $("pools-none").hidden = pools.size > 0;
}

function remove(address) {
  pools.get(address)?.box.remove();
  pools.delete(address);
}

function add(address, role) {
  const size = el("span"), canvas = el("canvas", { role: "img" }), text = el("p");
  const title = el("h3", {}, `${role} ${address}`, size);
  const box = el("div", { className: "pool", "data-address": address }, title, canvas, text);
  const pool = { box, size, canvas, text, role, address };
  canvas.addEventListener("pointermove", (event) => { pool.at = event; describe(pool); });
  canvas.addEventListener("pointerleave", () => { pool.at = null; describe(pool); });
  new ResizeObserver(() => draw(pool)).observe(canvas);
  pools.set(address, pool);
  return pool;
}

/** A list of pages by use for each cell. */
function cellsOf(map) {
  const cells = [];
  for (const [length, ...pages] of map.runs) for (let i = 0; i < length; i += 1) cells.push(pages);
  return cells;
}

function totals(map) {
  const found = USES.map(() => 0);
  for (const [length, ...pages] of map.runs) pages.forEach((value, use) => { found[use] += length * value; });
  return found;
}

function describe(pool) {
  const { map } = pool;
  const words = totals(map).map((value, use) => [value, USES[use][1]]).filter(([value]) => value);
  const sum = words.map(([value, word]) => `${count(value)} ${word}`).join(", ");
  say(pool.size, map.pages_per_cell > 1 ? `1 cell is ${map.pages_per_cell} of ${plural(map.total, "page")}` : plural(map.total, "page"));
  pool.canvas.setAttribute("aria-label", `Pages of ${pool.role} ${pool.address}: ${sum}`);
  pool.box.dataset.counts = JSON.stringify(Object.fromEntries(totals(map).map((value, use) => [USES[use][0], value])));
  say(pool.text, under(pool) ?? sum);
}

/** What is under the pointer. */
function under(pool) {
  if (!pool.at || !pool.columns) return null;
  const box = pool.canvas.getBoundingClientRect();
  const column = Math.floor((pool.at.clientX - box.left) / pool.pitch), row = Math.floor((pool.at.clientY - box.top) / pool.pitch);
  const index = row * pool.columns + column, cell = pool.cells[index];
  if (!cell || column >= pool.columns) return null;
  const each = pool.map.pages_per_cell, first = index * each, last = Math.min(first + each, pool.map.total) - 1;
  const words = cell.map((value, use) => [value, USES[use][1]]).filter(([value]) => value);
  return first === last ? `page ${count(first)}: ${words[0][1]}`
    : `pages ${count(first)} to ${count(last)}: ${words.map(([value, word]) => `${value} ${word}`).join(", ")}`;
}

function draw(pool) {
  const width = pool.canvas.clientWidth;
  if (!pool.cells || !width) return;
  const ratio = devicePixelRatio || 1, wanted = Math.sqrt((width * HEIGHT) / pool.cells.length);
  const columns = Math.max(1, Math.ceil(width / Math.min(MOST, Math.max(LEAST, wanted)))), pitch = width / columns;
  const rows = Math.ceil(pool.cells.length / columns), height = Math.ceil(rows * pitch);
  pool.columns = columns;
  pool.pitch = pitch;
  if (pool.canvas.width !== Math.round(width * ratio) || pool.canvas.height !== Math.round(height * ratio)) {
    pool.canvas.width = Math.round(width * ratio);
    pool.canvas.height = Math.round(height * ratio);
    pool.canvas.style.height = `${height}px`;
  }
  const context = pool.canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const colours = USES.map(([use]) => colour(use));
  const side = pitch - 1;
  pool.cells.forEach((cell, index) => {
    let x = (index % columns) * pitch;
    const y = Math.floor(index / columns) * pitch, sum = cell.reduce((a, b) => a + b, 0);
    cell.forEach((value, use) => { // a cell of several uses is divided among them
      if (!value) return;
      const part = (side * value) / sum;
      context.fillStyle = colours[use];
      context.fillRect(x, y, part, side);
      x += part;
    });
  });
}

export function redrawPools() {
  for (const pool of pools.values()) draw(pool);
}
