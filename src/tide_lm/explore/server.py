"""The server of the page: it answers this machine alone unless asked otherwise, and no other site."""

import threading
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from gradio import Blocks

LARGEST = 2**20  # bytes of a question


class Guard:
    """Refuses what pages of other sites ask for, and what is too large; no page may show this one within."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import Headers, MutableHeaders
        from starlette.responses import PlainTextResponse

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Frame-Options"] = "DENY"
            await send(message)

        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin, size = headers.get("origin"), headers.get("content-length", "")
            has_size = size.isdecimal() and int(size) <= LARGEST
            if origin is not None and urlsplit(origin).netloc != headers.get("host"):
                await PlainTextResponse(f"{origin} may not use this page", 403)(scope, receive, send)
                return
            if scope["method"] not in ("GET", "HEAD", "OPTIONS") and not has_size:
                said = f"a question may have at most {LARGEST:,} bytes, and must state its size"
                await PlainTextResponse(said, 413)(scope, receive, send)
                return
        await self.app(scope, receive, sent)


def serve(page: "Blocks", host: str, port: int, names: Sequence[str], log: Callable[[str], None]) -> None:
    """Serve the page until it is stopped, under these names or, if there are none, under any.

    `log` gets the address once the page is served.
    """
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # Another page's name may lead to this machine, which makes a browser take it for this page.
    known = Middleware(TrustedHostMiddleware, allowed_hosts=names or ["*"], www_redirect=False)
    at = f"[{host}]" if ":" in host else host
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    ink = {"block_info_text_color": "*body_text_color", "block_info_text_color_dark": "*body_text_color"}
    parts = {
        name: (files(__package__) / name).read_text(encoding="utf-8") for name in ("links.js", "page.css")
    }
    page.queue(default_concurrency_limit=32)  # most of them wait for the model
    page.launch(
        app_kwargs={"middleware": [known, Middleware(Guard)]},
        prevent_thread_lock=True,
        server_name=at,
        server_port=port,
        share=False,
        quiet=True,
        css=parts["page.css"],
        head=f"<script>{parts['links.js']}</script>",
        theme=theme.set(**ink),
        footer_links=[],
        allowed_paths=[],
        max_file_size=1,  # byte: nothing is to be uploaded
        enable_monitoring=False,
        run_history=False,
        mcp_server=False,
        ssr_mode=False,
    )
    log(f"http://{at}:{port}")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
