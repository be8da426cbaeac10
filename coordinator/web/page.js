// Shows one run live. Text only ever enters the page as textContent, so nothing that an agent reports is markup.
"use strict";

const SHOWN = 30;
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

async function get(path) {
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  if (!response.ok) throw new Error((await response.json()).detail);
  return response.json();
}

async function follow(run) {
  const base = `v1/runs/${encodeURIComponent(run)}`;
  for (const version of await get(`${base}/versions?limit=${SHOWN}`)) versions.set(version.version, version);
  showVersions();
  const stream = new EventSource(`${base}/events`);
  stream.onopen = () => { byId("link").textContent = "live"; };
  stream.onerror = () => { byId("link").textContent = "reconnecting"; };
  for (const kind of ["opened", "sealed", "aborted"]) {
    stream.addEventListener(kind, (event) => remember(JSON.parse(event.data)));
  }
  stream.addEventListener("regions", (event) => showRegions(JSON.parse(event.data).regions));
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
