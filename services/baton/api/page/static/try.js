// Sends a request and shows when each piece of the answer arrives.

import { $, el, say, seconds } from "./dom.js";

const MAX_ROWS = 4096;
let running = null;
let model = null;
let chat = false;

export function showTry(frame) {
  model = frame.model;
  chat = frame.chat;
  $("try-key-label").hidden = !frame.needs_key;
  if (!running) $("try-send").disabled = !model;
}

$("try").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask();
});
$("try-stop").addEventListener("click", () => running?.abort());
$("try-prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try").requestSubmit();
});

async function ask() {
  running = new AbortController();
  $("try-send").disabled = true;
  $("try-stop").disabled = false;
  $("try-answer").replaceChildren();
  $("try-arrivals").replaceChildren();
  say($("try-note"), "waiting for the first token");
  const answer = { sent: performance.now(), arrivals: [] };
  try {
    await stream(answer, running.signal);
    finish(answer, "");
  } catch (error) {
    finish(answer, error.name === "AbortError" ? "stopped" : error.message);
  }
  running = null;
  $("try-send").disabled = false;
  $("try-stop").disabled = true;
}

async function stream(answer, signal) {
  const prompt = $("try-prompt").value, headers = { "content-type": "application/json" };
  if ($("try-key").value) headers.authorization = `Bearer ${$("try-key").value}`;
  const body = { model, max_tokens: Number($("try-tokens").value), stream: true };
  if (chat) body.messages = [{ role: "user", content: prompt }];
  else body.prompt = prompt;
  const response = await fetch(`v1/${chat ? "chat/" : ""}completions`,
    { method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store" });
  if (!response.ok) throw new Error(await problem(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) take(answer, line.slice(6));
  }
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

function take(answer, data) {
  if (data === "[DONE]") return;
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message);
  const choice = event.choices?.[0];
  const text = chat ? choice?.delta?.content ?? choice?.delta?.reasoning_content : choice?.text;
  if (!text) return;
  const now = performance.now(), before = answer.arrivals.at(-1) ?? answer.sent;
  answer.arrivals.push(now);
  $("try-answer").append(el("span", {}, text));
  if (answer.arrivals.length <= MAX_ROWS) {
    $("try-arrivals").append(el("tr", {}, el("td", {}, seconds((now - answer.sent) / 1000)),
      el("td", {}, seconds((now - before) / 1000)), el("td", { className: "mono" }, text.replaceAll("\n", "⏎"))));
    $("try-arrivals").parentElement.parentElement.scrollTop = 1e9;
  }
  if (answer.arrivals.length === 1) say($("try-note"), `first token after ${seconds((now - answer.sent) / 1000)}`);
}

function finish({ sent, arrivals }, problem) {
  const parts = [];
  if (arrivals.length) parts.push(`first token after ${seconds((arrivals[0] - sent) / 1000)}`);
  if (arrivals.length > 1) {
    const mean = (arrivals.at(-1) - arrivals[0]) / (arrivals.length - 1);
    parts.push(`${arrivals.length} pieces, ${seconds(mean / 1000)} apart`);
  }
  if (problem) parts.unshift(problem);
  say($("try-note"), parts.join(" · ") || "an empty answer");
}
