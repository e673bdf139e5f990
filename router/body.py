"""Reading a request body, never more of it than allowed."""

from starlette.requests import ClientDisconnect, Request

from router.errors import InvalidRequest, RequestTooLarge


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises RequestTooLarge, or InvalidRequest for a compressed one."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise InvalidRequest(f"content-encoding {encoding!r} is not supported: send it plain")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(int(declared), max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(num_bytes, max_bytes)
            parts.append(part)
    except ClientDisconnect as exc:
        raise InvalidRequest("the client left before its request was complete") from exc
    return b"".join(parts)


def _too_large(num_bytes: int, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"request body of at least {num_bytes} bytes exceeds the limit of {max_bytes} bytes"
    )
