"""The HTTP application: every route behind the token, or closed to foreign pages."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route as StarletteRoute

from areal.chassis import tracing
from areal.chassis.http_auth import BearerAuth
from areal.chassis.http_tracing import TracedRequests
from areal.security import Security
from areal_inference.frontend import Frontend
from areal_inference.http_api.adapters import adapter_routes
from areal_inference.http_api.chat import chat_routes
from areal_inference.http_api.control import control_routes
from areal_inference.http_api.generation import generate_route
from areal_inference.http_api.info import info_routes

_OPEN_PATHS = frozenset({"/health", "/ready"})


def build_app(frontend: Frontend, security: Security) -> Starlette:
    """Build a server's HTTP application; /generate is first: routes are tried in order."""
    routes = [StarletteRoute("/generate", generate_route(frontend), methods=["POST"])]
    app = Starlette(
        routes=[
            *routes,
            *info_routes(frontend),
            *adapter_routes(frontend, security.headers()),
            *chat_routes(frontend),
            *control_routes(frontend, security.headers()),
        ]
    )
    app.add_middleware(BearerAuth, security=security, open_paths=_OPEN_PATHS)
    if tracing.enabled():
        app.add_middleware(TracedRequests)
    return app
