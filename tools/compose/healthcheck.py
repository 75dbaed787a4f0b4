#!/usr/bin/env -S python3 -IS
"""Whether a process answers: `healthcheck http://HOST:PORT/PATH` or `healthcheck redis://HOST:PORT`.

Runs every few seconds in every container, so it imports next to nothing.
"""

import socket
import sys

scheme, _, rest = sys.argv[1].partition("://")
address, _, path = rest.partition("/")
host, _, port = address.rpartition(":")
if scheme == "redis":
    question, answers = b"PING\r\n", (b"+PONG", b"-NOAUTH")  # asking for a password is alive, too
else:
    question = f"GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode()
    answers = (b"HTTP/1.0 200", b"HTTP/1.1 200")
try:
    with socket.create_connection((host, int(port)), timeout=2.0) as connection:
        connection.sendall(question)
        answer = connection.recv(512)
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
sys.exit(0 if answer.startswith(answers) else f"{sys.argv[1]}: {answer.decode(errors='replace')}")
