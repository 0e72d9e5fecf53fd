// A row for each process.

import { $, bytes, count, el, plural, seconds } from "./dom.js";

const rows = new Map();
const CLASSES = { serving: "is-good", draining: "is-warn", silent: "is-warn", unknown: "" };

export function showProcesses(processes) {
  const body = $("processes").tBodies[0];
  const known = new Set();
  for (const process of processes) {
    const key = `${process.role} ${process.address}`;
    known.add(key);
    const text = JSON.stringify(process);
    const old = rows.get(key);
    if (old?.text === text) continue;
    const row = makeRow(process);
    if (old) old.row.replaceWith(row);
    else body.append(row);
    rows.set(key, { row, text });
  }
  for (const [key, { row }] of rows) if (!known.has(key)) { row.remove(); rows.delete(key); }
  const wanted = processes.map((each) => rows.get(`${each.role} ${each.address}`).row);
  if (wanted.some((row, index) => body.rows[index] !== row)) body.replaceChildren(...wanted);
}

function makeRow(process) {
  const { load } = process;
  const details = [process.address, process.device, process.pid && `pid ${process.pid}`].filter(Boolean).join(" · ");
  const health = el("td", { "data-label": "Health" },
    el("span", { className: `state ${CLASSES[process.health] ?? "is-bad"}` }, process.health === "unknown" ? "not heard yet" : process.health),
    ...process.problems.map((text) => el("small", { className: "problem" }, text)));
  const cells = [el("th", { scope: "row" }, process.role, el("small", {}, details)), health];
  for (const [label, parts] of [["Queue", queue(process)], ["Batch", batch(process)], ["Step", step(process)],
    ["KV pool", pool(process)], ["Memory", load ? [bytes(process.resident_bytes)] : []]]) {
    cells.push(el("td", { "data-label": label }, ...(parts.length ? parts : ["–"])));
  }
  return el("tr", { "data-role": process.role, "data-address": process.address, "data-health": process.health }, ...cells);
}

function queue({ role, load, wait, queued_tokens }) {
  if (!load || !["prefill", "decode", "encode"].includes(role)) return [];
  const parts = [["waiting", load.waiting], ["in prefill", load.prefilling], ["handing off", load.handing_off]];
  const words = parts.filter(([, value]) => value).map(([word, value]) => `${count(value)} ${word}`);
  const more = [queued_tokens && plural(queued_tokens, "token"), wait && `wait ${seconds(wait)}`].filter(Boolean);
  return [words.join(", ") || "empty", more.length ? el("small", {}, more.join(", ")) : null];
}

function batch({ role, load, drafter, tokens_a_row, encoded_images, images_a_batch }) {
  if (!load) return [];
  if (role === "gateway" || role === "tokenizer") return [plural(load.requests, "request")];
  if (role === "encode") {
    const so_far = encoded_images && `${plural(encoded_images, "image")} so far, ${images_a_batch.toFixed(1)} a batch`;
    return [plural(load.running, "image"), so_far ? el("small", {}, so_far) : null];
  }
  const more = [load.leases && plural(load.leases, "lease"), load.pulls && plural(load.pulls, "pull"),
    load.paused && `${load.paused} paused`,
    drafter && `${tokens_a_row.toFixed(2)} tokens a row with drafts (${drafter})`].filter(Boolean);
  return [plural(load.rows, "row"), more.length ? el("small", {}, more.join(", ")) : null];
}

const step = (process) => (process.step ? [seconds(process.step)] : []);

function pool({ pages }) {
  if (!pages?.total) return [];
  const used = pages.total - pages.free;
  const meter = el("span", { className: "meter", "aria-hidden": "true" });
  let left = 0;
  for (const state of ["owned", "cached", "quarantined"]) {
    const part = (100 * pages[state]) / pages.total;
    meter.append(el("i", { css: { left: `${left}%`, width: `${part}%`, "--key": `var(--${state})` } }));
    left += part;
  }
  return [`${Math.round((100 * used) / pages.total)} % of ${plural(pages.total, "page")}`, meter];
}
