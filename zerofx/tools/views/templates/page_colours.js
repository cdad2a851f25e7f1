// Colours of bars and of memory, for light and for dark paper. Colours that meet in one legend can be
// told apart with any common colour blindness: their lightness differs where their hue does not.
const TONES = {
  // name: [on light paper, on dark paper]
  forward: ["#0060ad", "#4a9eea"], backward: ["#7cc3f5", "#c3e4ff"],
  gather: ["#00795a", "#2fb58c"], reduce: ["#e59a00", "#f2b333"], exchange: ["#a4c639", "#cfe87a"],
  pack: ["#f0e24a", "#fbf19a"], arrival: ["#8a5a00", "#b57f22"],
  wait: ["#c8322b", "#ff6b5e"], update: ["#b8408f", "#f08bd0"], clip: ["#6e1458", "#a8458f"],
  launch: ["#5d4b8c", "#9a86d6"], call: ["#b3a6dd", "#d9d0f7"], release: ["#d8dde3", "#59636f"],
  store: ["#8f979f", "#aab3bc"], cast: ["#4d545c", "#7d8690"], sync: ["#e3734a", "#ffa27f"],
  beside: ["#c9a14a", "#e0bf72"],
  "to host": ["#5f8d1a", "#93c243"], "from host": ["#245c2c", "#58a364"],
  "from nvme": ["#7a4d22", "#b98450"], "to nvme": ["#c49a6c", "#e3c09a"],
  // memory by category, in the order of the stack
  parameters: ["#332288", "#8f83e6"], gathered: ["#88ccee", "#a9ddf5"], gradients: ["#117733", "#3fae66"],
  optimizer: ["#ddcc77", "#efe2a0"], activations: ["#cc6677", "#e58a98"], temporaries: ["#882255", "#c0548b"],
  communication: ["#44aa99", "#6fd0c0"], inputs: ["#999933", "#c4c45c"], outputs: ["#aa4499", "#d680c8"],
  buffers: ["#dd7711", "#ffa64d"],
};
const BY_KIND = {
  wait: "wait", pack: "pack", update: "update", launch: "launch", release: "release", sync: "sync", beside: "beside",
  store: "store", cast: "cast", call: "call", clip: "clip", arrival: "arrival",
};
const BY_LANE = {
  gather: "gather", reduce: "reduce", "to host": "to host", "from host": "from host", "from nvme": "from nvme",
  "to nvme": "to nvme", "host update": "update",
};
const dark = matchMedia("(prefers-color-scheme: dark)");
function tone(name) { return (TONES[name] || TONES.exchange)[dark.matches ? 1 : 0]; }
