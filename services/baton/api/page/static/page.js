// The page: takes frames from the gateway and hands them to the parts.

import { $, say } from "./dom.js";
import { showFigures, redrawFigures } from "./figures.js";
import { showProcesses } from "./processes.js";
import { showPools, redrawPools } from "./pools.js";
import { showReasons } from "./reasons.js";
import { showRequests } from "./requests.js";
import { showTry } from "./try.js";

const LATE_SECONDS = 5;
const NAMED = 3; // processes at the top of the page
let heard = performance.now();

function show(frame) {
  say($("model"), frame.model ?? "");
  document.title = frame.model ? `Baton · ${frame.model}` : "Baton";
  showHealth(frame.processes);
  showFirst(frame);
  showFigures(frame);
  showRequests(frame);
  showProcesses(frame.processes);
  showPools(frame);
  showReasons(frame);
  showTry(frame);
  document.body.dataset.frames = String(Number(document.body.dataset.frames ?? 0) + 1);
}

function showHealth(processes) {
  const unknown = processes.filter((each) => each.health === "unknown");
  const wrong = processes.filter((each) => each.health !== "serving" && each.health !== "unknown");
  const health = $("health");
  const words = wrong.slice(0, NAMED).map((each) => `${each.role} ${each.address} ${word(each.health)}`);
  if (wrong.length > NAMED) words.push(`${wrong.length - NAMED} more`);
  const fine = unknown.length ? `${unknown.length} of ${processes.length} processes not heard yet` : `all ${processes.length} processes serve`;
  say(health, wrong.length ? words.join(", ") : fine);
  const bad = wrong.some((each) => each.health === "unreachable" || each.health === "not serving");
  health.className = `health ${wrong.length ? (bad ? "is-bad" : "is-warn") : unknown.length ? "" : "is-good"}`;
}

const word = (health) => ({ unreachable: "cannot be reached", "not serving": "does not serve", silent: "says nothing" })[health] ?? `is ${health}`;

function showFirst(frame) {
  const { finished, failed, cancelled, running } = frame.totals;
  $("first").hidden = finished + failed + cancelled + running > 0;
  if ($("first").hidden || !frame.model) return;
  const key = frame.needs_key ? " -H 'Authorization: Bearer API_KEY'" : "";
  const body = JSON.stringify({ model: frame.model, prompt: "def main():", max_tokens: 32, stream: true });
  const quoted = body.replaceAll("'", "'\\''");
  say($("first-command"), `curl -N ${new URL("v1/completions", document.baseURI)}${key} \\\n  -H 'Content-Type: application/json' -d '${quoted}'`);
}

$("first-copy").addEventListener("click", async (event) => {
  try {
    await navigator.clipboard.writeText($("first-command").textContent);
    event.target.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("first-command"));
  }
});

// Theme: as the system's, dark or light.
const system = matchMedia("(prefers-color-scheme: dark)");
const themes = ["auto", "dark", "light"];
let theme = themes.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";

function applyTheme() {
  document.documentElement.dataset.theme = theme === "auto" ? (system.matches ? "dark" : "light") : theme;
  say($("theme"), `Theme: ${theme}`);
  redrawFigures();
  redrawPools();
}

$("theme").addEventListener("click", () => {
  theme = themes[(themes.indexOf(theme) + 1) % themes.length];
  localStorage.setItem("theme", theme);
  applyTheme();
});
system.addEventListener("change", applyTheme);
applyTheme();

// The stream. The browser opens it again by itself, unless the gateway has refused it.
function lost(text) {
  $("lost").hidden = !text;
  say($("lost"), text);
}

// A hidden page holds no connection: a browser opens six to one host, and others need them.
let source = null;
let again = 0;

function connect() {
  source?.close();
  clearTimeout(again);
  if (document.hidden) return;
  const own = source = new EventSource("page/events");
  own.onmessage = (event) => {
    heard = performance.now();
    lost("");
    show(JSON.parse(event.data));
  };
  own.addEventListener("refused", (event) => {
    own.close();
    lost(`${event.data}. Reload the page to try again.`);
  });
  own.onerror = () => {
    if (own.readyState === EventSource.CLOSED) again = setTimeout(connect, 2000);
  };
}
document.addEventListener("visibilitychange", () => {
  heard = performance.now();
  connect();
});

setInterval(() => {
  const silent = (performance.now() - heard) / 1000;
  if (silent > LATE_SECONDS && !document.hidden) {
    lost(`The gateway has sent nothing for ${Math.round(silent)} s. What is shown is old; trying again.`);
  }
}, 1000);
connect();
