"""The dashboard in a browser: a form takes the token once, a cookie stands for it afterwards.

    GET / without cookie ──> 401 and the form ── POST /login, right token ──> cookie, back to /

The cookie holds its time and a MAC under the token, never the token: cookies of one host are
sent to every port of it. It opens reading only, so no other site's page can act with it, and a new
token ends it. No state: any replica of the gateway knows it.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from urllib.parse import parse_qs

from itsdangerous import TimestampSigner
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from areal.chassis.http_auth import App, BearerAuth, Scope, Send, answer
from areal.security import Security

LIFETIME_S = 7 * 24 * 3600
_PAGE = Path(__file__).parent / "static" / "login.html"
_ERROR_MARK = "<!-- error -->"
_MAX_FORM_BYTES = 4096
_FORM_WITHIN_S = 10.0


class Sessions:
    """Issues and checks the cookie."""

    def __init__(self, security: Security, namespace: str) -> None:
        self.security = security
        # Two runs on one host share its cookies: each has its own.
        # No name holds a dot: a-b/c and a/b-c stay apart.
        self.cookie = "areal-" + namespace.replace("/", ".")
        salt = f"areal-gateway session {self.cookie}"
        # The last key signs; during a rotation, cookies of the previous token stay valid.
        keys = [key for key in (security.previous_token, security.token) if key]
        self._signer = TimestampSigner(keys, salt=salt, digest_method=hashlib.sha256)

    def issue(self) -> str:
        """Returns a new cookie value that is valid for LIFETIME_S."""
        return self._signer.sign("read").decode()

    def valid(self, value: str) -> bool:
        """Whether this gateway issued it with the current token, and it has not expired."""
        return self._signer.validate(value.encode(errors="replace"), max_age=LIFETIME_S)


class DashboardAuth(BearerAuth):
    """The token, or for reading a cookie; a person without either gets the form."""

    def __init__(self, app: App, *, sessions: Sessions) -> None:
        super().__init__(
            app, security=sessions.security, open_paths=frozenset({"/healthz", "/login"})
        )
        self._sessions = sessions

    def admits(self, scope: Scope) -> bool:
        """Also admits the form's style sheet, read-only sessions, and agents with own keys."""
        if super().admits(scope) or scope["path"].startswith("/sessions/"):
            return True
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return False
        if scope["path"].startswith("/static/"):
            return True
        return self._sessions.valid(HTTPConnection(scope).cookies.get(self._sessions.cookie, ""))

    async def refuse(self, scope: Scope, send: Send) -> None:
        """Sends the form to a person, or one line of JSON to a program."""
        if scope["path"] == "/":
            await answer(scope, send, _PAGE.read_bytes(), "text/html; charset=utf-8")
        else:
            await super().refuse(scope, send)


async def log_in(request: Request, sessions: Sessions) -> Response:
    """Takes the form; a right token is answered with the cookie."""
    body = b""
    try:
        async with asyncio.timeout(_FORM_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > _MAX_FORM_BYTES:
                    break
    except TimeoutError:
        # Open to everyone, so no one may keep a connection with it.
        return Response(status_code=408, headers={"Connection": "close"})
    token = parse_qs(body[:_MAX_FORM_BYTES].decode(errors="replace")).get("token", [""])[0].strip()
    if not sessions.security.admits(f"Bearer {token}"):
        page = _PAGE.read_text("utf-8").replace(_ERROR_MARK, '<p class="wrong">Wrong token.</p>')
        headers = {"Cache-Control": "no-store", "WWW-Authenticate": "Bearer"}
        return HTMLResponse(page, status_code=401, headers=headers)
    response = RedirectResponse("./", status_code=303)
    response.set_cookie(
        sessions.cookie,
        sessions.issue(),
        max_age=LIFETIME_S,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response
