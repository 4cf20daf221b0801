"""The page at `/`: what the server does now, against what classic decoding would have made.

One HTML document with its styles and scripts inside, which asks `v1/speculation` once a second and
fetches nothing else from anywhere. It is put together from four files so that each can be read; the
policy that goes with it names the hashes of exactly these styles and scripts, so nothing else runs.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

CONTENT_TYPE = "text/html; charset=utf-8"

_STYLE = ("page.css",)
_SCRIPT = ("charts.js", "page.js")


@cache
def page() -> str:
    """Return the document."""
    html = _read("page.html")
    html = html.replace("/* style */", _joined(_STYLE))
    return html.replace("/* script */", _joined(_SCRIPT))


@cache
def headers() -> dict[str, str]:
    """Return the headers that the document is to be sent with."""
    rules = {
        "default-src": "'none'",
        "style-src": f"'sha256-{_digest(_joined(_STYLE))}'",
        "script-src": f"'sha256-{_digest(_joined(_SCRIPT))}'",
        "img-src": "data:",  # the icon
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in rules.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _joined(names: tuple[str, ...]) -> str:
    return "\n" + "\n".join(_read(name) for name in names)


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
