// Shows one run live. Text only ever enters the page as textContent, so nothing that an agent reports is markup.
"use strict";

const SHOWN = 30;
const SILENCE_MS = 60000; // the stream says something every 15 s
const KEY = "weightcast-token"; // in sessionStorage: gone with the tab, and never in an address
const versions = new Map();
const byId = (id) => document.getElementById(id);

const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(3)} %` : "");
const seconds = (value) => (value ? `${value.toFixed(2)} s` : "");

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

function row(cells, kind) {
  const line = document.createElement("tr");
  cells.forEach((text, column) => {
    const cell = document.createElement("td");
    cell.textContent = text;
    if (kind && column === 2) cell.className = kind;
    line.append(cell);
  });
  return line;
}

function showVersions() {
  const newest = [...versions.values()].sort((a, b) => b.version - a.version).slice(0, SHOWN);
  byId("versions").replaceChildren(...newest.map((v) => row([
    v.version, v.step, v.state,
    v.state === "sealed" ? share(v.changed, v.elements) : "",
    v.state === "sealed" ? bytes(v.payload_bytes) : "",
    v.state === "sealed" ? share(v.payload_bytes, v.weight_bytes) : "",
    seconds(v.encode_s), seconds(v.upload_s), seconds(v.seal_s), v.reason,
  ], v.state)));
  const sealed = newest.find((v) => v.state === "sealed");
  byId("head").textContent = sealed
    ? `Version ${sealed.version} (step ${sealed.step}), ${bytes(sealed.weight_bytes)} of weights`
    : "No version yet";
}

function showRegions(regions) {
  byId("regions").replaceChildren(...regions.map((r) => row([
    r.region, r.agents, r.staged, r.serving,
    r.lag_versions ? `${r.lag_versions} version${r.lag_versions > 1 ? "s" : ""}` : "",
  ])));
}

function remember(version) {
  versions.set(version.version, version);
  for (const number of versions.keys()) {
    if (versions.size <= 4 * SHOWN) break;
    versions.delete(number);
  }
  showVersions();
}

function askForToken(why) {
  byId("why").textContent = why;
  byId("access").hidden = false;
  byId("token").focus();
  return new Promise((resolve) => {
    byId("access").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, byId("token").value.trim());
      byId("token").value = "";
      byId("access").hidden = true;
      resolve();
    };
  });
}

async function ask(path, headers, signal) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const shown = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { headers: { ...headers, ...shown }, signal, cache: "no-store" });
    if (response.ok) return response;
    const problem = await response.json();
    if (response.status !== 401 && response.status !== 403) throw new Error(problem.detail);
    await askForToken(token ? problem.detail : "This coordinator takes a token with the scope viewer.");
  }
}

const get = async (path) => (await ask(path, { Accept: "application/json" })).json();

// Not EventSource: it cannot show a token.
async function* events(path, lastId) {
  const silence = new AbortController();
  let timer = 0;
  const restart = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  restart();
  const resume = lastId ? { "Last-Event-ID": lastId } : {};
  const response = await ask(path, { Accept: "text/event-stream", ...resume }, silence.signal);
  byId("link").textContent = "live";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      restart();
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: (.*)/s, 2)));
        if (fields.data) yield { name: fields.event, data: JSON.parse(fields.data), id: fields.id };
      }
    }
  } finally {
    clearTimeout(timer);
    reader.cancel().catch(() => {});
  }
}

async function follow(run) {
  const base = `v1/runs/${encodeURIComponent(run)}`;
  for (const version of await get(`${base}/versions?limit=${SHOWN}`)) versions.set(version.version, version);
  showVersions();
  let lastId = "";
  for (;;) {
    try {
      for await (const event of events(`${base}/events`, lastId)) {
        lastId = event.id ?? lastId;
        if (event.name === "regions") showRegions(event.data.regions);
        else if (["opened", "sealed", "aborted"].includes(event.name)) remember(event.data);
      }
    } catch (error) {
      console.warn(error.message);
    }
    byId("link").textContent = "reconnecting";
    await new Promise((resolve) => setTimeout(resolve, 1000 + 2000 * Math.random()));
  }
}

async function start() {
  const runs = await get("v1/runs");
  const wanted = decodeURIComponent(location.hash.slice(1));
  const chosen = runs.find((run) => run.run === wanted) ?? runs[0];
  byId("runs").replaceChildren(...runs.map((run) => {
    const link = document.createElement("a");
    link.href = `#${encodeURIComponent(run.run)}`;
    link.textContent = run.run;
    if (run === chosen) link.setAttribute("aria-current", "page");
    return link;
  }));
  if (!chosen) {
    byId("link").textContent = "no run yet";
    setTimeout(() => location.reload(), 5000);
    return;
  }
  await follow(chosen.run);
}

window.addEventListener("hashchange", () => location.reload());
start().catch((error) => { byId("link").textContent = error.message; });
