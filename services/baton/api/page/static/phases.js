// Bars of a request's phases.

import { el, seconds } from "./dom.js";

const PHASES = {
  admit: "gateway", tokenize: "tokenize", route: "gateway", send: "gateway", queue: "queue", prefill: "prefill",
  "pull images": "pull", encode: "encode", "hand-off": "handoff", pull: "pull", decode: "decode", deliver: "gateway", resume: "resume", unknown: "gateway",
};

/** Bars of phases [name, role, address, start, end or null], of a request that has taken `total` of `scale` seconds. */
export function bars(phases, total, scale, lasts = false) {
  return phases.map(([name, , , start, end], index) => {
    const last = end === null, stop = last ? total : end;
    return el("i", {
      className: lasts && last && index === phases.length - 1 ? "lasts" : "", title: `${name} ${seconds(stop - start)}`,
      css: { left: `${(100 * start) / scale}%`, width: `${(100 * Math.max(0, stop - start)) / scale}%`, "--key": `var(--${PHASES[name] ?? "gateway"})` },
    });
  });
}
