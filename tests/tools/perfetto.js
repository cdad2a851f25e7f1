// Perfetto's trace processor as its UI ships it (wasm), outside a browser:
//     node perfetto.js FOLDER_OF_THE_ENGINE TRACE SQL...
// prints a JSON list of {columns, rows} for each query, or {error}.
"use strict";
const fs = require("fs"), path = require("path");
const [folder, trace, ...queries] = process.argv.slice(2);

// -- protobuf, as much as the interface needs ---------------------------------------------------
function varint(n) {
  const out = [];
  for (n = BigInt(n); n > 127n; n >>= 7n) out.push(Number(n & 127n) | 128);
  return [...out, Number(n)];
}
function field(number, value) {
  if (typeof value === "number") return Buffer.from([...varint(number << 3), ...varint(value)]);
  return Buffer.concat([Buffer.from([...varint((number << 3) | 2), ...varint(value.length)]), value]);
}
function* fields(bytes) {
  let at = 0;
  const number = () => {
    let n = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      n |= BigInt(byte & 127) << shift;
      if (byte < 128) return n;
    }
  };
  while (at < bytes.length) {
    const tag = Number(number()), kind = tag & 7;
    if (kind === 0) yield [tag >> 3, number()];
    else if (kind === 1) { yield [tag >> 3, bytes.subarray(at, at + 8)]; at += 8; }
    else { const size = Number(number()); yield [tag >> 3, bytes.subarray(at, at + size)]; at += size; }
  }
}
function varints(bytes) {
  const out = [];
  let n = 0n, shift = 0n;
  for (const byte of bytes) {
    n |= BigInt(byte & 127) << shift;
    shift += 7n;
    if (byte < 128) { out.push(Number(BigInt.asIntN(64, n))); n = shift = 0n; }
  }
  return out;
}

// -- the interface: TraceProcessorRpcStream.msg = 1 ---------------------------------------------
const APPEND = 1, FINALIZE = 2, QUERY = 3;
let sequence = 0;
function request(kind, ...more) {
  return new Uint8Array(field(1, Buffer.concat([field(1, ++sequence), field(2, kind), ...more])));
}
function readBatch(batch, result) {
  const cells = [], ints = [], floats = [], texts = [], width = result.columns.length;
  for (const [number, value] of fields(batch)) {
    if (number === 1) cells.push(...varints(value));
    if (number === 2) ints.push(...varints(value));
    if (number === 3) for (let k = 0; k < value.length; k += 8) floats.push(Buffer.from(value).readDoubleLE(k));
    if (number === 5) texts.push(...Buffer.from(value).toString().split("\0"));
  }
  const values = cells.map((c) => (c === 2 ? ints.shift() : c === 3 ? floats.shift() : c === 4 ? texts.shift() : null));
  for (let k = 0; width && k < values.length; k += width) result.rows.push(values.slice(k, k + width));
}

const results = [];
let errors = "";
function reply(bytes) {
  for (const [, message] of fields(bytes)) {
    for (const [number, value] of fields(message)) {
      if (number === 5) errors += Buffer.from(value).toString();
      if (number === 201) for (const [k, v] of fields(value)) if (k === 2) errors += Buffer.from(v).toString();
      if (number !== 203) continue;
      const last = results[results.length - 1];
      const result = last && !last.done ? last : { columns: [], rows: [] };
      if (result !== last) results.push(result);
      result.done = true;
      for (const [k, v] of fields(value)) {
        if (k === 1) result.columns.push(Buffer.from(v).toString());
        if (k === 2) result.error = Buffer.from(v).toString();
      }
      for (const [k, v] of fields(value)) {
        if (k !== 3) continue;
        readBatch(v, result);
        result.done = [...fields(v)].some(([n, is]) => n === 6 && is);
      }
    }
  }
}

// -- the engine, which wants to be a worker of a browser ----------------------------------------
class FileRequest { // of the engine's own files, at once
  open(_, name) { this.name = path.basename(name); }
  send() { this.response = fs.readFileSync(path.join(folder, this.name)); }
}
const self = { location: { href: "http://here/" } };
const code = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
const quiet = { log() {}, warn() {}, error() {} };
const names = ["self", "process", "WorkerGlobalScope", "XMLHttpRequest", "console"];
new Function(...names, code)(self, undefined, Object, FileRequest, quiet);
const port = { postMessage: reply };
self.onmessage({ data: port });

setTimeout(() => { // the engine has begun by then
  const send = (message) => port.onmessage({ data: message });
  send(request(APPEND, field(101, fs.readFileSync(trace))));
  send(request(FINALIZE));
  for (const sql of queries) send(request(QUERY, field(103, field(1, Buffer.from(sql)))));
  console.log(JSON.stringify({ errors, results: results.map(({ done, ...rest }) => rest) }));
}, 0);
