"use strict";
// Draws openapi.json with Scalar. Everything that would reach another host is off, and the page's
// Content-Security-Policy forbids the rest.
const base = new URL(location.pathname.replace(/docs\/*$/, ""), location.origin).href; // a proxy may add a prefix

Scalar.createApiReference("#reference", {
  url: base + "openapi.json",
  servers: [{ url: base.replace(/\/$/, "") }],
  authentication: { preferredSecurityScheme: "key" },
  persistAuth: false,
  agent: { disabled: true },
  mcp: { disabled: true },
  telemetry: false,
  withDefaultFonts: false,
  showDeveloperTools: "never",
  hideClientButton: true,
  operationTitleSource: "path",
  modelsSectionLabel: "Types",
  defaultOpenFirstTag: false,
  orderSchemaPropertiesBy: "preserve",
  defaultHttpClient: { targetKey: "shell", clientKey: "curl" },
  hiddenClients: {
    c: true, clojure: true, csharp: ["restsharp"], dart: true, fsharp: true, http: true, julia: true, kotlin: true,
    objc: true, ocaml: true, php: true, powershell: true, r: true, ruby: true, swift: true,
    java: ["asynchttp", "okhttp", "unirest"], js: ["axios", "jquery", "ofetch", "xhr"], node: ["axios", "ofetch", "undici"],
    python: ["aiohttp", "httpx_async", "python3"], shell: ["httpie", "wget"],
  },
});
