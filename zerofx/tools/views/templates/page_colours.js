// Colours of bars and of memory, on light and on dark paper. Colours that meet (bars of one row, lanes of
// transfers, the stack of memory) can be told apart with any common colour blindness; a test measures it.
const TONES = {
  // name: [on light paper, on dark paper]
  forward: ["#0060ad", "#4a9eea"], backward: ["#7cc3f5", "#c3e4ff"],
  gather: ["#017b5e", "#2fb58c"], reduce: ["#e59a00", "#fcbc27"], exchange: ["#b1ce47", "#cfe87a"],
  pack: ["#f0e145", "#fbf19a"], arrival: ["#9f6b00", "#b57f22"],
  wait: ["#cb2d32", "#ff6b5e"], update: ["#b8408f", "#e67bc7"], clip: ["#691258", "#a8458f"],
  launch: ["#5d4b8c", "#9a86d6"], call: ["#b3a6dd", "#d9d0f7"], release: ["#d8dde3", "#59636f"],
  store: ["#8f979f", "#b0b3b9"], cast: ["#4d545c", "#858585"], sync: ["#e06f49", "#ffa785"],
  beside: ["#d5b151", "#e7bf6c"],
  "to host": ["#5f8d1a", "#93c243"], "from host": ["#265f38", "#398f62"],
  "from nvme": ["#77491a", "#be8b56"], "to nvme": ["#c49a6c", "#eac79e"],
  // memory by category, in the order of the stack
  parameters: ["#332288", "#8f83e6"], gathered: ["#88ccee", "#a9ddf5"], gradients: ["#117733", "#32af69"],
  optimizer: ["#ddcc77", "#efe2a0"], activations: ["#cc6677", "#e58a98"], temporaries: ["#882255", "#c0548b"],
  communication: ["#44aa99", "#6fd0c0"], inputs: ["#999933", "#c3be66"], outputs: ["#aa4499", "#d680c8"],
  buffers: ["#f8971f", "#ffb348"],
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
