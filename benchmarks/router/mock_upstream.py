"""An HTTP upstream that answers every request with the script, after its latency."""

import argparse
import asyncio

import uvicorn
from starlette.types import Receive, Scope, Send

from benchmarks.router.script import PATHS, UPSTREAM_LATENCY_MS, answer_body

ANSWERS = {path: answer_body(dialect) for dialect, path in PATHS.items()}
JSON = [(b"content-type", b"application/json")]


async def upstream(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    body = ANSWERS.get(scope["path"], b"{}")
    if scope["path"] in ANSWERS:
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(UPSTREAM_LATENCY_MS / 1e3)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*JSON, length]})
    await send({"type": "http.response.body", "body": body})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    uvicorn.run(upstream, port=port, log_level="warning", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
