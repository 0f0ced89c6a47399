"""Server-sent events of a completion stream: the time of each token, and the usage at the end."""

from __future__ import annotations

from typing import Any

import orjson


class TokenStream:
    """Parses body chunks with their arrival times. An event may span several chunks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._rest = b""
        self.first_token = 0.0
        self.last_token = 0.0
        self.gaps: list[float] = []
        self.input_tokens = -1
        self.output_tokens = -1
        self.finished = False  # [DONE] was seen
        self.error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens counted by the server; without a count, the number of events with choices."""
        if self.output_tokens >= 0:
            return self.output_tokens
        return len(self.gaps) + 1 if self.first_token else 0

    def feed(self, chunk: bytes, now: float) -> None:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event: Any = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = f"an event is not JSON: {data[:80].decode(errors='replace')}"
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self.error = str(event["error"])[:300]
        if event.get("choices"):
            self._token(now)
        if usage := event.get("usage"):
            self.input_tokens = usage.get("prompt_tokens", self.input_tokens)
            self.output_tokens = usage.get("completion_tokens", self.output_tokens)

    def _token(self, now: float) -> None:
        if self.first_token:
            self.gaps.append(now - self.last_token)
        else:
            self.first_token = now
        self.last_token = now
