"""The real router app over a fake backend, in process or on a loopback port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from router.app import create_app
from router.backends.base import Backend
from router.capabilities import Capability
from router.catalog import Catalog, ServedModel
from router.config import RouterConfig
from router.identity import KeyRing, hash_key
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

KEY = "sk-test-key"
MODEL = "smollm2-135m-instruct"
ALIAS = "small"


def catalog(folder: Path, max_model_len: int = 8192) -> Catalog:
    tokenizer = Tokenizer.from_folder(folder)
    model = ServedModel(
        id=MODEL,
        display_name="SmolLM2",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        max_model_len=max_model_len,
        vocab_size=49152,
        eos_token_ids=(2,),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_folder(folder, tokenizer.special_tokens),
        capabilities=frozenset({Capability.STRUCTURED_OUTPUT}),
    )
    return Catalog([model], {ALIAS: MODEL})


def router_app(
    folder: Path, backend: Backend, config: RouterConfig | None = None, max_model_len: int = 8192
) -> ASGIApp:
    return create_app(
        catalog=catalog(folder, max_model_len),
        backend=backend,
        keys=KeyRing({hash_key(KEY): "red", hash_key("sk-blue"): "blue"}),
        config=config or RouterConfig(),
    )


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """The base URL of `app` on a free loopback port."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
