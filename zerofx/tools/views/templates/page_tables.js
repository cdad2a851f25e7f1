// The tables under the picture: steps, predicted and measured times, passes, decisions.
const panel = document.getElementById("panel"), tabs = document.getElementById("tabs");
function table(head, body) {
  const cells = head.map((h) => html`<th class="${h.startsWith("#") ? "n" : ""}">${h.replace("#", "")}</th>`);
  return html`<table><thead><tr>${cells}</tr></thead><tbody>${body}</tbody></table>`;
}

// -- steps, identical layers once ---------------------------------------------------------------
const listed = new Set(); // layers whose steps are all listed
const measuredTracks = D.tracks.filter((t) => t.held.length);
function stepRow(i, inner) {
  const s = steps[i], times = D.tracks.map((t) => t.byName.get(s.name)).map((b) => html`<td class="n">${b ? time(b.to - b.from) : ""}</td>`);
  const what = s.kind === "region" ? s.heaviest : s.moves;
  const held = measuredTracks.map((t) => html`<td class="n">${t.held[i] < 0 ? "" : bytes(t.held[i])}</td>`);
  return html`<tr class="step${inner ? " in" : ""}" data-step="${i}" tabindex="0"><td>${s.name}</td><td>${s.unit}</td><td>${what}</td>
    <td class="n">${s.bytes ? bytes(s.bytes) : ""}</td>${isInSteps ? "" : times}<td class="n">${bytes(s.resident)}</td>${held}<td>${s.line}</td></tr>`;
}
function stepsTab() {
  const body = [];
  let at = 0;
  const own = (from, to, inner) => { for (let i = from; i < to; i++) body.push(stepRow(i, inner)); };
  D.layers.forEach(([first, period, count, unit], layer) => {
    own(at, first, false);
    const open = listed.has(layer), last = first + period * count;
    body.push(html`<tr class="layer" data-layer="${layer}" tabindex="0" aria-expanded="${open}"><td colspan="20">${open ? "▾" : "▸"} ${count} identical layers from ${unit} on${open ? "" : "; the first is listed"}</td></tr>`);
    own(first, open ? last : first + period, true);
    at = last;
  });
  own(at, steps.length, false);
  const names = isInSteps ? [] : D.tracks.map((t) => "#" + t.name);
  put(panel, table(["step", "unit", "what", "#bytes", ...names, "#resident", ...measuredTracks.map((t) => "#resident, " + t.name), "line"], body));
}
panel.addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  if (row && row.dataset.layer) {
    const layer = Number(row.dataset.layer);
    if (!listed.delete(layer)) listed.add(layer);
    stepsTab();
    panel.querySelector(`tr[data-layer="${layer}"]`).focus({ preventScroll: true });
  } else if (row && row.dataset.step) lookAt(Number(row.dataset.step));
});
panel.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.dataset && event.target.closest("tr")) event.target.click();
});
function lookAt(i) {
  const [from, to] = main.times[i], f = main.folding, wide = Math.max(to - from, main.end / 5000);
  show(f.to(from) - 3 * wide, f.to(to) + 3 * wide);
  draw();
  window.scrollTo({ top: 0, behavior: "smooth" });
}

// -- predicted and measured times ------------------------------------------------------------------
function compareTab() {
  const left = D.tracks[0], right = main === left ? D.tracks[1] : main;
  const body = D.beside[D.tracks.indexOf(right) - 1].map(([i, name, unit, what, count, a, b]) =>
    html`<tr${i < 0 ? "" : html` class="step" data-step="${i}" tabindex="0"`}><td>${name}${count > 1 ? ` and ${count - 1} equal` : ""}</td><td>${unit}</td>
      <td>${what}</td><td class="n">${time(a)}</td><td class="n">${time(b)}</td><td class="n">${b ? (a / b).toFixed(2) : ""}</td></tr>`);
  const held = right.peak_bytes ? `; peak memory ${bytes(D.peak_bytes)}, ${bytes(right.peak_bytes)} (${beside(right.peak_bytes, D.peak_bytes)})` : "";
  put(panel, [
    html`<p>${left.name} ${time(left.step)}, ${right.name} ${time(right.step)}${held}; largest differences first, identical layers summed. A measured collective lasts from its launch to the end of its wait.</p>`,
    table(["step", "unit", "what", "#" + left.name, "#" + right.name, "#ratio"], body),
  ]);
}

// -- passes and decisions -----------------------------------------------------------------------
function passesTab() {
  put(panel, D.history.map((p, k) => {
    const before = D.history[k - 1] || p;
    const lines = p.diff.map((l, i) => html`${i ? "\n" : ""}<span class="${{ "+": "a", "-": "d", "@": "h" }[l[0]] || ""}">${l}</span>`);
    const head = html`<b>${String(k).padStart(2, "0")} ${p.pass}</b> &nbsp; ${p.summary} &nbsp; <small>nodes ${before.nodes} → ${p.nodes}, sends ${bytes(p.comm_bytes)}, peak ${bytes(before.peak_bytes)} → ${bytes(p.peak_bytes)}</small>`;
    return p.diff.length ? html`<details><summary>${head}</summary><pre>${lines}</pre></details>` : html`<div>${head}</div>`;
  }));
}
function decisionsTab() {
  put(panel, html`<p>${D.spent || ""}</p><input type="search" id="search" placeholder="value, module, bucket, choice or line"><div id="found"></div>`);
  const list = () => {
    const wanted = document.getElementById("search").value;
    const found = D.decisions.filter((d) => !wanted || [d.subject, d.module, d.line, d.choice].some((v) => v.includes(wanted)));
    const body = found.slice(0, 500).map((d) => html`<tr><td>${d.choice}</td><td class="n">${bytes(d.nbytes)}</td><td>${d.subject}</td><td>${d.module}</td><td>${d.line}</td><td class="wide">${d.why}</td></tr>`);
    put(document.getElementById("found"), [
      html`<p><small>${found.length} decision${found.length === 1 ? "" : "s"}${found.length > 500 ? ", the first 500" : ""}</small></p>`,
      table(["choice", "#bytes", "what", "module", "line", "why"], body),
    ]);
  };
  document.getElementById("search").addEventListener("input", list);
  list();
}

const TABS = [["Steps", stepsTab, true], ["Predicted and measured", compareTab, D.beside.length > 0],
  ["Passes", passesTab, D.history.length > 0], ["Decisions", decisionsTab, D.decisions.length > 0]].filter((t) => t[2]);
TABS.forEach(([name, fill], k) => {
  const button = document.createElement("button");
  button.textContent = name;
  button.setAttribute("role", "tab");
  button.onclick = () => {
    for (const other of tabs.children) {
      other.className = other === button ? "on" : "";
      other.setAttribute("aria-selected", other === button);
    }
    fill();
  };
  tabs.append(button);
  if (!k) button.onclick();
});
