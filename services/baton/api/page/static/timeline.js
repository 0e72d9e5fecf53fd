// One request's life, from the recorders of all processes.

import { $, count, el, say, seconds } from "./dom.js";
import { bars } from "./phases.js";

const dialog = $("timeline");
$("timeline-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

export async function openTimeline(id) {
  say($("timeline-title"), `Request ${id}`);
  $("timeline-body").replaceChildren(el("p", { className: "empty" }, "asking all processes"));
  if (!dialog.open) dialog.showModal();
  try {
    const response = await fetch(`page/requests/${encodeURIComponent(id)}`, { cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    $("timeline-body").replaceChildren(...describe(await response.json()));
  } catch (error) {
    $("timeline-body").replaceChildren(el("p", { className: "notice bad" }, error.message));
  }
}

function describe(life) {
  const facts = [["outcome", life.outcome ? life.reason || life.outcome : "running"], ["took", seconds(life.total)],
    ["first token", seconds(life.ttft)], ["prompt", `${count(life.prompt_tokens)} tokens`], ["output", `${count(life.output_tokens)} tokens`]];
  const found = [el("p", { className: "facts" }, ...facts.map(([name, value]) => el("span", { "data-fact": name }, `${name} `, el("b", {}, value))))];
  found.push(...lanes(life));
  if (life.missing.length) found.push(el("p", { className: "notice bad" }, `did not answer: ${life.missing.join("; ")}`));
  found.push(table("What it waited for", ["from", "took", "phase", "process", ""], life.phases.map(
    ([name, role, address, start, end, detail]) => [start, (end ?? life.total) - start, name, `${role} ${address}`, detail])));
  found.push(table("What each process recorded", ["at", "process", "event", ""], life.events.map(
    ([at, role, address, kind, detail]) => [at, `${role} ${address}`, kind, detail])));
  return found;
}

/** A lane for each process: what the request waited for there, and the work beside it. */
function lanes(life) {
  const places = new Map();
  for (const phase of [...life.phases, ...life.work]) {
    const place = `${phase[1]} ${phase[2]}`.trim();
    if (!places.has(place)) places.set(place, { role: phase[1], address: phase[2], phases: [], work: [] });
  }
  for (const phase of life.phases) places.get(`${phase[1]} ${phase[2]}`.trim()).phases.push(phase);
  for (const phase of life.work) places.get(`${phase[1]} ${phase[2]}`.trim()).work.push(phase);
  return [...places.values()].map(({ role, address, phases, work }) => {
    const bar = el("div", { className: "bar", role: "img", "aria-label": phases.map(
      ([name, , , start, end]) => `${name} ${seconds((end ?? life.total) - start)}`).join(", ") || "work only" },
    ...bars(phases, life.total, life.total));
    if (life.ttft !== null) bar.append(el("b", { title: "first token", css: { left: `${(100 * life.ttft) / life.total}%` } }));
    const beside = el("div", { className: "bar work", "aria-hidden": "true" }, ...bars(work.map(
      ([name, ...rest]) => [name === "chunk" ? "prefill" : name, ...rest]), life.total, life.total));
    return el("div", { className: "lane" }, el("span", {}, role, el("small", {}, address)),
      el("div", {}, bar, work.length ? beside : null));
  });
}

function table(title, head, rows) {
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": title }, el("h3", {}, title),
    el("table", { className: "events" }, el("thead", {}, el("tr", {}, ...head.map((word) => el("th", { scope: "col" }, word)))),
      el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => (
        typeof cell === "number" ? el("td", { "data-seconds": cell }, seconds(cell)) : el("td", {}, cell))))))));
}
