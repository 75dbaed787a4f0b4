"""`helm test`: whether the release works, asked of its gateway. Needs nothing but Python."""

import json
import os
import sys
import time
import urllib.error
import urllib.request

URL, DEADLINE_S = sys.argv[1], 120.0


def get(path, token):
    """(status code, body) of one request."""
    request = urllib.request.Request(URL + path)  # noqa: S310 - the release's own gateway
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {}


def why_not():
    """What is missing; empty: nothing."""
    try:
        code, _ = get("/v1/status", "")
        if code != 401:
            return f"/v1/status without a token: expected 401, got {code}"
        code, status = get("/v1/status", os.environ["AREAL_TOKEN"])
    except OSError as error:
        return f"{URL}: {error}"
    if code != 200:
        return f"/v1/status: expected 200, got {code}"
    for name in ("ledger", "servers"):
        source = status["sources"][name]
        if not source["ok"]:
            return f"{name}: {source['error']}"
    serving = sum(server["state"] == "serving" for server in status["servers"])
    return "" if serving else "no inference server serves the current weights"


deadline = time.monotonic() + DEADLINE_S
while reason := why_not():
    if time.monotonic() > deadline:
        sys.exit(f"not working after {DEADLINE_S:.0f} s: {reason}")
    time.sleep(2)
print("the gateway asks for its token; ledger and inference servers answer")  # noqa: T201
