// Errors and retries by reason; where prompts are computed, and why.

import { $, count, el } from "./dom.js";

const WAYS = { split: ["on prefill nodes", "prefill"], local: ["on decode nodes", "decode"] };
const WHYS = {
  cost: "expected to be sooner", mode: "--split says so", client: "the client asked for it", unknown: "costs not known yet",
};

export function showReasons({ refusals, failures, retries, resumes, prompts }) {
  list($("refusals"), refusals);
  list($("failures"), failures);
  list($("retries"), resumes ? { ...retries, "resumed at another decode node": resumes } : retries);
  const text = JSON.stringify(prompts);
  if ($("split").dataset.text === text) return;
  $("split").dataset.text = text;
  const sums = Object.fromEntries(Object.keys(WAYS).map((way) => [way, sum(prompts[way])]));
  const all = sums.split + sums.local;
  if (!all) {
    $("split").replaceChildren(el("p", { className: "empty" }, "No prompt has had a choice yet."));
    return;
  }
  const bar = el("div", { className: "ways", "aria-hidden": "true" }), lines = el("dl");
  for (const [way, [word, key]] of Object.entries(WAYS)) {
    bar.append(el("i", { css: { width: `${(100 * sums[way]) / all}%`, "--key": `var(--${key})` } }));
    for (const [why, value] of Object.entries(prompts[way])) {
      lines.append(el("dt", { className: "key", css: { "--key": `var(--${key})` } }, `${word}: ${WHYS[why] ?? why}`),
        el("dd", {}, `${count(value)} (${Math.round((100 * value) / all)} %)`));
    }
  }
  $("split").replaceChildren(bar, lines);
}

const sum = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

function list(target, counts) {
  const entries = Object.entries(counts).filter(([, value]) => value).sort((a, b) => b[1] - a[1]);
  const text = JSON.stringify(entries);
  if (target.dataset.text === text) return;
  target.dataset.text = text;
  target.replaceChildren(...entries.flatMap(([reason, value]) => [el("dt", {}, reason), el("dd", {}, count(value))]));
}
