"""What the benchmarks touch of vLLM's server: so many words of one token each, one every STEP_S."""

import argparse
import asyncio
import json
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

STEP_S = 2e-3


async def health(_request):
    return Response()


async def version(_request):
    return JSONResponse({"version": "0.0.fake"})


async def complete(request):
    told = await request.json()
    assert told["ignore_eos"]
    assert told["stream_options"] == {"include_usage": True}
    return StreamingResponse(events(told["max_tokens"]), media_type="text/event-stream")


async def events(num_tokens):
    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    for _ in range(num_tokens):
        await asyncio.sleep(STEP_S)
        yield event(choices=[{"index": 0, "delta": {"content": " baba"}}])
    yield event(choices=[], usage={"completion_tokens": num_tokens})
    yield "data: [DONE]\n\n"


def event(**fields):
    return f"data: {json.dumps(fields)}\n\n"


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "served-model-name", "load-format", "dtype", "host"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max-model-len", "kv-cache-memory-bytes", "seed", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--enable-prefix-caching", action="store_true", required=True)
    told = parser.parse_args()
    assert Path(told.model, "tokenizer.json").exists()
    routes = [
        Route("/health", health),
        Route("/version", version),
        Route("/v1/chat/completions", complete, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), host=told.host, port=told.port, log_level="warning")


if __name__ == "__main__":
    main()
