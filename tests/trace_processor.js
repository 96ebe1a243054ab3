// Perfetto's own trace processor, in node: loads a trace and answers SQL.
//
//     cd FOLDER_WITH_ENGINE && node trace_processor.js TRACE QUERY...
//
// Prints one JSON list: for each query its rows, as objects by column. `engine_bundle.js` is made for
// a web worker that is handed a MessagePort; what it speaks there is TraceProcessorRpcStream of
// Perfetto's protos/perfetto/trace_processor/trace_processor.proto, of which the few fields used here
// are written and read by hand.
"use strict";
const fs = require("fs");
const vm = require("vm");

const METHOD = { append: 1, finalize: 2, query: 3 };
const RPC = { seq: 1, request: 2, response: 3, fatalError: 5, appendData: 101, queryArgs: 103 };
const REPLY = { appended: 201, queried: 203 };
const CELL = { null: 1, integer: 2, float: 3, text: 4 };

// --- the wire format of protocol buffers

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}

function number(field, value) {
  return Buffer.concat([varint(field * 8), varint(value)]);
}

function block(field, content) {
  const bytes = Buffer.from(content);
  return Buffer.concat([varint(field * 8 + 2), varint(bytes.length), bytes]);
}

function readVarint(bytes, at) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = bytes[at++];
    value |= BigInt(byte & 127) << shift;
    if (byte < 128) return [BigInt.asIntN(64, value), at];
  }
}

function* fields(bytes) {
  for (let at = 0, key, value; at < bytes.length; ) {
    [key, at] = readVarint(bytes, at);
    const [field, wire] = [Number(key >> 3n), Number(key & 7n)];
    if (wire === 0) {
      [value, at] = readVarint(bytes, at);
      yield [field, value];
    } else if (wire === 2) {
      [value, at] = readVarint(bytes, at);
      yield [field, bytes.subarray(at, (at += Number(value)))];
    } else {
      throw new Error(`field ${field} has wire type ${wire}, which no message read here has`);
    }
  }
}

function first(bytes, wanted) {
  for (const [field, value] of fields(bytes)) if (field === wanted) return value;
  return undefined;
}

function packed(bytes) {
  const values = [];
  for (let at = 0, value; at < bytes.length; values.push(value)) [value, at] = readVarint(bytes, at);
  return values;
}

// --- rows of a QueryResult

function cells(batch) {
  const parts = new Map(fields(batch));
  const empty = Buffer.alloc(0);
  const kinds = packed(parts.get(1) ?? empty).map(Number);
  const integers = packed(parts.get(2) ?? empty).values();
  const floats = Buffer.from(parts.get(3) ?? empty);
  const texts = Buffer.from(parts.get(5) ?? empty).toString("utf8").split("\0").values();
  let float = 0;
  return kinds.map((kind) => {
    if (kind === CELL.null) return null;
    if (kind === CELL.integer) return Number(integers.next().value);
    if (kind === CELL.float) return floats.readDoubleLE(8 * float++);
    if (kind === CELL.text) return texts.next().value;
    throw new Error(`a cell is of kind ${kind}`);
  });
}

function rows(results) {
  const columns = [];
  const values = [];
  for (const result of results) {
    for (const [field, value] of fields(result)) {
      if (field === 1) columns.push(Buffer.from(value).toString());
      else if (field === 2 && value.length) throw new Error(Buffer.from(value).toString());
      else if (field === 3) values.push(...cells(value));
    }
  }
  const width = columns.length;
  return Array.from({ length: width && values.length / width }, (_, row) =>
    Object.fromEntries(columns.map((column, at) => [column, values[row * width + at]])));
}

// --- the processor

// A web worker's global scope, as far as the bundle looks at it. The bundle tells nobody when it is
// ready: it is when the promises of its start have run, one turn of the event loop later.
async function startEngine() {
  globalThis.self = globalThis;
  globalThis.require = require;
  globalThis.__dirname = process.cwd();
  vm.runInThisContext(fs.readFileSync("engine_bundle.js", "utf8"), { filename: "engine_bundle.js" });
  const port = { replies: [], postMessage: (bytes) => port.replies.push(Buffer.from(bytes)) };
  self.onmessage({ data: { enginePort: port } });
  await new Promise(setImmediate);
  return port;
}

function caller(port) {
  let seq = 0;
  return (method, argument = Buffer.alloc(0)) => {
    const request = Buffer.concat([number(RPC.seq, ++seq), number(RPC.request, method), argument]);
    port.replies.length = 0;
    port.onmessage({ data: new Uint8Array(block(1, request)) });
    const stream = Buffer.concat(port.replies);
    const replies = [...fields(stream)].map(([, reply]) => reply);
    for (const reply of replies) {
      const error = first(reply, RPC.fatalError);
      if (error) throw new Error(Buffer.from(error).toString());
    }
    return replies;
  };
}

function load(call, path) {
  for (const reply of call(METHOD.append, block(RPC.appendData, fs.readFileSync(path)))) {
    const error = first(first(reply, REPLY.appended), 2);
    if (error?.length) throw new Error(Buffer.from(error).toString());
  }
  call(METHOD.finalize);
}

async function main([path, ...queries]) {
  const call = caller(await startEngine());
  load(call, path);
  const answers = queries.map((query) =>
    rows(call(METHOD.query, block(RPC.queryArgs, block(1, query))).map((r) => first(r, REPLY.queried))));
  process.stdout.write(JSON.stringify(answers) + "\n");
}

main(process.argv.slice(2));
