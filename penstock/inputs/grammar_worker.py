"""The disposable process that compiles grammars first. `grammar_sandbox` starts this file as a script.

It loads the vocabulary once and forks for every grammar. Only the fork compiles, under limits of time, memory
and stack, so a grammar that crashes the library or exceeds a limit only ends the fork. The file imports only
the standard library and llguidance: it starts fast and holds no secrets. One JSON document per line:

    setup    {"tokenizer_file", "vocab_size", "eos_token_ids"} → {"error": text or null}
    request  {"id", "source" or "gbnf", "max_seconds", "max_bytes", "stack_bytes", "max_mask_seconds"}
             → {"id", "error": text, "died": signal or null, "num_bytes": peak growth, "lark": text of GBNF}
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import resource
import selectors
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_NUM_STEPS = 8  # tokens of the random walk through each grammar
_NONZERO = re.compile(rb"[^\0]")
_OUT_OF_MEMORY = int(signal.SIGABRT)  # signal that ends the library if an allocation fails


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(10)  # serving has priority over compiling
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.buffer.readline() or b"null")
    if setup is None:
        return
    try:
        tokenizer = _load(setup)
    except Exception as error:  # the library can raise any exception for an unreadable tokenizer
        _reply({"error": str(error) or type(error).__name__})
        return
    _reply({"error": None})
    gc.freeze()  # forks share these pages
    _serve(tokenizer)


def _load(setup: dict[str, Any]) -> Any:
    import llguidance

    return llguidance.LLTokenizer(
        setup["tokenizer_file"], n_vocab=setup["vocab_size"], eos_token=setup["eos_token_ids"]
    )


def _reply(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def _serve(tokenizer: Any) -> None:
    """Fork for each request and forward the answers, until standard input closes."""
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    forks: dict[int, tuple[int, int, bytearray]] = {}  # pipe → request id, process id, the answer so far
    received = bytearray()
    while True:
        for key, _ in ready.select():
            data = os.read(key.fd, 1 << 20)
            if key.fd == 0:
                if not data:
                    for _, pid, _ in forks.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                received += data
                *lines, rest = received.split(b"\n")
                received = bytearray(rest)
                for line in lines:
                    request = json.loads(line)
                    pid, pipe = _fork(tokenizer, request)
                    forks[pipe] = request["id"], pid, bytearray()
                    ready.register(pipe, selectors.EVENT_READ)
            elif data:
                forks[key.fd][2].extend(data)
            else:
                ready.unregister(key.fd)
                os.close(key.fd)
                request_id, pid, answer = forks.pop(key.fd)
                _, status = os.waitpid(pid, 0)
                died = None if answer else os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                found = json.loads(answer) if answer else {"error": "", "num_bytes": 0}
                _reply({"id": request_id, "died": died, **found})


def _fork(tokenizer: Any, request: dict[str, Any]) -> tuple[int, int]:
    """Fork a process that checks this grammar; return its id and the pipe for its answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    status = 1
    try:
        os.close(reader)
        _limit(request)
        answer: list[dict[str, Any]] = []
        threading.stack_size(request["stack_bytes"])
        thread = threading.Thread(target=lambda: answer.append(_check(tokenizer, request)))
        thread.start()
        thread.join()
        os.write(writer, json.dumps(answer[0]).encode())
        status = 0
    except MemoryError:
        os.kill(os.getpid(), _OUT_OF_MEMORY)
    finally:
        os._exit(status)


def _limit(request: dict[str, Any]) -> None:
    """Limit time and memory. The kernel enforces both, whatever the library does."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["max_seconds"])
    cpu_s = int(request["max_seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    with contextlib.suppress(FileNotFoundError):  # a system without /proc: memory is not bounded
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        max_bytes = mapped + request["stack_bytes"] + request["max_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def _check(tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Compile the grammar and walk through it, as the engine will."""
    import llguidance

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source, lark = request.get("source"), ""
    if source is None:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            lark = any_to_lark(request["gbnf"])
        except Exception as failure:  # the converter can raise any exception for a bad grammar
            return {"error": f"it is not valid GBNF: {failure}", "num_bytes": 0}
        source = llguidance.LLMatcher.grammar_from_lark(lark)
    error = _walk(llguidance.LLMatcher(tokenizer, source, log_level=0), request["max_mask_seconds"])
    num_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"error": error, "num_bytes": num_kib * 1024, "lark": lark}


def _walk(matcher: Any, max_mask_s: float) -> str:
    """Follow the grammar along randomly drawn tokens. Return why that fails; "" if it does not."""
    if matcher.is_error():
        return str(matcher.get_error())
    draw = random.Random(0)
    for step in range(_NUM_STEPS):
        began_s = time.thread_time()
        bits = matcher.compute_bitmask()
        took_s = time.thread_time() - began_s
        if matcher.is_error():
            # Later errors depend on the drawn tokens. In the engine, they fail the request.
            return str(matcher.get_error()) if step == 0 else ""
        if took_s > max_mask_s:
            return f"finding the tokens that may come next takes {took_s:.1f} s; use a simpler one"
        token = _draw(draw, bits)
        if token < 0 or matcher.is_stopped() or not matcher.consume_token(token):
            break
    return ""


def _draw(draw: random.Random, bits: bytes) -> int:
    """Draw a token that the mask allows; -1 if it allows none."""
    found = _NONZERO.search(bits, draw.randrange(len(bits))) or _NONZERO.search(bits)
    if found is None:
        return -1
    at = found.start()
    return at * 8 + draw.choice([bit for bit in range(8) if bits[at] >> bit & 1])


if __name__ == "__main__":
    main()
