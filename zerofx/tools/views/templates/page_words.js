// Texts about the picture: the legends, and the tip at the pointer.
const VERBS = D.verbs;
const KINDS = {
  pack: "gradients into a bucket", wait: "waiting for a transfer", update: "optimizer", launch: "launch on the host",
  release: "release of a gathered copy", sync: "broadcast of buffers", beside: "compute slowed down by a transfer", store: "copy or sum",
  cast: "cast", call: "call on the host", clip: "clipping", arrival: "sum or scaling of received gradients",
};
function verbOf(name) { return name.split(" ").find((word) => VERBS[word]); }
function inWords(bar) {
  if (bar.kind === "region") return bar.graph === "backward" ? "backward compute" : "forward compute";
  const verb = VERBS[verbOf(bar.name)];
  if (bar.kind === "transfer") return verb || "transfer";
  return verb && bar.kind !== "sync" ? `${KINDS[bar.kind] || bar.kind} (${verb})` : KINDS[bar.kind] || bar.kind;
}
function swatch(name, words) { return html`<span><i data-colour="${tone(name)}"></i>${words}</span>`; }
function writeLegends() {
  const bars = D.tracks.flatMap((t) => t.bars), kinds = new Set(bars.map((b) => b.kind));
  const regions = new Set(bars.filter((b) => b.kind === "region").map((b) => b.graph));
  const shown = [];
  if (regions.has("forward")) shown.push(swatch("forward", "forward compute"));
  if (regions.has("backward")) shown.push(swatch("backward", "backward compute"));
  const moved = new Set(bars.filter((b) => b.kind === "transfer").map((b) => D.lanes[b.lane]));
  for (const lane of moved) shown.push(swatch(BY_LANE[lane] || "exchange", `${lane} lane`));
  for (const [kind, words] of Object.entries(KINDS)) if (kinds.has(kind)) shown.push(swatch(BY_KIND[kind], words));
  put(document.getElementById("kinds"), shown);
  const used = new Set(bars.map((b) => verbOf(b.name)));
  const again = bars.some((b) => / \(\d+\)$/.test(b.name)), critical = bars.some((b) => b.critical);
  const numbered = [["b", "bucket"], ["v", "value"]].filter(([c]) => bars.some((b) => new RegExp(` ${c}\\d`).test(b.name)));
  put(document.getElementById("verbs"), [
    Object.entries(VERBS).filter(([verb]) => used.has(verb)).map(([verb, words]) => html`<span><b>${verb}</b> ${words}</span>`),
    numbered.map(([c, words]) => html`<span><b>${c}3</b> ${words} 3</span>`),
    again ? html`<span><b>(2)</b> the second of this name in a step</span>` : "",
    regions.size ? html`<span><b>layer 3 mm</b> unit and its most expensive operator</span>` : "",
    critical ? html`<span><u>underlined</u> the critical path</span>` : "",
    html`<span id="folded" hidden><b>+ 28</b> identical layers that are folded; click to open</span>`,
  ]);
  showFolded();
  put(document.getElementById("legend"), [
    D.memory.categories.map((name) => swatch(name, name)),
    main.held.length ? html`<span><i class="line"></i>${main.name}: ${bytes(main.peak_bytes)} (${beside(main.peak_bytes, D.peak_bytes)})</span>` : "",
  ]);
}

function showFolded() {
  document.getElementById("folded").hidden = !D.tracks.some((t) => t.folding.cuts.length);
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
  return [`${count - 1} more layers like ${unit}`, `${period} steps each, beginning with ${steps[first + period].name}`,
    `${time(cut.to - cut.from)} in total`, "click to open"];
}
// Words for a name such as "backward AG b0 (2)": all-gather of bucket 0, the second in a step.
function nameInWords(bar) {
  const verb = VERBS[verbOf(bar.name)], place = /\b([bv])(\d+)/.exec(bar.name), nth = / \((\d+)\)$/.exec(bar.name);
  const what = place ? `${place[1] === "b" ? "bucket" : "value"} ${place[2]}` : "";
  return [verb && what ? `${verb} of ${what}` : what, nth ? `number ${nth[1]} of this name in a step` : ""].filter(Boolean).join(", ");
}
function barTip(bar) {
  const s = bar.step, lines = [bar.name, `${inWords(bar)} in the lane ${D.lanes[bar.lane]}, ${bar.track.name}`];
  if (nameInWords(bar)) lines.push(nameInWords(bar));
  lines.push(`${time(bar.to - bar.from)}, from ${time(bar.from, 5)} to ${time(bar.to, 5)}`);
  if (bar.note) lines.push(bar.note);
  for (const other of D.tracks) {
    const twin = other !== bar.track && other.byName.get(bar.name);
    if (twin) lines.push(`${other.name}: ${time(twin.to - twin.from)}`);
  }
  if (!s) return lines;
  if (s.unit) lines.push(`unit ${s.unit}`);
  if (s.moves) lines.push(`${s.kind === "region" ? "returns" : "moves"} ${s.moves}  (${bytes(s.bytes)})`);
  if (s.line) lines.push(s.line);
  const to = steps[D.uses[s.i]];
  if (to) lines.push(`first read by ${to.name}${to.unit ? ", " + to.unit : ""}`);
  if (s.names) lines.push("", s.names);
  return lines;
}
