// Running and recent requests as bars of phases; a click shows the whole timeline.

import { $, count, el, plural, say, seconds } from "./dom.js";
import { bars } from "./phases.js";
import { openTimeline } from "./timeline.js";

const SHOWN = 16;
const HELD_SECONDS = 5; // since somebody last pointed at the list or moved within it: meanwhile no row moves
const LEGEND = [["gateway", "gateway"], ["tokenize", "tokenize"], ["queue", "queue"], ["prefill", "prefill"],
  ["encode", "encode"], ["handoff", "hand-off"], ["pull", "pull"], ["decode", "decode"], ["resume", "resume"]];

const known = new Map();
let touched = -Infinity;

for (const kind of ["pointermove", "focusin", "keydown"]) $("requests").addEventListener(kind, () => { touched = performance.now(); });
for (const kind of ["pointerleave", "focusout"]) $("requests").addEventListener(kind, () => { touched = -Infinity; });

$("phases").append(...LEGEND.map(([key, word]) => el("li", { css: { "--key": `var(--${key})` } }, word)));

export function showRequests(frame) {
  if (frame.whole) known.clear();
  for (const request of frame.requests ?? []) known.set(request.id, { ...request, got: frame.at });
  const list = $("requests"), held = performance.now() - touched < 1000 * HELD_SECONDS;
  const latest = held ? [...list.children].map((row) => known.get(row.firstChild.dataset.id)).filter(Boolean)
    : [...known.values()].sort((a, b) => b.at - a.at);
  if (!held) for (const gone of latest.splice(SHOWN)) known.delete(gone.id);
  for (const each of latest) if (!each.outcome) each.total = Math.max(each.total, frame.at - each.at);
  const scale = Math.max(...latest.map((each) => each.total), 1e-3);
  while (list.children.length > latest.length) list.lastElementChild.remove();
  while (list.children.length < latest.length) list.append(makeRow());
  latest.forEach((request, index) => fill(list.children[index], request, scale));
  $("requests-none").hidden = latest.length > 0;
  $("requests-axis").hidden = !latest.length;
  $("requests-axis").replaceChildren(el("span"),
    el("span", {}, ...[0, 0.5, 1].map((part) => el("i", {}, part ? seconds(scale * part) : "0"))));
  const note = frame.totals.running ? `${plural(frame.totals.running, "request")} running` : "none running";
  say($("requests-note"), held ? `${note}, list held` : note);
}

function makeRow() {
  const button = el("button", { type: "button" }, el("span", { className: "mono" }), el("span", { className: "bar" }),
    el("span", { className: "took" }));
  button.addEventListener("click", () => openTimeline(button.dataset.id));
  return el("li", {}, button);
}

function fill(row, request, scale) {
  const [button] = row.children, [name, bar, took] = button.children;
  const text = JSON.stringify([request, scale]);
  if (button.dataset.text === text) return;
  button.dataset.text = text;
  button.dataset.id = request.id;
  say(name, `#${request.id.split("-").pop()}`);
  bar.replaceChildren(...bars(request.phases, request.total, scale, !request.outcome));
  if (request.ttft !== null) bar.append(el("b", { title: "first token", css: { left: `${(100 * request.ttft) / scale}%` } }));
  const end = request.outcome === "failed" ? request.reason || "failed" : request.outcome || "running";
  say(took, `${seconds(request.total)} · ${request.outcome === "finished" ? `${count(request.output_tokens)} tokens` : end}`);
  took.classList.toggle("failed", request.outcome === "failed");
  button.setAttribute("aria-label", `request ${request.id}, ${end}, ${seconds(request.total)}: show its timeline`);
}
