// Binds the form, the stream and the views together.

import { drawPositions, drawTimeline, percent } from "/page/charts.js";
import { fetchModel, stream } from "/page/server.js";
import { Tally } from "/page/tally.js";
import { Legend, TextView } from "/page/text.js";

const KEY = "outrider-api-key";
const NUM_RUNS_LISTED = 8;
const RULES = {
  standard: "Looks at one guess after the other.",
  block: "Looks at the guesses together, and keeps more.",
  coupled: "The text is the same for every K.",
};
const byId = (id) => document.getElementById(id);

const form = byId("form");
const textView = new TextView(byId("text"));
const legend = new Legend(byId("legend"));

let model = null;
let running = null;
let tally = new Tally();
let isFrameAsked = false;

async function meetModel() {
  try {
    model = await fetchModel(byId("key").value);
  } catch (error) {
    showError(error);
    return;
  }
  showError(null);
  byId("model").textContent = model.name;
  const drafts = byId("drafts");
  drafts.max = model.maxDrafts;
  drafts.value = model.maxDrafts;
  drafts.disabled = model.maxDrafts === 0;
  if (drafts.disabled) byId("drafts-note").textContent = "This server runs without guesses.";
  byId("max-tokens").max = model.maxTokens;
  showSettings();
  legend.build(model.maxDrafts);
  draw();
}

function showSettings() {
  byId("drafts-shown").textContent = byId("drafts").value;
  byId("temperature-shown").textContent = byId("temperature").value;
  const isCertain = Number(byId("temperature").value) === 0;
  byId("rule-note").textContent = isCertain ? "At temperature 0 all are one." : RULES[byId("rule").value];
}

/** One line; a key that is missing or wrong can be typed. */
function showError(error) {
  byId("error").textContent = error ? `Error: ${error.message}` : "";
  if (error?.status === 401) {
    byId("key-row").hidden = false;
    byId("key").focus();
  }
}

function readForm() {
  const prompt = byId("prompt").value;
  const isChat = form.elements.mode.value === "chat";
  const body = {
    model: model.name,
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    rejection_sample_method: byId("rule").value,
    num_speculative_tokens: Number(byId("drafts").value),
  };
  if (isChat) {
    const messages = [{ role: "user", content: prompt }];
    return { path: "/v1/chat/completions", body: { ...body, messages }, shown: "" };
  }
  return { path: "/v1/completions", body: { ...body, prompt }, shown: prompt };
}

async function run() {
  if (running) return;
  running = new AbortController();
  setRunning(true);
  showError(null);
  try {
    if (!model) await meetModel();
    if (model) await write(readForm(), running.signal);
  } catch (error) {
    if (error.name === "AbortError") byId("status").textContent = `Stopped. ${summary()}`;
    else {
      byId("status").textContent = "";
      showError(error);
    }
  } finally {
    running = null;
    setRunning(false);
  }
}

async function write({ path, body, shown }, signal) {
  tally = new Tally();
  textView.clear(shown);
  draw();
  byId("status").textContent = "The model reads …";
  let finishReason = null;
  for await (const part of stream(path, body, byId("key").value, signal)) {
    if (part.steps.length && !tally.passes) byId("status").textContent = "The model writes …";
    tally.add(part.steps, performance.now());
    textView.add(part.steps);
    finishReason = part.finishReason ?? finishReason;
    askFrame();
  }
  if (finishReason === "stop") textView.markEnd();
  byId("status").textContent = `Done. ${summary()}`;
  listRun(body);
}

function summary() {
  const tokens = `${tally.tokens} token${tally.tokens === 1 ? "" : "s"}`;
  return `${tokens} in ${tally.passes} pass${tally.passes === 1 ? "" : "es"} of the model.`;
}

function setRunning(isRunning) {
  byId("run").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("text").classList.toggle("is-writing", isRunning);
  askFrame();
}

function askFrame() {
  if (isFrameAsked) return;
  isFrameAsked = true;
  requestAnimationFrame(() => {
    isFrameAsked = false;
    draw();
  });
}

function draw() {
  legend.show(tally.bySource);
  byId("speed").textContent = shown(tally.tokensPerSecond, (x) => x.toFixed(1));
  byId("per-pass").textContent = shown(tally.tokensPerPass, (x) => x.toFixed(2));
  byId("kept").textContent = shown(tally.acceptanceRate, percent);
  byId("passes").textContent = tally.passes ? `${tally.passes} for ${tally.tokens}` : "–";
  drawPositions(byId("positions"), tally);
  drawTimeline(byId("timeline"), tally, model?.maxDrafts ?? 0);
}

function shown(value, write) {
  return value === null ? "–" : write(value);
}

function listRun(body) {
  const row = document.createElement("tr");
  const cells = [
    body.num_speculative_tokens,
    body.rejection_sample_method,
    body.temperature,
    tally.tokens,
    shown(tally.tokensPerPass, (x) => x.toFixed(2)),
    shown(tally.acceptanceRate, percent),
    shown(tally.tokensPerSecond, (x) => x.toFixed(1)),
  ];
  for (const content of cells) {
    const cell = document.createElement("td");
    cell.textContent = content;
    row.append(cell);
  }
  const [rows] = byId("runs").tBodies;
  rows.prepend(row);
  while (rows.rows.length > NUM_RUNS_LISTED) rows.lastElementChild.remove();
  byId("runs").parentElement.hidden = false;
}

function stop() {
  running?.abort();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("input", showSettings);
byId("stop").addEventListener("click", stop);
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value);
  meetModel();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key-row").hidden = !byId("key").value;
showSettings();
meetModel();
