// What is said of the picture: the legends, and what stands at the pointer.
const VERBS = D.verbs;
const KINDS = {
  pack: "gradients into a bucket", wait: "wait for a transfer", update: "optimizer", launch: "launch on the host",
  release: "release of a gathered copy", sync: "broadcast of buffers", beside: "work beside a transfer", store: "copy or sum",
  cast: "cast", call: "call on the host", clip: "clipping", arrival: "sum or scale of what arrived",
};
function verbOf(name) { return name.split(" ").find((word) => VERBS[word]); }
function inWords(bar) {
  if (bar.kind === "region") return bar.graph === "backward" ? "backward compute" : "forward compute";
  const verb = VERBS[verbOf(bar.name)];
  if (bar.kind === "transfer") return verb || "transfer";
  return verb && bar.kind !== "sync" ? `${KINDS[bar.kind] || bar.kind} (${verb})` : KINDS[bar.kind] || bar.kind;
}
function swatch(colour, words) { return html`<span><i data-colour="${colour}"></i>${words}</span>`; }
function writeLegends() {
  const bars = D.tracks.flatMap((t) => t.bars), kinds = new Set(bars.map((b) => b.kind));
  const regions = new Set(bars.filter((b) => b.kind === "region").map((b) => b.graph));
  const shown = [];
  if (regions.has("forward")) shown.push(swatch(FORWARD, "forward"));
  if (regions.has("backward")) shown.push(swatch(BACKWARD, "backward"));
  for (const [kind, words] of Object.entries(KINDS)) if (kinds.has(kind)) shown.push(swatch(KIND[kind], words));
  put(document.getElementById("kinds"), shown);
  const used = new Set(bars.map((b) => verbOf(b.name)));
  const numbered = [["b", "bucket"], ["v", "value"]].filter(([c]) => bars.some((b) => new RegExp(` ${c}\\d`).test(b.name)));
  put(document.getElementById("verbs"), [
    Object.entries(VERBS).filter(([verb]) => used.has(verb)).map(([verb, words]) => html`<span><b>${verb}</b> ${words}</span>`),
    numbered.map(([c, words]) => html`<span><b>${c}3</b> ${words} 3</span>`),
  ]);
  put(document.getElementById("legend"), [
    D.memory.categories.map((name) => swatch(CATEGORY[name], name)),
    main.held.length ? html`<span><i class="line"></i>${main.name}: ${bytes(main.peak_bytes)} (${beside(main.peak_bytes, D.peak_bytes)})</span>` : "",
  ]);
}

function heldAt(i) {
  return D.storages.filter((s) => s[4] <= i && i <= s[5]).slice(0, 8)
    .map(([name, where, , n]) => `${bytes(n).padStart(10)}  ${D.texts[name]}  ${D.texts[where]}`);
}
function beside(measured, predicted) {
  const percent = Math.abs(measured / predicted - 1) * 100;
  return `${percent.toFixed(1)} % ${measured >= predicted ? "more" : "less"} than predicted`;
}
function memoryTip(i) {
  const parts = D.memory.categories.map((name, k) => [D.memory.bytes[k][i], name]).filter(([n]) => n)
    .sort((a, b) => b[0] - a[0]).map(([n, name]) => `${bytes(n).padStart(10)}  ${name}`);
  for (const [name, curve] of Object.entries(D.memory.apart)) parts.push(`${bytes(curve[i]).padStart(10)}  ${name}`);
  const held = main.held.length ? main.held[i] : -1;
  const measured = held < 0 ? [] : [`${bytes(held)} ${main.name} (${beside(held, steps[i].resident)})`];
  return [`${bytes(steps[i].resident)} at ${steps[i].name}`, ...measured, steps[i].unit, ...parts, "", "largest", ...heldAt(i)];
}
function cutTip(cut) {
  const [first, period, count, unit] = D.layers[cut.layer];
  return [`${count - 1} more layers like ${unit}`, `${period} steps each, from ${steps[first + period].name} on`,
    `${time(cut.to - cut.from)} in all`, "click to open"];
}
function barTip(bar) {
  const s = bar.step, lines = [bar.name, `${inWords(bar)} on the lane ${D.lanes[bar.lane]}, ${bar.track.name}`];
  lines.push(`${time(bar.to - bar.from)}, from ${time(bar.from, 5)} to ${time(bar.to, 5)}`);
  if (bar.note) lines.push(bar.note);
  for (const other of D.tracks) {
    const twin = other !== bar.track && other.byName.get(bar.name);
    if (twin) lines.push(`${other.name}: ${time(twin.to - twin.from)}`);
  }
  if (!s) return lines;
  if (s.unit) lines.push(`unit ${s.unit}`);
  if (s.moves) lines.push(`${s.kind === "region" ? "makes" : "moves"} ${s.moves}  (${bytes(s.bytes)})`);
  if (s.line) lines.push(s.line);
  const to = steps[D.uses[s.i]];
  if (to) lines.push(`first read by ${to.name}${to.unit ? ", " + to.unit : ""}`);
  if (s.names) lines.push("", s.names);
  return lines;
}
