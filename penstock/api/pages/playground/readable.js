// Tokens as people read them: spaces shown, parts of words marked, bytes joined to characters.

/** The bytes that byte-level vocabularies write as printable characters: U+0100 and up stand for the others. */
const BYTE_OF = (() => {
  const table = new Map();
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const isPrintable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    table.set(String.fromCodePoint(isPrintable ? byte : next++), byte);
  }
  return table;
})();
const encoder = new TextEncoder();

/** The bytes of a token; null where the vocabulary writes text. */
function tokenBytes(token, style) {
  if (style === "byte_level") {
    const bytes = Array.from(token, (char) => BYTE_OF.get(char));
    return bytes.includes(undefined) ? [...encoder.encode(token)] : bytes;  // an added token is plain text
  }
  const byte = style === "metaspace" && /^<0x([0-9A-F]{2})>$/.exec(token);
  return byte ? [parseInt(byte[1], 16)] : null;
}

function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

/** The number of bytes that are missing from the last character; 0 if it is whole. */
function missing(bytes) {
  for (let back = 1; back <= Math.min(4, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if ((byte & 0xc0) === 0x80) continue;
    const wanted = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return Math.max(0, wanted - back);
  }
  return 0;
}

const hex = (bytes) => bytes.map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");

/** A token without regard to its neighbours, as text. */
export function readable(token, style) {
  if (token === null || token === undefined) return "?";
  if (style === "wordpiece") return token.replace(/^##(?=.)/, "");
  const bytes = tokenBytes(token, style);
  if (bytes === null) return style === "metaspace" ? token.replaceAll("\u2581", " ") : token;
  return decoded(bytes) ?? `‹${hex(bytes)}›`;
}

/**
 * Tokens in groups: usually one token and its text; several where a character is split between them.
 * Each group has `text`, `tokens` (indexes), `bytes` (of each token, where the text is split) and `joins`
 * (it continues the word before it).
 */
export function groups(tokens, style) {
  const out = [];
  let open = null;  // tokens whose bytes are not a whole character yet
  const close = () => {
    if (!open) return;
    const text = decoded(open.all);
    if (text === null) open.tokens.forEach((index, at) => out.push({ text: `‹${hex(open.parts[at])}›`, tokens: [index], bytes: null }));
    else out.push({ text, tokens: open.tokens, bytes: open.parts.map(hex) });
    open = null;
  };
  tokens.forEach((token, index) => {
    const bytes = token === null ? null : tokenBytes(token, style);
    if (open && (bytes === null || (bytes[0] & 0xc0) !== 0x80)) close();
    if (!open && (bytes === null || (decoded(bytes) !== null))) {
      out.push({ text: readable(token, style), tokens: [index], bytes: null, joins: style === "wordpiece" && /^##./.test(token ?? "") });
      return;
    }
    open ??= { tokens: [], parts: [], all: [] };
    open.tokens.push(index);
    open.parts.push(bytes);
    open.all.push(...bytes);
    if (missing(open.all) === 0) close();
  });
  close();
  return out;
}

/** Spaces and line ends made visible. */
export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");

/** Whether a token looks like a special one, such as [CLS] or <|im_end|>. The server knows for sure. */
export const looksSpecial = (token) => /^(\[.+\]|<.+>)$/s.test(token ?? "") && !/^<0x[0-9A-F]{2}>$/.test(token);
